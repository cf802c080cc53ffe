"""What the kernels for TPUs share: what they refuse, sizes of blocks, layout."""

import math

import jax
import jax.numpy as jnp

from flax_mha.base import shapes
from flax_mha.base.shapes import Dims
from flax_mha.sharding.shard_map import varying

# The most queries, and the most keys, of a block, for heads of at most so many features:
#
# | features | block |
# |---|---|
# | 256 | 512 |
# | 512 | 256 |
#
# Each block of queries loads the keys anew, so large ones are better; what bounds them is that the
# scores of a block in float32 (1 MiB at 512²), their gradients and what functions of them leave
# behind share the fast memory of a core. These compile for v5e, v5p and v6e. Their speed has not
# been measured.
BLOCKS = {256: 512, 512: 256}


def refuses(q: jax.Array, k: jax.Array, v: jax.Array) -> str | None:
    """The reason why none of them can run a call, or None."""
    dims = shapes.Dims.of(q, k, v)
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16, got {q.dtype}"
    if not (dims.T and dims.S and math.prod(dims.B)):
        return "there are no rows, queries or keys"
    if max(dims.H, dims.Hv) > max(BLOCKS):
        return f"takes heads of at most {max(BLOCKS)} features, got {max(dims.H, dims.Hv)}"
    if varying(q):
        return "inside jax.shard_map it needs check_vma=False"
    return None


def blocks(dims: Dims) -> tuple[int, int]:
    """Queries and keys of a block: the fewest equal blocks, in multiples of 128."""
    most = next(most for features, most in BLOCKS.items() if max(dims.H, dims.Hv) <= features)

    def size(length: int) -> int:
        return 128 * -(-length // (128 * -(-length // most)))

    return size(dims.T), size(dims.S)


def heads_first(x: jax.Array, length: int) -> jax.Array:
    """[*B, L, M, F] as [rows, M, length, F], filled with 0."""
    x = jnp.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2)
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))
