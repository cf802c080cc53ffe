"""Masks, which select the keys that each query may attend to, and combine by `&`, `|` and `~`.

>>> mask = Causal() & Window(left=128) & Segments(ids)

| mask | the query at position i may attend to position j if |
|---|---|
| `Causal()` | j ≤ i |
| `Window(left, right)` | i − left ≤ j ≤ i + right |
| `Lengths(kv, q=None)` | j < kv and i < q |
| `Keys(real)` | real[row, j] |
| `Segments(q, kv=None)` | their segment ids are equal |
| `Segments(ids, runs=True, at_most=n)` | they are in one run of equal ids |
| `AtLeast(q, kv=None)` | the query's number is at least the key's |
| `Documents(lengths)` | they are in one of several consecutive documents |
| `Prefix(length)` | j < length or j ≤ i |
| `Dilated(step)` | (i − j) mod step = 0 |
| `Neighborhood(sizes, window)` | j is in i's window on a grid of two, three, … axes |
| `BlockSparse(blocks, query_block, key_block)` | ⌊j / key_block⌋ is one of i's blocks |
| `block_diffusion(length, block)` | j is in i's block, noisy or clean as i, or earlier and clean |
| `Dense(array)` | the array is True |
| `Predicate(fn, *args)` | fn(row, head, i, j, *args) |
| `PerHead(masks)` | the head's mask allows it |

Positions count from 0 at the first query and at the first key, unless the caller gives them:
`q_positions=S - T` aligns the ends. Ids, lengths for each query and tables follow the order of the
call's queries and keys.

A bool array stands for `Dense`. Write an array of keys [*B, S] as `Keys(array)`, and one of
examples [B, T, S] as `array[:, None]`.

Masks are pytrees. To write your own, define a subclass with a method `allowed`, and a method
`tiles` if kernels can skip blocks.
"""

from flax_mha.base.coordinates import At, Tiles
from flax_mha.masks.algebra import And, Dense, Mask, MaskLike, Not, Or, as_mask, combine
from flax_mha.masks.block_sparse import BlockSparse, top_blocks
from flax_mha.masks.per_token import (
    AtLeast,
    Documents,
    Keys,
    Lengths,
    Prefix,
    Segments,
    block_diffusion,
)
from flax_mha.masks.positional import Causal, Dilated, Neighborhood, PerHead, Predicate, Window
from flax_mha.masks.states import EMPTY, FULL, PARTIAL

__all__ = [
    "EMPTY", "FULL", "PARTIAL", "And", "At", "AtLeast", "BlockSparse", "Causal", "Dense",
    "Dilated", "Documents", "Keys", "Lengths", "Mask", "MaskLike", "Neighborhood", "Not", "Or",
    "PerHead", "Predicate", "Prefix", "Segments", "Tiles", "Window", "as_mask",
    "block_diffusion", "combine", "top_blocks",
]  # fmt: skip
__dir__ = __all__.copy
