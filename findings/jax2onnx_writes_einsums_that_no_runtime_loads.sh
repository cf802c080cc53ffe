#!/usr/bin/env bash
# jax2onnx converts a bfloat16 product to a file that ONNX's checker accepts and ONNX Runtime refuses.
#
# One expects a file that `onnx.checker.check_model` accepts to load. jax2onnx 0.17.1 writes `jnp.einsum` of bfloat16
# arrays as one `Einsum` of bfloat16, a type that ONNX's own definition of the operator does not list. The checker looks
# at types only with `full_check=True`. The same product in float32 loads.
# Seen when attention layers in bfloat16 were converted.
# Instead: convert in float32 (cast the parameters), and check with `full_check=True` or by loading the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python3 python3.12 python3.13; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax2onnx==0.17.1" "jax==0.10.2" "jaxlib==0.10.2" "flax==0.12.8" "onnxruntime==1.32.0"
cat > "$folder/einsum.py" <<'PY'
import importlib.metadata
import sys

import jax
import jax.numpy as jnp
import onnx
import onnxruntime
from jax2onnx import to_onnx


def outcomes(dtype):
    def product(x):
        x = x.astype(dtype)
        return jnp.einsum("btnh,bsnh->bnts", x, x).astype(jnp.float32)

    with jax.disable_jit():
        model = to_onnx(product, [jax.ShapeDtypeStruct((2, 3, 4, 8), "float32")])
    found = []
    for check in (
        lambda: onnx.checker.check_model(model),
        lambda: onnx.checker.check_model(model, full_check=True),
        lambda: onnxruntime.InferenceSession(model.SerializeToString()),
    ):
        try:
            check()
            found.append("accepts")
        except Exception:
            found.append("refuses")
    return found


print("jax2onnx", importlib.metadata.version("jax2onnx"), "onnxruntime", onnxruntime.__version__)
half, whole = outcomes(jnp.bfloat16), outcomes(jnp.float32)
print("checker, full check, runtime of bfloat16:", half)
print("checker, full check, runtime of float32:", whole)
sys.exit(half != ["accepts", "refuses", "refuses"] or whole != ["accepts"] * 3)
PY
"$folder/venv/bin/python" "$folder/einsum.py"
