"""Checks that any attention layer must pass, for layers with their own projections."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from flax_mha import Decoder, DecoderBlock, Encoder, EncoderBlock, LanguageModel, generate, sharding
from flax_mha.models import TokenEmbedding
from tests.support.decoding import cache_of, greedy
from tests.support.meshes import on
from tests.support.oracle import error, float64, random_like

KEY = jax.random.key(0)


def drawn(module: nn.Module, *inputs: Any) -> Any:
    """Return random parameters, including biases and scales, which would start at 0 and 1.

    Every projection must have a bias, so that no test passes because the layer forgets it.
    """
    params = random_like(jax.eval_shape(module.init, KEY, *inputs))
    paths = flatten_dict(params["params"])
    for path in paths:
        # The bias of the forget gate has its own name.
        if path[-1] == "kernel" and "forget_gate" not in path:
            assert (*path[:-1], "bias") in paths, f"no bias beside {path}"
    return params


def check_on_mesh(
    module: nn.Module, x: Any, kind: str, rules: Any = sharding.RULES, decodes: bool = True
) -> None:
    """Check gradients, and a cached step if it decodes, on 2 × 4 devices against one device."""
    params = random_like(jax.eval_shape(module.init, KEY, x))
    cached = module.clone(decode=True)
    cache = cache_of(cached, x) if decodes else None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(module.apply(params, x)))

    def step(params: Any, cache: Any, x: jax.Array) -> Any:
        if not decodes:
            return None
        return cached.apply({**params, "cache": cache}, x, mutable="cache")[0]

    expected = jax.jit(jax.grad(loss))(params, x), jax.jit(step)(params, cache, x)
    with on(kind, rules):
        actual = jax.jit(jax.grad(loss))(params, x), jax.jit(step)(params, cache, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected
    )


def check_gradients(
    module: nn.Module, x: Any, expected: Callable[..., np.ndarray], *groups: tuple[str, ...]
) -> None:
    """Check the gradients of groups of parameters against differences of a formula in float64."""
    params = drawn(module, x)
    found = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(module.apply(p, x)))))(params)["params"]
    rng = np.random.default_rng(1)
    p = float64(params["params"])

    def along(step: float, direction: Any) -> float:
        moved = jax.tree.map(lambda a, b: a + step * b, p, direction)
        return float(np.sin(expected(moved, x)).sum())

    for names in groups:
        zero = jax.tree.map(np.zeros_like, p)
        direction = zero | {
            n: jax.tree.map(lambda a: rng.normal(size=a.shape), p[n]) for n in names
        }
        slope = (along(1e-5, direction) - along(-1e-5, direction)) / 2e-5
        parts = jax.tree.map(lambda a, b: np.vdot(float64(a), b), found, direction)
        np.testing.assert_allclose(sum(jax.tree.leaves(parts)), slope, rtol=2e-5)


def check_generation(layer: nn.Module, features: int, scan: bool, **fields: Any) -> None:
    """Check that `generate` with two decoder blocks returns the tokens of full forwards."""
    block = DecoderBlock(layer, 24, remat=scan, **fields)
    model = LanguageModel(TokenEmbedding(40, features), Decoder(2, block, scan=scan))
    tokens = np.random.default_rng(2).integers(0, 40, (2, 4))
    params = random_like(jax.eval_shape(model.init, KEY, tokens))
    actual = generate(model, params, tokens, max_new_tokens=4).tokens
    expected = greedy(functools.partial(model.apply, params), tokens, 4)
    np.testing.assert_array_equal(actual, expected)


def check_under_scan(layer: nn.Module, x: Any, **call: Any) -> Any:
    """Check two encoder blocks under scan and remat against the unrolled stack.

    Returns:
      The unrolled apply function, and its parameters.
    """
    loop, scan = (
        Encoder(2, EncoderBlock(layer, 24, remat=scan), scan=scan) for scan in (False, True)
    )
    params = random_like(jax.eval_shape(loop.init, KEY, x))["params"]
    layers = [params.pop(f"layers_{i}") for i in range(2)]
    together = params | {"layers": jax.tree.map(lambda *x: np.stack(x), *layers)}
    apart = {"params": params | {f"layers_{i}": tree for i, tree in enumerate(layers)}}
    whole = jax.jit(loop.apply)
    scanned = jax.jit(scan.apply)({"params": together}, x, **call)
    assert error(scanned, np.asarray(whole(apart, x, **call))) < 1e-5
    return whole, apart
