#!/usr/bin/env bash
# `jax.lax.top_k` on a CPU sorts the whole axis for bfloat16, and in JAX 0.10 for float32 too if only the k-th is used.
#
# One expects the k largest of 151,936 numbers to be selected in one pass, whatever their dtype and whatever is read of
# the result. XLA:CPU has a custom call for this, `TopK`, in float32 only: bfloat16 numbers are sorted whole, in JAX
# 0.10.2 and in 0.12.0.1. And in 0.10.2 a slice of the result, such as the k-th number as a threshold for sampling, turns
# the call in float32 into a sort of all numbers as well (in 0.12.0.1 no longer). It takes tens of times as long.
# Seen while a threshold for top-k sampling was timed.
# Instead: cast to float32 first, which keeps the order, and put `jax.lax.optimization_barrier` around the result
# before it is sliced.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python3; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "jaxlib==0.10.2"
cat > "$folder/top_k.py" <<'PY'
import re
import sys

import jax
import jax.numpy as jnp
from jax import lax


def compiled(function):
    """Return "TopK" or "sort", by what a program of logits calls."""
    x = jax.ShapeDtypeStruct((8, 151_936), jnp.float32)
    text = jax.jit(function).lower(x).compile().as_text()
    return "sort" if re.search(r" sort\(", text) else "TopK" if "TopK" in text else "neither"


def last(values):
    return [x[..., -1:] for x in values]


found = {
    "all of the result": compiled(lambda x: lax.top_k(x, 50)),
    "the k-th": compiled(lambda x: last(lax.top_k(x, 50))),
    "the k-th, after a barrier": compiled(
        lambda x: last(lax.optimization_barrier(lax.top_k(x, 50)))
    ),
    "all, in bfloat16": compiled(lambda x: lax.top_k(x.astype(jnp.bfloat16), 50)),
}
print("jax", jax.__version__)
for name, call in found.items():
    print(f"{name:26} {call}")
sys.exit(list(found.values()) != ["TopK", "sort", "TopK", "sort"])
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/top_k.py" 2>/dev/null
