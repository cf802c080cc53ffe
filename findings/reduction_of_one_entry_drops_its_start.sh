#!/usr/bin/env bash
# `jax.lax.reduce` with a start that limits the result has no limit along an axis of one entry.
#
# One expects max over an axis, started at a floor, to be at least that floor, as it is for two entries and more: a way
# to keep the maximum of a softmax finite where all scores are -inf, without another pass. Along an axis of one entry XLA
# replaces the reduction by a reshape, and the start is lost: the maximum is -inf, and exp(score - maximum) is NaN. A sum
# that starts at 5 loses the 5 as well. JAX 0.12.0.1 on a CPU, also outside `jit`; the program that JAX hands to XLA still
# has the start. The start of a reduction is only meant to be the identity of its operation, but nothing says that the
# result depends on the length of the axis.
# Seen in a softmax over one key, whose bias was -inf.
# Instead: reduce from the identity, and take the maximum with the floor after it, at least if the axis can have one entry.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python3 python3.12 python3.11; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1"
cat > "$folder/reduction.py" <<'PY'
import sys

import jax
import jax.numpy as jnp
from jax import lax

FLOOR = -3e38


def top(x):
    return lax.reduce(x, jnp.float32(FLOOR), lax.max, (1,))


def total(x):
    return lax.reduce(x, jnp.float32(5.0), lax.add, (1,))


print("jax", jax.__version__)
found = []
for entries in (2, 1):
    scores, ones = jnp.full((3, entries), -jnp.inf), jnp.ones((3, entries))
    program = jax.jit(top).lower(scores)
    assert "stablehlo.reduce" in program.as_text()
    numbers = jax.jit(top)(scores)[0], top(scores)[0], jax.jit(total)(ones)[0]
    print(entries, "entries: maximum {:.0e}, outside jit {:.0e}, sum {:.0f}".format(*numbers))
    found.append([float(x) for x in numbers])
floor = float(jnp.float32(FLOOR))
lost = float("-inf")
sys.exit(found != [[floor, floor, 7.0], [lost, lost, 1.0]])
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/reduction.py" 2>/dev/null
