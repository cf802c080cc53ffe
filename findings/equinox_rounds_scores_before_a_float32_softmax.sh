#!/usr/bin/env bash
# Equinox's MultiheadAttention computes the softmax of bfloat16 inputs in float32, of scores that are rounded already.
#
# One expects a softmax in float32 to tell two close scores apart, as `jax.nn.dot_product_attention` does: both programs
# have an exponential in float32. Equinox 0.13.8 multiplies queries and keys in bfloat16 and casts the product, so scores
# between 16 and 32 are multiples of 1/8: two keys with scores of 16.03 and 16 get the same weight. Near 100 they are
# multiples of 1/2, and a weight of 0.55 becomes 0.5.
# Seen while the conventions of attention layers were measured: the dtype of the exponential does not show it.
# Instead: cast the layer and its inputs to float32 where scores are large, or call `jax.nn.dot_product_attention`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python3 python3.12 python3.11; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "equinox==0.13.8" "jax==0.10.2" "jaxlib==0.10.2"
cat > "$folder/scores.py" <<'PY'
import re
import sys

import equinox
import jax
import jax.numpy as jnp

H = 16
layer = equinox.nn.MultiheadAttention(1, H, dtype=jnp.bfloat16, key=jax.random.key(0))
layer = jax.tree.map(lambda x: jnp.eye(H, dtype=x.dtype) if equinox.is_array(x) else x, layer)
values = jnp.eye(2, H, dtype=jnp.bfloat16)


def of_equinox(q, k):
    return layer(q, k, values)[0, 0]


def of_jax(q, k):
    return jax.nn.dot_product_attention(q[:, None], k[:, None], values[:, None])[0, 0, 0]


wrong = []
for score in (16, 100):
    # Scores of q·k/4: `score` + 1/32 and `score`, or `score` + 7/32 and `score`.
    step = 1 / 32 if score == 16 else 7 / 32
    q = jnp.zeros((1, H)).at[0, :2].set(jnp.array([score, 1.0])).astype(jnp.bfloat16)
    k = jnp.zeros((2, H)).at[:, 0].set(4).at[0, 1].set(4 * step).astype(jnp.bfloat16)
    exact = jax.nn.sigmoid(step)
    weights = {f.__name__: float(f(q, k)) for f in (of_equinox, of_jax)}
    print(f"scores {score} + {step:.3f} and {score}: weight {exact:.4f}, {weights}")
    wrong.append([abs(weight - exact) > 0.005 for weight in weights.values()])
program = str(jax.make_jaxpr(of_equinox)(q, k))
dtypes = set(re.findall(r":(\w+)\[[^\]]*\] = exp ", program))
print("exponential of Equinox in", dtypes)
sys.exit(wrong != [[True, False]] * 2 or dtypes != {"f32"})
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/scores.py" 2>/dev/null
