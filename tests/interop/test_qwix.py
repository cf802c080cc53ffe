"""LoRA, QLoRA and quantization by qwix, of models of Hugging Face folders and of nnx layers."""

import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import flax_mha.nnx
from flax_mha import interop, sharding
from tests.interop.odd_configs import CONFIGS
from tests.interop.test_files import CONFIG, variables

qwix = pytest.importorskip("qwix", reason="needs the extra families")

RANK, ALPHA = 2, 3.0
PLACES = ".*(query|key|value|out|up|gate|down)"
MODELS = {"qwen3": CONFIG, "bert": CONFIGS["bert"], "gpt2": CONFIGS["gpt2"]}
TOKENS = np.arange(10).reshape(2, 5)
X = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
GROUPS = {
    "int8": {"weight_qtype": "int8"}, "int4": {"weight_qtype": "int4", "tile_size": 4},
    "nf4": {"weight_qtype": "nf4", "tile_size": 4},
}  # fmt: skip


@pytest.fixture
def loaded(request: Any, tmp_path: Path) -> tuple[Any, Any]:
    config = MODELS[request.param]
    interop.save(config, variables(config), tmp_path)
    return interop.load(tmp_path, as_jax=True)


def with_lora(model: Any, base: Any, provider: Any) -> tuple[Any, Any]:
    """Return a model with LoRA, and the base's parameters with random ones of LoRA."""
    lora = qwix.apply_lora_to_model(model, provider)
    # Under jit or eval_shape, qwix finds no quantized kernel, here as in Flax's DenseGeneral.
    flat = flatten_dict(lora.init(jax.random.key(0), TOKENS)["params"], sep="/")
    assert {name for name in flat if "_lora_" not in name} == {*flatten_dict(base, sep="/")}
    rng = np.random.default_rng(1)
    return lora, {
        name: jnp.asarray(rng.normal(0, 0.3, x.shape), "float32")
        for name, x in flat.items() if "_lora_" in name
    }  # fmt: skip


def merged(base: Any, added: Any, scale: float = ALPHA / RANK) -> Any:
    """Return parameters to which the products of LoRA are added."""
    flat = flatten_dict(base, sep="/")
    for name in added:
        if name.endswith("_lora_a"):
            a, b = (added[name.removesuffix("a") + part] for part in "ab")
            path = name.removesuffix("_lora_a")
            flat[path] = flat[path] + scale * jnp.tensordot(a, b, 1)
    return unflatten_dict(flat, sep="/")


def joined(base: Any, added: Any) -> Any:
    return unflatten_dict(flatten_dict(base, sep="/") | added, sep="/")


PROVIDER = functools.partial(qwix.LoraProvider, module_path=PLACES, rank=RANK, alpha=ALPHA)


def close(a: Any, b: Any) -> None:
    scale = np.abs(b).max()
    np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=1e-4)


@pytest.mark.parametrize(
    "loaded", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "gpt2"))],
    indirect=True,
)  # fmt: skip
def test_lora_is_a_product_added_to_each_kernel(loaded: Any) -> None:
    """Outputs and gradients, and the plain model before and after, outside jit and within."""
    model, params = loaded[0], loaded[1]["params"]
    plain = jax.jit(model.apply)
    before = plain({"params": params}, TOKENS)
    lora, added = with_lora(model, params, PROVIDER())
    kernels = [x for x in flatten_dict(params, sep="/") if x.endswith("kernel")]
    assert len(added) == 2 * len([x for x in kernels if "layers_" in x]) > 0
    wanted = plain({"params": merged(params, added)}, TOKENS)
    assert np.abs(wanted - before).max() > 0.1
    for apply in (lora.apply, jax.jit(lora.apply)):
        close(apply({"params": joined(params, added)}, TOKENS), wanted)
    # The plain model is traced again, as it was before.
    np.testing.assert_array_equal(jax.jit(model.apply)({"params": params}, TOKENS), before)
    cotangent = np.random.default_rng(2).normal(size=wanted.shape).astype(np.float32)

    def loss(apply: Any, combine: Any, added: Any) -> Any:
        return jnp.vdot(apply({"params": combine(params, added)}, TOKENS), cotangent)

    found = jax.jit(jax.grad(functools.partial(loss, lora.apply, joined)))(added)
    grads = jax.jit(jax.grad(functools.partial(loss, model.apply, merged)))(added)
    jax.tree.map(close, found, grads)


def dequantized(params: Any) -> Any:
    """Return parameters with the values of quantized ones."""
    is_quantized = lambda x: hasattr(x, "array")  # noqa: E731
    return jax.tree.map(
        lambda x: qwix.dequantize(x.array) if is_quantized(x) else x, params, is_leaf=is_quantized
    )


def quantized(model: Any, params: Any) -> Any:
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    return qwix.quantize_params(params, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("loaded", ["qwen3", "bert"], indirect=True)
def test_quantized_models_compute_with_quantized_kernels(loaded: Any, group: str) -> None:
    """PTQ and QLoRA: as the plain model with the values of the quantized kernels."""
    model, params = loaded[0], loaded[1]["params"]
    plain = jax.jit(model.apply)({"params": params}, TOKENS)
    rule = qwix.QuantizationRule(module_path=PLACES, **GROUPS[group])
    small = qwix.quantize_model(model, qwix.PtqProvider([rule]))
    given = quantized(small, params)
    wanted = jax.jit(model.apply)({"params": dequantized(given)}, TOKENS)
    assert 0.2 > np.abs(wanted - plain).mean() / np.abs(plain).mean() > 1e-4
    for apply in (small.apply, jax.jit(small.apply)):
        close(apply({"params": given}, TOKENS), wanted)
    lora, added = with_lora(model, params, PROVIDER(**GROUPS[group]))
    given = quantized(lora, params)
    wanted = jax.jit(model.apply)({"params": merged(dequantized(given), added)}, TOKENS)
    for apply in (lora.apply, jax.jit(lora.apply)):
        close(apply({"params": joined(given, added)}, TOKENS), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("loaded", ["qwen3"], indirect=True)
def test_lora_on_a_mesh(loaded: Any) -> None:
    """Auto axes. LoRA's parameters are sharded as their kernels."""
    model, params = loaded[0], loaded[1]["params"]
    lora, added = with_lora(model, params, PROVIDER())
    wanted = model.apply({"params": merged(params, added)}, TOKENS)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        places = sharding.of(lora.init, jax.random.key(0), TOKENS)
        given = jax.device_put({"params": joined(params, added)}, places)
        found = jax.jit(lora.apply)(given, TOKENS)
    close(jax.device_get(found), wanted)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = flax_mha.nnx.MultiHeadAttention(4, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.attention(x)


@pytest.mark.slow
@pytest.mark.parametrize("group", [None, *GROUPS])
def test_nnx_layers_take_lora_and_quantized_kernels(group: str | None) -> None:
    model, options = Model(nnx.Rngs(0)), GROUPS.get(group or "", {})
    plain = model(X)
    lora = qwix.apply_lora_to_model(model, PROVIDER(**options), X, rngs=nnx.Rngs(1))
    copy = nnx.clone(model)
    for name in ("query", "key", "value", "out"):
        theirs, ours = getattr(lora.attention, name), getattr(copy.attention, name)
        theirs.kernel_lora_b[...] = jnp.ones(theirs.kernel_lora_b.shape) / 7
        product = jnp.tensordot(theirs.kernel_lora_a[...], theirs.kernel_lora_b[...], 1)
        kernel = theirs.kernel[...] if group is None else dequantized(theirs.kernel[...])
        ours.kernel[...] = kernel + ALPHA / RANK * product
    close(lora(X), copy(X))
    close(nnx.jit(lambda model, x: model(x))(lora, X), copy(X))
    np.testing.assert_array_equal(model(X), plain)
    if group is not None:
        rule = qwix.QuantizationRule(module_path=PLACES, **options)
        small = qwix.quantize_model(model, qwix.PtqProvider([rule]), X)
        assert 0.2 > np.abs(small(X) - plain).mean() / np.abs(plain).mean() > 1e-4
