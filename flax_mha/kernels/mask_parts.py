"""A mask in parts, for kernels that take some kinds of masks natively."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from flax_mha.masks import And, Causal, Dense, Lengths, Mask, Segments, Window


class MaskParts(NamedTuple):
    """Masks by kind: a pair is allowed where all of them allow it.

    Attributes:
      band: a band along the diagonal.
      lengths: a number of keys for each row, and maybe one of queries.
      segments: equal ids.
      queries: tables of queries alone, [*B|1, 1, T, 1].
      keys: tables of keys alone, [*B|1, 1, 1, S|1].
      others: any other mask.
    """

    band: tuple[Causal | Window, ...]
    lengths: tuple[Lengths, ...]
    segments: tuple[Segments, ...]
    queries: tuple[Dense, ...]
    keys: tuple[Dense, ...]
    others: tuple[Mask, ...]

    @classmethod
    def of(cls, masks: Iterable[Mask]) -> "MaskParts":
        """Sort bound masks, such as `conjuncts` gives, by kind."""
        parts: dict[str, list[Any]] = {name: [] for name in cls._fields}
        for mask in masks:
            parts[_part(mask)].append(mask)
        return cls(**{name: tuple(part) for name, part in parts.items()})


def conjuncts(mask: Mask | None) -> list[Mask]:
    """Return the masks that a mask joins by `&`."""
    if mask is None:
        return []
    if type(mask) is And:
        return [part for joined in mask.masks for part in conjuncts(joined)]
    return [mask]


def _part(mask: Mask) -> str:
    """Return the name of the part that a bound mask belongs to."""
    # A subclass may mean something else.
    if type(mask) in (Causal, Window):
        return "band"
    if type(mask) is Lengths and mask.kv.array.shape[-2] == 1:
        return "lengths"
    if type(mask) is Segments:
        return "segments"
    if type(mask) is Dense:
        heads, queries, keys = mask.array.array.shape[-3:]
        if heads == queries == 1:
            return "keys"
        if heads == keys == 1:
            return "queries"
    return "others"
