"""The contestants of the races, by name, and those that JAX runs.

A contestant is a function from a case to its work, or a RefusalError. All get the same values.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import flax_mha
from experiments.measure import by_hand, machine, programs
from experiments.measure.peers import torch_peers
from experiments.measure.peers.cases import Case
from experiments.measure.timing import RefusalError, Work, program, with_gradients
from flax_mha import masks
from flax_mha.kernels import KERNELS

PROMPT = 1024


def jitted(case: Case, apply: Callable[..., Any], params: Any = None) -> Work:
    """Build the work of a function (params, *inputs) → out, or of all its gradients too.

    The parameters, a tree of arrays, are cast to the dtype of the case.
    """
    params, inputs = jax.tree.map(lambda x: jnp.asarray(x, case.dtype), (params, case.inputs()))
    if case.backward:
        return program(with_gradients(apply), [inputs[0], params, *inputs])
    return program(apply, [params, *inputs])


def our_mask(case: Case) -> masks.Mask | None:
    """Return the case's mask as a flax_mha mask."""
    reach = case.window - 1
    if case.window:
        return masks.Window(reach, 0 if case.causal else reach)
    return masks.Causal() if case.causal else None


def visible(case: Case, *axes: int) -> Any:
    """Return the keys that each query sees, bool [*axes, T, T], or None for all of them."""
    if not case.causal:
        return None
    return jnp.tri(case.T, dtype=bool).reshape(*axes, case.T, case.T)


def our_layer(case: Case) -> Work:
    """Build `flax_mha.MultiHeadAttention`."""
    layer = flax_mha.MultiHeadAttention(num_heads=case.N, mask=our_mask(case))
    return jitted(case, layer.apply, _of_flax(case))


def linen_layer(case: Case) -> Work:
    """Build `flax.linen.MultiHeadDotProductAttention`."""
    layer = nn.MultiHeadDotProductAttention(num_heads=case.N)
    return jitted(case, lambda v, x: layer.apply(v, x, mask=visible(case, 1, 1)), _of_flax(case))


def _of_flax(case: Case) -> Any:
    layer, x = nn.MultiHeadDotProductAttention(case.N), jnp.zeros((1, 1, case.D))
    return case.parameters(jax.eval_shape(layer.init, jax.random.key(0), x))


def nnx_layer(case: Case) -> Work:
    """Build `flax.nnx.MultiHeadAttention`."""
    options: Any = {"dtype": jnp.dtype(case.dtype), "decode": False, "rngs": nnx.Rngs(0)}
    layer = nnx.MultiHeadAttention(case.N, case.D, param_dtype=options["dtype"], **options)
    graph, params, others = nnx.split(layer, nnx.Param, ...)  # type: ignore[misc]

    def apply(params: Any, x: jax.Array) -> Any:
        return nnx.merge(graph, params, others)(x, mask=visible(case, 1, 1))

    return jitted(case, apply, case.parameters(params))


def equinox_layer(case: Case) -> Work:
    """Build `equinox.nn.MultiheadAttention`, batched by vmap."""
    import equinox as eqx

    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    layer = eqx.nn.MultiheadAttention(case.N, case.D, key=jax.random.key(0), **biases)
    params, static = eqx.partition(layer, eqx.is_array)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        layer, mask = eqx.combine(params, static), visible(case)
        return jax.vmap(lambda row: layer(row, row, row, mask=mask))(x)

    return jitted(case, apply, case.parameters(params, "qkvo", transposed=True))


def core(make: Callable[..., Callable[..., Any]], **options: Any) -> Callable[[Case], Work]:
    """Return a contestant from a function of a case to attention of q, k and v."""

    def build(case: Case) -> Work:
        attend = make(case, **options)
        return jitted(case, lambda _, *qkv: attend(*qkv))

    return build


def _ours(case: Case, kernel: str = "auto") -> Callable[..., Any]:
    return functools.partial(flax_mha.dot_product_attention, mask=our_mask(case), kernel=kernel)


def _jax_nn(case: Case, implementation: str) -> Callable[..., Any]:
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise RefusalError(f"needs an NVIDIA GPU; this is {jax.default_backend()}")
    attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    return functools.partial(attend, is_causal=case.causal)


def _tokamax(case: Case) -> Callable[..., Any]:
    attend = by_hand.tokamax_library().dot_product_attention
    return functools.partial(attend, is_causal=case.causal)


def step(case: Case, linen: bool = False, share: float = 3 / 4, stored: str | None = None) -> Work:
    """Build a layer's step of a token, with a cache of which a share is full.

    With a share of 0 it reads a prompt in one call. `stored` is the dtype of the cache.
    """
    filled, tokens = int(case.T * share), 1 if share else min(PROMPT, case.T // 2)
    options: Any = {"num_heads": case.N, "decode": True, "dtype": case.dtype}
    if linen:
        layer: nn.Module = nn.MultiHeadDotProductAttention(param_dtype=case.dtype, **options)
    else:
        cache = flax_mha.CacheConfig(stored)
        layer = flax_mha.MultiHeadAttention(param_dtype=case.dtype, cache=cache, **options)
    chip = programs.Chip(jax.devices()[0], False)
    whole, x = (chip.array(case.B, T, case.D, dtype=case.dtype) for T in (case.T, tokens))
    function, shapes = programs.step(chip, layer, whole, x)
    work = program(function, programs.fill(shapes, filled), donates=True)
    return work._replace(tokens=case.B * tokens)


CONTESTANTS: dict[str, dict[str, Callable[[Case], Work]]] = {
    "layer": {
        "ours": our_layer,
        "linen": linen_layer,
        "nnx": nnx_layer,
        "torch-sdpa": torch_peers.linear_sdpa,
        "equinox": equinox_layer,
    },
    "core": {
        "ours": core(_ours),
        **{f"ours-{name}": core(_ours, kernel=name) for name in KERNELS},
        "jax-xla": core(_jax_nn, implementation="xla"),
        "jax-cudnn": core(_jax_nn, implementation="cudnn"),
        "torch-sdpa": torch_peers.core,
        "torch-flex": torch_peers.flex,
        "tokamax": core(_tokamax),
    },
    "step": {
        "ours": step,
        "ours-nearly-empty": functools.partial(step, share=1 / 64),
        "ours-int8": functools.partial(step, stored="int8"),
        "ours-prompt": functools.partial(step, share=0),
        "linen": functools.partial(step, linen=True),
        "torch-sdpa": torch_peers.step,
    },
}
NAMES = list(dict.fromkeys(name for group in CONTESTANTS.values() for name in group))
# The denominators of all ratios.
BASELINES = {"layer": "linen", "core": "jax-xla", "step": "linen"}
# Those whose memory grows with T², at least on a CPU.
KEEP_SCORES = {"linen", "nnx", "equinox", "ours-reference", "jax-xla", "tokamax"}


def build(name: str, case: Case) -> Work:
    """Return the work of a contestant for a case.

    Raises:
      RefusalError: if it does not support the case, or needs more memory than a CPU has.
    """
    if case.window and not name.startswith("ours"):
        raise RefusalError("takes no --window here")
    if name in KEEP_SCORES and case.part != "step" and jax.default_backend() == "cpu":
        # A forward pass has the scores, the weights and one temporary array. Gradients were
        # measured at six times the scores; eight is on the safe side.
        needs = 4 * case.B * case.N * case.T**2 * (8 if case.backward else 3)
        free = machine.free_bytes()
        if needs > free:  # The system would end this process.
            raise RefusalError(f"needs about {needs / 2**30:.0f} GiB, {free / 2**30:.0f} are free")
    return CONTESTANTS[case.part][name](case)
