"""Arrays of masks in the shape of the scores: tables of bools, and lengths."""

import math
from typing import Any

import numpy as np

from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array, ScoreArray
from flax_mha.base.shapes import Dims
from flax_mha.masks.states import tile_state


def read_table(array: Array, dims: Dims) -> Array:
    """Return a table that broadcasts to [*B, N, T, S] as bools [*B|1, N|1, T|1, S|1].

    Traced numbers become tile states: 0 is EMPTY, 1 is FULL, and others are PARTIAL.

    Raises:
      ValueError: if the shape does not fit, or the table has another static number.
      TypeError: if the dtype does not fit.
    """
    checks.array("a mask", array)
    remedy = "give a mask of keys [*B, S] as masks.Keys(mask), [*B, T, S] as mask[..., None, :, :]"
    shapes.check_broadcasts("mask", array.shape, dims.logits, "[*B, N, T, S]", remedy)
    _warn_of_rows(array.shape, dims)
    # Convert first: inside jit, reshaping would trace the array.
    return shapes.lead(_as_bools(checks.as_numpy(array)), len(dims.logits))


def _as_bools(array: Array) -> Array:
    if array.dtype == bool:
        return array
    if not checks.is_concrete(array):
        return tile_state(array != 0, array == 1)
    values = np.asarray(array)
    wrong = values[(values != 0) & (values != 1)]
    if wrong.size:
        raise ValueError(
            f"a mask must be of bools, or of 1 (may attend) and 0, got {wrong[0]} in "
            f"{array.dtype}; compare it with something, as in ids > 0, or give scores as bias="
        )
    return array.astype(bool)


def lengths_as_scores(name: str, lengths: Any, dims: Dims, per_query: bool = False) -> ScoreArray:
    """Reshape lengths [], [*B] or, per query, [*B, T] to [*B|1, 1, 1|T, 1]."""
    lengths = checks.integers(name, lengths)
    expected = {"[]": (), "[*B]": dims.B} | ({"[*B, T]": (*dims.B, dims.T)} if per_query else {})
    remedy = "give one length for each example of the batch"
    shapes.check_shape(name, lengths, expected, remedy)
    if lengths.ndim <= len(dims.B):
        lengths = lengths[..., None]
    return ScoreArray(shapes.lead(lengths[..., None, :, None], len(dims.logits)))


def _warn_of_rows(shape: shapes.Shape, dims: Dims) -> None:
    """Warn if a shape could also be meant for the examples of the batch."""
    other = {
        (*dims.B, dims.S): "masks.Keys(mask)",
        (*dims.B, dims.T, dims.S): "mask[..., None, :, :]",
    }.get(shape)
    if other and len(shape) < len(dims.logits) and math.prod(dims.B) > 1:
        axes = ", ".join(("N", "T", "S")[-len(shape) :])
        checks.warn(
            f"a mask of shape {shape} is read as [{axes}], as NumPy broadcasts, but could be meant "
            f"for the examples of the batch; write {other} for these, or mask[None] to confirm"
        )
