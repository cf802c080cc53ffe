"""Find out which calls give the same bits on the device that is here.

    python -m experiments.measure bits
    python -m experiments.measure bits --devices=8

(A CPU has 8 devices with XLA_FLAGS=--xla_force_host_platform_device_count=8.)

A causal layer with rotary positions computes a batch of four rows. The table says whether the first
row has the same bits

    neighbors  if the other rows hold other tokens
    NaN        if the keys that a mask hides hold NaN, in another row
    alone      if it is the only row
    padded     if padding follows its tokens, by `lengths`
    pieces     if a cache gets it in two pieces, as with one
    step       if a cache gets its tokens one by one, as without a cache
    rows       if the rows are on several devices
    heads      if the heads are on several devices

and otherwise the largest difference, in units of the last place. "attention" is
`dot_product_attention`, "layer" has the projections too.
"""

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import command
from experiments.measure import machine
from experiments.measure.results import Table, counted
from flax_mha import MultiHeadAttention, dot_product_attention, masks, sharding
from flax_mha.positions import Rotary

B, T, N, H = 4, 320, 8, 32
FIRST = 200  # the tokens of the first piece
DTYPES = ("float32", "bfloat16")
Pair = tuple[Any, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--devices", type=command.count, default=1, help="of rows and heads (1)")


def run(flags: argparse.Namespace) -> None:
    """Compare kernel by kernel."""
    both = itertools.product(machine.kernels(), DTYPES)
    columns = {f"{name}, {dtype}": (name, dtype) for name, dtype in both}
    found: dict[str, dict[str, str]] = {}
    for column, (name, dtype) in counted("comparing", columns):
        for case, pair in cases(name, dtype, flags.devices):
            found.setdefault(case, {})[column] = shown(*pair)
    facts = machine.describe()
    table = Table(flags.workdir, f"bits-{facts['platform']}", facts["device"], *columns, **facts)
    for case, row in found.items():
        table.add({"case": case, **row}, case, *row.values())
    table.end()


def shown(got: Any, wanted: Any) -> str:
    """Return "equal", or the largest difference of two arrays in units of the last place.

    The unit is that of the value, or of the root mean square of all if that is larger.
    """
    a, b = (np.asarray(x, np.float64) for x in (got, wanted))
    if np.array_equal(a, b, equal_nan=True):
        return "equal"
    unit = float(jnp.finfo(got.dtype).eps) * np.maximum(np.abs(b), np.sqrt(np.mean(b**2)))
    return f"{np.max(np.abs(a - b) / unit):.2g}"


def cases(kernel: Any, dtype: str, devices: int) -> Iterator[tuple[str, Pair]]:
    """Yield the outputs of the first row by each way, and as they should be."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, N, H)), dtype) for _ in range(3))
    short = jnp.full(B, T).at[-1].set(T // 2)

    @jax.jit
    def attend(q: Any, k: Any, v: Any, lengths: Any = None) -> jax.Array:
        mask = masks.Causal() if lengths is None else masks.Causal() & masks.Lengths(lengths)
        return dot_product_attention(q, k, v, mask=mask, kernel=kernel)

    whole = attend(q, k, v)[0]
    others = [x.at[1:].set(x[1:] * 2) for x in (q, k, v)]
    yield "attention, neighbors", (attend(*others)[0], whole)
    bad = [x.at[-1, T // 2 :].set(jnp.nan) for x in (k, v)]
    yield "attention, NaN", (attend(q, *bad, short)[0], attend(q, k, v, short)[0])
    yield "attention, alone", (attend(*(x[:1] for x in (q, k, v)))[0], whole)

    layer = MultiHeadAttention(N, mask=masks.Causal(), rotary=Rotary(), dtype=dtype, kernel=kernel)
    x = jnp.asarray(rng.normal(size=(B, T, N * H)), dtype)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    apply = jax.jit(layer.apply)
    whole = apply(variables, x)[0]
    yield "layer, neighbors", (apply(variables, x.at[1:].set(x[1:] * 2))[0], whole)
    yield "layer, alone", (apply(variables, x[:1])[0], whole)
    padded = jnp.pad(x, ((0, 0), (0, 64), (0, 0)))
    yield "layer, padded", (apply(variables, padded, lengths=jnp.full(B, T))[0, :T], whole)
    one, pieces = (decoded(layer, variables, x, n)[0] for n in ((T,), (FIRST, T - FIRST)))
    yield "layer, pieces", (pieces, one)
    yield "layer, step", (decoded(layer, variables, x, (1,) * T)[0], whole)
    if devices > 1:
        for axis, shape in (("rows", (devices, 1)), ("heads", (1, devices))):
            yield f"layer, {axis}", (on_devices(layer.apply, variables, x, shape)[0], whole)


def decoded(
    layer: MultiHeadAttention, variables: Any, x: jax.Array, pieces: tuple[int, ...]
) -> jax.Array:
    """Return the outputs of a cache that gets x in pieces of these lengths."""
    layer = layer.clone(decode=True, kernel="auto")
    cache = jax.eval_shape(layer.init, jax.random.key(0), x)["cache"]
    held = {**variables, "cache": jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), cache)}
    step = jax.jit(lambda held, x: layer.apply(held, x, mutable=["cache"]))
    outputs = []
    for piece in jnp.split(x, np.cumsum(pieces)[:-1], axis=1):
        out, new = step(held, piece)
        held = {**held, **new}
        outputs.append(out)
    return jnp.concatenate(outputs, 1)


def on_devices(apply: Any, variables: Any, x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Return the output with rows and heads over a mesh of this shape."""
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jnp.concatenate([x] * -(-shape[0] // len(x)))  # at least one on each device
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        return jax.jit(apply)(variables, rows)
