"""Masks, which select the keys that a query may see.

A mask is a value. You build it once, combine it with `&`, `|` and `~`, and pass it to the layer or
to `dot_product_attention`. Kernels evaluate it block by block.

>>> mask = Causal() & Window(left=128) & Segments(ids)

| mask | the query at position i sees the key at position j when |
|---|---|
| `Causal()` | j ≤ i |
| `Window(left, right)` | i − left ≤ j ≤ i + right |
| `Lengths(kv, q=None)` | j < kv (and, if q is given, i < q) |
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

Positions count from 0 at the first query and at the first key (top-left aligned when T ≠ S),
unless the caller gives them: `q_positions=S - T` aligns the ends. Arrays (segment ids, lengths
for each query, tables) are in the order of the given queries and keys.

You can pass a bool array as a mask, which stands for `Dense`: True lets a query see a key (in
PyTorch's layer, True hides it). It broadcasts to [*B, N, T, S] as in NumPy: two axes are [T, S],
three are [N, T, S]. Write a mask of keys [*B, S] as `Keys(array)`, and one of examples [B, T, S] as
`array[:, None]`; a warning tells you if the sizes fit both readings. An array of 1 and 0, as from
Flax's `nn.make_causal_mask`, counts as bools. Other numbers, such as additive masks of 0 and −1e9,
raise an error, or give NaN if they are traced.

Masks are pytrees with arrays as leaves, so they pass through jit, grad, vmap and scan. To write
your own, define a subclass with an `allowed` method. Add a `tiles` method to let kernels skip
blocks, and a `block_shape` method to align the kernels' blocks with the mask's.
"""

from flax_mha.base.coordinates import At as At
from flax_mha.base.coordinates import Tiles as Tiles
from flax_mha.masks.algebra import And as And
from flax_mha.masks.algebra import Dense as Dense
from flax_mha.masks.algebra import Mask as Mask
from flax_mha.masks.algebra import MaskLike as MaskLike
from flax_mha.masks.algebra import Not as Not
from flax_mha.masks.algebra import Or as Or
from flax_mha.masks.algebra import as_mask as as_mask
from flax_mha.masks.algebra import combine as combine
from flax_mha.masks.block_sparse import BlockSparse as BlockSparse
from flax_mha.masks.block_sparse import top_blocks as top_blocks
from flax_mha.masks.diffusion import block_diffusion as block_diffusion
from flax_mha.masks.per_token import AtLeast as AtLeast
from flax_mha.masks.per_token import Documents as Documents
from flax_mha.masks.per_token import Keys as Keys
from flax_mha.masks.per_token import Lengths as Lengths
from flax_mha.masks.per_token import Prefix as Prefix
from flax_mha.masks.per_token import Segments as Segments
from flax_mha.masks.positional import Causal as Causal
from flax_mha.masks.positional import Dilated as Dilated
from flax_mha.masks.positional import Neighborhood as Neighborhood
from flax_mha.masks.positional import PerHead as PerHead
from flax_mha.masks.positional import Predicate as Predicate
from flax_mha.masks.positional import Window as Window
from flax_mha.masks.states import EMPTY as EMPTY
from flax_mha.masks.states import FULL as FULL
from flax_mha.masks.states import PARTIAL as PARTIAL

__all__ = [
    "EMPTY", "FULL", "PARTIAL", "And", "At", "AtLeast", "BlockSparse", "Causal", "Dense",
    "Dilated", "Documents", "Keys", "Lengths", "Mask", "MaskLike", "Neighborhood", "Not", "Or",
    "PerHead", "Predicate", "Prefix", "Segments", "Tiles", "Window", "as_mask",
    "block_diffusion", "combine", "top_blocks",
]  # fmt: skip
__dir__ = __all__.copy
