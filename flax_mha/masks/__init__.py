"""The keys that a query may see.

A mask is a value. It is built once, combined with `&`, `|` and `~`, and handed to the layer or to
`dot_product_attention`; the kernels ask it about blocks of positions:

>>> mask = Causal() & Window(left=128) & Segments(ids)

| mask | the query at position i sees the key at position j when |
|---|---|
| `Causal()` | j ≤ i |
| `Window(left, right)` | i − left ≤ j ≤ i + right |
| `Lengths(kv, q=None)` | j < kv (and, if q is given, i < q) |
| `Keys(real)` | real[row, j] |
| `Segments(q, kv=None)` | their segment ids are equal |
| `Segments(ids, runs=True, at_most=n)` | they are of one run of equal ids |
| `Documents(lengths)` | they are of one document, of several in a row |
| `Prefix(length)` | j < length or j ≤ i |
| `Dilated(step)` | (i − j) mod step = 0 |
| `Neighborhood(sizes, window)` | it is in i's window, on a lattice of two, three, … axes |
| `BlockSparse(blocks, query_block, key_block)` | ⌊j / key_block⌋ is one of i's blocks |
| `Dense(array)` | the array says so |
| `Predicate(fn, *args)` | fn(row, head, i, j, *args) |
| `PerHead(masks)` | the head's mask says so |

Positions count from 0 at the first query and at the first key (top-left aligned when T ≠ S),
unless the caller gives them: `q_positions=S - T` aligns the ends. Arrays (segment ids, lengths
for each query, tables) are in the order of the queries and keys as given.

An array of bools is taken wherever a mask is, as `Dense`: True = may see (in PyTorch's layer it is
the other way round). It broadcasts to [*B, N, T, S] as in NumPy, from the last axis: one of two
axes is [T, S], for all rows, and one of three [N, T, S]. A mask of keys [*B, S] is `Keys(array)`,
one of rows [B, T, S] is `array[:, None]`; where the sizes leave open which is meant, a warning says
so. An array of the numbers 1 and 0, as Flax's `nn.make_causal_mask` gives it, is one of bools;
other numbers, such as the 0 and −1e9 that are added to scores elsewhere, are refused, or where they
are traced give NaN.

Masks are pytrees: their arrays are leaves, so they pass through jit, grad, vmap and scan. A mask of
your own is a subclass with an `allowed` method, a `tiles` method if kernels are to skip what it
excludes, and a `block_shape` method if they are to take its blocks for their tiles.
"""

from flax_mha.base.coordinates import At as At
from flax_mha.base.coordinates import Tiles as Tiles
from flax_mha.masks.base import And as And
from flax_mha.masks.base import Dense as Dense
from flax_mha.masks.base import Mask as Mask
from flax_mha.masks.base import MaskLike as MaskLike
from flax_mha.masks.base import Not as Not
from flax_mha.masks.base import Or as Or
from flax_mha.masks.base import as_mask as as_mask
from flax_mha.masks.base import combine as combine
from flax_mha.masks.block_sparse import BlockSparse as BlockSparse
from flax_mha.masks.block_sparse import Chosen as Chosen
from flax_mha.masks.block_sparse import top_blocks as top_blocks
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
from flax_mha.masks.tiles import EMPTY as EMPTY
from flax_mha.masks.tiles import FULL as FULL
from flax_mha.masks.tiles import PARTIAL as PARTIAL
