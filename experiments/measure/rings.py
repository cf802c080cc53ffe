"""Print the table of orders in docs/sharding.md: the time of a ring for masks and orders of tokens.

    python -m experiments.measure rings

A device's work in a step is the number of tiles that are not empty, and the step takes as long as
its busiest device. Documents have a log-normal number of tokens, with a median of 1,097. Nothing
runs.
"""

import argparse
from typing import Any, NamedTuple

import numpy as np

from experiments import tables
from flax_mha import masks, sharding
from flax_mha.base.coordinates import ScoreArray
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.xla.tile_plan import Plan, tile_states
from flax_mha.masks.algebra import resolve

T, DEVICES, TILE, WINDOW, DRAWS = 2**14, 8, 128, 2048, 5


class Lockstep(NamedTuple):
    """The time of a ring.

    Attributes:
      ratio: the work of the busiest device of each step, summed, over the mean work of a device.
      steps: the number of steps in which any device has work.
    """

    ratio: float
    steps: int


def documents(length: int, seed: int) -> list[int]:
    """Return the lengths of random documents, of `length` tokens in all."""
    rng, lengths = np.random.default_rng(seed), [0]
    while sum(lengths) < length:
        lengths.append(int(np.ceil(rng.lognormal(7, 1))))
    lengths[-1] -= sum(lengths) - length
    return lengths[1:]


def lockstep(mask: masks.Mask | None, order: np.ndarray, devices: int, tile: int) -> Lockstep:
    """Return the time of a ring under a mask, for tokens in an order."""
    dims = Dims((), len(order), len(order), 1, 1, 1, 1)
    q_pos, k_pos = ScoreArray(order[None, :, None]), ScoreArray(order[None, None, :])
    spec = AttentionSpec(None, (), None, None, q_pos, k_pos, 1.0)
    if mask is not None:
        spec = spec.replace(mask=resolve(mask.bind(dims), spec.at(dims)))
    visible = np.asarray(tile_states(spec, spec.at(dims), Plan(dims, tile, tile)))[0, 0] > 0
    per_device = visible.reshape(devices, len(visible) // devices, devices, -1).sum((1, 3))
    device = np.arange(devices)
    busiest = np.array([per_device[device, device - step].max() for step in device])
    return Lockstep(busiest.sum() * devices / per_device.sum(), int((busiest > 0).sum()))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command: none."""


def run(flags: argparse.Namespace) -> None:
    """Print the table."""
    print(table())


def table() -> str:
    """Return the table: the mean ratio over the draws, and the greatest number of steps."""
    window = masks.Causal() & masks.Window(WINDOW)
    rows: dict[str, tuple[masks.Mask | None, bool]] = {
        "none": (None, False), "causal": (masks.Causal(), False),
        f"causal, window of {WINDOW:,}": (window, False),
        "causal, documents": (masks.Causal(), True),
        f"causal, window of {WINDOW:,}, documents": (window, True),
    }  # fmt: skip
    lines = [tables.head("mask", "contiguous", "`zigzag`", "`balanced`")]
    for name, (mask, is_packed) in rows.items():
        cells = []
        for order in ("contiguous", "zigzag", "balanced"):
            found = [_of_draw(order, mask, is_packed, draw) for draw in range(DRAWS)]
            ratio, steps = np.mean([x.ratio for x in found]), max(x.steps for x in found)
            cells.append(f"{ratio:.2f}, {steps} steps")
        lines.append(tables.line(name, *cells))
    return "\n".join(lines)


def _of_draw(order: str, mask: Any, is_packed: bool, draw: int) -> Lockstep:
    lengths = documents(T, draw) if is_packed else [T]
    every = masks.Window() if mask is None else mask
    tokens = {
        "contiguous": lambda: np.arange(T, dtype=np.int32),
        "zigzag": lambda: sharding.zigzag(T, DEVICES),
        "balanced": lambda: sharding.balanced(lengths, DEVICES, mask=every, tile=TILE),
    }[order]()
    packed = masks.combine(mask, masks.Documents(lengths) if is_packed else None)
    return lockstep(packed, tokens, DEVICES, TILE)
