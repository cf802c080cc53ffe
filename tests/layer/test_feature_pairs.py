"""Every part of the layer with every mode, pair by pair, against NumPy in float64.

The module is a stack of two blocks. Compared are the outputs of all real tokens, and the gradient
of parameters and inputs along one direction with the difference quotient of the float64 model.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import Encoder, EncoderBlock, MultiHeadAttention, masks
from flax_mha.positions import Rotary
from tests.kernels.cases import covering
from tests.positions.test_rope_scaling import theta
from tests.support import layer_model, oracle
from tests.support.decoding import cache_of
from tests.support.layer_model import Model
from tests.support.layer_parts import BASE, PARTS, H, N, T, angles
from tests.support.meshes import on
from tests.support.oracle import float64, random_like

D = 16
KEY = jax.random.key(0)
X = np.random.default_rng(1).normal(size=(2, T, D)).astype(np.float32)
# Real tokens of each row. In decoding the first step has 7 slots, 5 of them filled.
REAL = {"whole": (12, 5), "steps": (7, 5)}
ERROR = {"float32": 5e-6, "bfloat16": 3e-2}


FACTORS = {
    "part": tuple(PARTS),
    "mode": ("whole", "mesh", "steps"),
    "heads": ("each", "gqa"),
    "rotary": ("still", "rotary"),
    "window": ("unbounded", "window"),
    "lengths": ("full", "lengths"),
    "scan": ("unrolled", "scan"),
    "remat": ("stored", "remat"),
    "dtype": ("float32", "bfloat16"),
    "kernel": ("reference", "blockwise"),
}  # fmt: skip


class Pair(NamedTuple):
    """A choice of one value for each factor."""

    part: str
    mode: str
    heads: str
    rotary: str
    window: str
    lengths: str
    scan: str
    remat: str
    dtype: str
    kernel: str

    def __str__(self) -> str:
        return "-".join(self).replace(" ", "_")

    @property
    def refused(self) -> str | None:
        """The words of the expected error, or None."""
        found = PARTS[self.part].refuses.items()
        return next((words for value, words in found if value in self), None)


def built(pair: Pair) -> tuple[nn.Module, Model]:
    """Build the stack and the float64 model of it."""
    part = PARTS[pair.part]
    fields: dict[str, Any] = {"mask": masks.Causal()} | part.fields
    model = Model(**part.model)
    if pair.heads == "gqa":
        fields["num_kv_heads"] = N // 2
    if pair.rotary == "rotary" and "rotary" not in fields:
        fields["rotary"] = Rotary(BASE)
        model = model._replace(turn=angles(lambda c: theta(c, BASE, H)))
    model = model._replace(allowed=(*model.allowed, lambda i, j: j <= i))
    if pair.window == "window":
        fields["mask"] &= masks.Window(4, 0)
        model = model._replace(allowed=(*model.allowed, lambda i, j: i - j <= 4))
    layer = MultiHeadAttention(
        N, head_dim=H, kernel=pair.kernel, dtype=pair.dtype, decode=pair.mode == "steps", **fields
    )
    block = EncoderBlock(layer, 8, remat=pair.remat == "remat", activation="gelu")
    return Encoder(2, block, scan=pair.scan == "scan", **part.stack), model


def expected(params: Any, x: Any, model: Model, real: list[np.ndarray]) -> list[np.ndarray]:
    """Return the float64 outputs of each row's real tokens."""
    return [layer_model.stack(params, row[at], model) for row, at in zip(x, real, strict=True)]


def stepwise(stack: nn.Module, params: Any, pair: Pair) -> tuple[jax.Array, list[np.ndarray]]:
    """Decode 7 slots at once, not all of them real, and the other tokens one by one."""
    filled = REAL["steps"] if pair.lengths == "lengths" else (7, 7)
    cache = cache_of(stack, X)

    @jax.jit
    def step(cache: Any, x: Any, lengths: Any) -> tuple[jax.Array, Any]:
        variables = {**params, "cache": cache}
        out, new = stack.apply(variables, x, lengths=lengths, mutable=["cache"])
        return out, new["cache"]

    out, cache = step(cache, X[:, :7], jnp.array(filled))
    outs = [out]
    for t in range(7, T):
        out, cache = step(cache, X[:, t : t + 1], None)
        outs.append(out)
    return jnp.concatenate(outs, 1), [np.r_[:n, 7:T] for n in filled]


def trained(
    stack: nn.Module, params: Any, pair: Pair, along: Any
) -> tuple[jax.Array, list[np.ndarray], tuple[float, float]]:
    """Return the outputs, the real tokens, and the directional derivative of Σ sin(out) with its
    size.
    """
    filled = REAL["whole"] if pair.lengths == "lengths" else (T, T)
    lengths = jnp.array(filled) if pair.lengths == "lengths" else None
    real = (np.arange(T) < np.array(filled)[:, None])[..., None]

    @jax.jit
    def both(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            out = stack.apply(params, x, lengths=lengths)
            return jnp.sum(jnp.where(real, jnp.sin(out.astype(jnp.float32)), 0)), out

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    if pair.mode == "whole":
        (_, out), gradient = both(params, X)
    else:
        with on(pair.mode):
            (_, out), gradient = both(params, X)
    leaves = [float64(x) for x in jax.tree.leaves(gradient)]
    slope = sum((g * float64(d)).sum() for g, d in zip(leaves, jax.tree.leaves(along), strict=True))
    size = np.sqrt(sum((g**2).sum() for g in leaves))
    return out, [np.arange(n) for n in filled], (slope, size)


def on_either_mesh(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Make every other mesh Explicit: each part is on one of them, not on both."""
    kinds = itertools.cycle(("Auto", "Explicit"))
    for pair in pairs:
        yield pair._replace(mode=next(kinds)) if pair.mode == "mesh" else pair


PAIRS = [*on_either_mesh(Pair(*row) for row in covering(FACTORS, (2,)))]


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.refused], ids=str)
def test_unsupported_pair_raises_its_name(pair: Pair) -> None:
    with pytest.raises(ValueError, match=pair.refused):
        jax.eval_shape(built(pair)[0].init, KEY, X[:, :7])


# Flax's norms promote their statistics implicitly.
@jax.numpy_dtype_promotion("standard")
@pytest.mark.sampled(0.005)
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not pair.refused], ids=str)
def test_pair_matches_float64_model(pair: Pair) -> None:
    stack, model = built(pair)
    whole, _ = built(pair._replace(mode="whole"))
    params = random_like(jax.eval_shape(whole.init, KEY, X))
    along = (random_like(params, 1), np.random.default_rng(2).normal(size=X.shape))
    if pair.mode == "steps":
        out, real = stepwise(stack, params, pair)
    else:
        out, real, (slope, size) = trained(stack, params, pair, along)
    out, bound = np.asarray(out), ERROR[pair.dtype]
    for b, wanted in enumerate(expected(float64(params)["params"], float64(X), model, real)):
        assert oracle.error(out[b, real[b]], wanted) < bound
    if pair.mode == "steps":
        return

    def loss(step: float) -> float:
        tree, x = jax.tree.map(lambda a, d: float64(a) + step * float64(d), (params, X), along)
        return sum(np.sin(row).sum() for row in expected(tree["params"], x, model, real))

    quotient = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert abs(slope - quotient) < 2 * bound * size
