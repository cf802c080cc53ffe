"""A mask split by kind, for kernels that support some kinds of masks natively."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from flax_mha.masks import And, Causal, Dense, Lengths, Mask, Segments, Window


class MaskParts(NamedTuple):
    """The masks of a conjunction, sorted by kind. A pair is allowed if all masks allow it.

    Attributes:
      band: bands along the diagonal.
      lengths: the number of keys, and perhaps of queries, of each row.
      segments: segment ids.
      queries: tables of queries, [*B|1, 1, T, 1].
      keys: tables of keys, [*B|1, 1, 1, S|1].
      others: all other masks.
    """

    band: tuple[Causal | Window, ...]
    lengths: tuple[Lengths, ...]
    segments: tuple[Segments, ...]
    queries: tuple[Dense, ...]
    keys: tuple[Dense, ...]
    others: tuple[Mask, ...]

    @classmethod
    def of(cls, masks: Iterable[Mask]) -> "MaskParts":
        """Sort bound masks, such as the `conjuncts` of a mask, by kind."""
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
    # The exact type, because a subclass may have another rule.
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
