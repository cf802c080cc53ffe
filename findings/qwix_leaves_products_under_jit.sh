#!/usr/bin/env bash
# qwix quantizes no product inside `jax.jit` or `jax.checkpoint` of a linen model's own code, and says nothing.
#
# One expects `qwix.quantize_model` to quantize every `jnp.einsum` that a rule's module path matches: outputs of int4 weights
# move by a few percent. A product in a helper function of the model does. The same helper under `jax.jit` or
# `jax.checkpoint` is left as it is, so that the "quantized" model is equal to the original to the bit, without a warning.
# qwix marks the arrays that are parameters, and finds the mark where the product runs; a transformation passes tracers in
# their place, which have none. qwix 0.1.8, Flax 0.12.8, JAX 0.10.2.
# Seen in an attention layer that jits its einsums to spare eager calls: LoRA and int8 passed it by.
# Instead: call products of parameters directly in a module (which may be under `nn.remat`), and compare a
# quantized model's output with the original's once: they must differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python3; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "jaxlib==0.10.2" "flax==0.12.8" "qwix==0.1.8"
cat > "$folder/quantized.py" <<'PY'
import importlib.metadata
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import qwix


def product(x, w):
    return jnp.einsum("td,df->tf", x, w)


WAYS = {
    "called directly": product,
    "under jax.jit": jax.jit(product),
    "under jax.checkpoint": jax.checkpoint(product),
}


class Model(nn.Module):
    way: str

    @nn.compact
    def __call__(self, x):
        return WAYS[self.way](x, self.param("w", nn.initializers.normal(1.0), (x.shape[-1], 8)))


def change(way):
    """Return the largest difference that int4 weights make, relative to the largest output."""
    model = Model(way)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.float32)
    variables = model.init(jax.random.key(0), x)
    rules = [qwix.QtRule(module_path=".*", weight_qtype="int4")]
    quantized = qwix.quantize_model(model, qwix.QtProvider(rules))
    out, plain = (m.apply(variables, x) for m in (quantized, model))
    return float(jnp.abs(out - plain).max() / jnp.abs(plain).max())


print(*(f"{name} {importlib.metadata.version(name)}" for name in ("qwix", "flax", "jax")))
found = {way: change(way) for way in WAYS}
for way, difference in found.items():
    print(f"{way:22} changed by int4 weights: {difference:.1%}")
direct, *others = found.values()
sys.exit(not (direct > 0.01 and others == [0.0, 0.0]))
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/quantized.py" 2>/dev/null
