#!/usr/bin/env bash
# JAX's splash attention for TPUs can't be lowered under `jax_enable_x64`, whatever the dtype of its inputs.
#
# One expects a kernel of bfloat16 arrays to be the same with 64-bit types enabled, which a scientific program turns on
# for other parts. With JAX 0.12.0.1, indices of blocks are int32 where they come from the mask's tables and int64 where
# they come from Python: lowering ends in an internal error of Mosaic, "'arith.muli' op requires the same type for all
# operands".
# Seen when layers were tested under `jax_enable_x64`.
# Instead: call it inside `jax.enable_x64(False)`, or take another kernel.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python3 python3.12 python3.11; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1"
cat > "$folder/splash.py" <<'PY'
import sys

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

T = 256
x = jax.ShapeDtypeStruct((1, T, 128), jnp.bfloat16)


def loss(kernel, q, k, v):
    return kernel(q, k, v).astype(jnp.float32).sum()


def outcome(wide, gradient):
    with jax.enable_x64(wide):
        mask = masks.MultiHeadMask([masks.CausalMask((T, T))])
        kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
        program = jax.jit(jax.grad(loss, 1) if gradient else loss)
        try:
            program.trace(kernel, x, x, x).lower(lowering_platforms=("tpu",))
        except Exception as error:
            return type(error).__name__
    return "lowered"


found = [outcome(wide, gradient) for wide in (False, True) for gradient in (False, True)]
print(f"jax {jax.__version__}: 32 bits, forward and gradient: {found[:2]}; 64 bits: {found[2:]}")
sys.exit(found != ["lowered", "lowered", "VerificationError", "VerificationError"])
PY
"$folder/venv/bin/python" "$folder/splash.py"
