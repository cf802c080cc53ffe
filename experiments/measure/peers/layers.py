"""Whole layers with projections, all with the parameters of the case."""

import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_mha
from experiments.measure.peers.cases import Case
from experiments.measure.peers.cores import our_mask
from experiments.measure.peers.work import jitted, visible
from experiments.measure.timing import RefusalError, Work


def ours(case: Case) -> Work:
    """Build `flax_mha.MultiHeadAttention`."""
    layer = flax_mha.MultiHeadAttention(num_heads=case.N, mask=our_mask(case))
    return jitted(case, layer.apply, {"params": case.parameters()})


def linen(case: Case) -> Work:
    """Build `flax.linen.MultiHeadDotProductAttention`."""
    layer = nn.MultiHeadDotProductAttention(num_heads=case.N)

    def apply(variables: Any, x: jax.Array) -> Any:
        return layer.apply(variables, x, mask=_with_heads(case))

    return jitted(case, apply, {"params": case.parameters()})


def flax_nnx(case: Case) -> Work:
    """Build `flax.nnx.MultiHeadAttention`."""
    dtype = jnp.dtype(case.dtype)
    layer = nnx.MultiHeadAttention(
        case.N, case.D, param_dtype=dtype, dtype=dtype, decode=False, rngs=nnx.Rngs(0)
    )
    for name, parameters in case.parameters().items():
        projection = getattr(layer, name)
        for key, value in parameters.items():
            setattr(projection, key, nnx.Param(jnp.asarray(value, dtype)))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)  # type: ignore[misc]

    def apply(params: Any, x: jax.Array) -> jax.Array:
        out: jax.Array = nnx.merge(graph, params, rest)(x, mask=_with_heads(case))
        return out

    return jitted(case, apply, params)


def equinox(case: Case) -> Work:
    """Build `equinox.nn.MultiheadAttention`, batched by vmap."""
    import equinox as eqx

    biases = dict.fromkeys(("query", "key", "value", "output"), True)
    layer = eqx.nn.MultiheadAttention(
        case.N, case.D, key=jax.random.key(0), **{f"use_{k}_bias": v for k, v in biases.items()}
    )
    given = case.parameters()
    names = {"query": "query", "key": "key", "value": "value", "output": "out"}
    for theirs, name in names.items():
        kernel, bias = _matrix(given, name)
        layer = eqx.tree_at(
            lambda m, n=theirs: (getattr(m, f"{n}_proj").weight, getattr(m, f"{n}_proj").bias),
            layer, (jnp.asarray(kernel.T), jnp.asarray(bias)),
        )  # fmt: skip
    params, static = eqx.partition(layer, eqx.is_array)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        layer, mask = eqx.combine(params, static), visible(case)
        return jax.vmap(lambda row: layer(row, row, row, mask=mask))(x)

    return jitted(case, apply, params)


def haiku(case: Case) -> Work:
    """Build `haiku.MultiHeadAttention`."""
    import haiku as hk

    def forward(x: jax.Array) -> jax.Array:
        layer = hk.MultiHeadAttention(
            case.N, case.H, model_size=case.D, w_init=hk.initializers.Constant(0.0), name="mha"
        )
        out: jax.Array = layer(x, x, x, mask=_with_heads(case))
        return out

    given = case.parameters()
    names = {"query": "query", "key": "key", "value": "value", "linear": "out"}
    params = {
        f"mha/{theirs}": dict(zip(("w", "b"), _matrix(given, name), strict=True))
        for theirs, name in names.items()
    }
    transformed = hk.without_apply_rng(hk.transform(forward))
    return jitted(case, transformed.apply, params)


def keras(case: Case) -> Work:
    """Build `keras.layers.MultiHeadAttention` on its JAX backend."""
    os.environ.setdefault("KERAS_BACKEND", "jax")  # read when keras is imported
    import keras

    if keras.backend.backend() != "jax":
        raise RefusalError(f"keras runs on {keras.backend.backend()}; set KERAS_BACKEND=jax")
    layer = keras.layers.MultiHeadAttention(case.N, case.H, dtype=case.dtype)
    shape = (case.B, case.T, case.D)
    layer.build(shape, shape)
    given = case.parameters()
    names = ("query", "key", "value", "out")
    params = [given[name][key] for name in names for key in ("kernel", "bias")]
    rest = [variable.value for variable in layer.non_trainable_variables]

    def apply(params: Any, x: jax.Array) -> jax.Array:
        mask = visible(case) if case.window or case.documents else None
        out, _ = layer.stateless_call(
            params, rest, x, x, use_causal_mask=case.causal,
            attention_mask=None if mask is None else mask[None],
        )  # fmt: skip
        return out

    return jitted(case, apply, params)


def _with_heads(case: Case) -> jax.Array | None:
    mask = visible(case)
    return None if mask is None else mask[None, None]


def _matrix(parameters: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a projection as a matrix [in, out] and a vector [out]."""
    kernel, bias = parameters[name]["kernel"], parameters[name]["bias"]
    inputs = kernel.shape[0] if name != "out" else kernel.shape[0] * kernel.shape[1]
    return kernel.reshape(inputs, -1), bias.reshape(-1)
