"""Features that the TPU kernels share: reasons against calls, block sizes, layout.

The cycles that chose the sizes of blocks are read from the schedules that libtpu writes with
LIBTPU_INIT_ARGS="--xla_jf_dump_to=FOLDER --xla_jf_dump_llo_text=true
--xla_jf_dump_llo_pass_label_regex=final_bundles". They leave out waits for memory, so they compare
sizes, and are no times.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base import shapes
from flax_mha.base.shapes import Dims
from flax_mha.sharding.shard_map import varying

# The maximum queries and keys of a block, by the maximum features of a head. Each block of queries
# loads all keys, so large blocks are better. Their limit is a core's fast memory, which holds the
# scores of a block in float32 (1 MiB at 512²), their gradients, and the intermediates of score
# functions. These sizes compile for v5e, v5p and v6e. They have run on none. The compiler counts
# the cycles of a tile at these and other sizes.
BLOCKS = {256: 512, 512: 256}
# The fewest queries, and keys, for which `auto` takes the kernel for short sequences, by cycles
# that the compiler counts for a v5e, and the most that the kernel supports.
SHORTEST, SHORT = 32, 512
# Larger blocks for heads of up to 256 features, and the share of a score's cycles, by device kind.
# The compiler counts 0.943 of the cycles in full tiles of a v6e, and 0.909 in partial ones. A TPU7x
# would gain 4% and 6%, but has no memory for such tiles with bias or dropout.
_LARGE = {"TPU v6 lite": (1024, 0.93)}

# The precision of float32 matmuls, by the precision of a call or JAX's setting. JAX 0.10's Pallas
# has no HIGH.
_PRECISIONS: dict[Any, lax.Precision] = {
    **dict.fromkeys((None, "default", "bfloat16", lax.Precision.DEFAULT), lax.Precision.DEFAULT),
    **dict.fromkeys(
        ("high", "highest", "tensorfloat32", "float32", lax.Precision.HIGH, lax.Precision.HIGHEST),
        lax.Precision.HIGHEST,
    ),
}

# Kinds with matrix units of 256 × 256.
WIDE = "TPU v6 lite", "TPU7x"
# The fast memory of a core in MiB, by the device kind of JAX. Others have at least `_LEAST`.
_MEMORY = {"TPU v5 lite": 128, "TPU v5": 64, "TPU v5p": 64, "TPU v6 lite": 128, "TPU7x": 64}
_LEAST = 16
# The most bytes that a score takes with its gradients and the intermediates of score functions.
SCORE_BYTES = 64


def memory(device: str) -> int:
    """Return the bytes of fast memory of a core of a device kind."""
    return _MEMORY.get(device, _LEAST) * 2**20


def limit(device: str, held: int) -> int:
    """Return the bytes of fast memory to ask for, for a kernel that holds some of them."""
    return max(min(memory(device) * 15 // 16, held), _LEAST * 2**20)


def check(q: jax.Array, k: jax.Array, v: jax.Array) -> str | None:
    """Return the reason why no TPU kernel supports a call, or None."""
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


def precision(given: Any) -> lax.Precision | str:
    """Return the precision of float32 matmuls for that of a call, or the reason against it."""
    given = jax.config.jax_default_matmul_precision if given is None else given
    if given in _PRECISIONS:
        return _PRECISIONS[given]
    return f"has the precisions default, high and highest, got {given}"


def blocks(dims: Dims) -> tuple[int, int]:
    """Return the queries and keys of a block: the fewest equal blocks, in multiples of 128."""
    most = next(most for features, most in BLOCKS.items() if max(dims.H, dims.Hv) <= features)
    return _equal(dims.T, most), _equal(dims.S, most)


def block_choices(dims: Dims, device: str) -> list[tuple[tuple[int, int], float]]:
    """Return pairs of queries and keys of a block, with the relative cost of a score."""
    features = max(dims.H, dims.Hv)
    if memory(device) <= _LEAST * 2**20 and 128 < features <= 256:
        # Nearly half of the memory holds the gradients of keys. 512² does not compile in float32.
        return [((_equal(dims.T, 256), _equal(dims.S, 256)), 1.0)]
    found = [(blocks(dims), 1.0)]
    if device in _LARGE and features <= 256:
        most, cost = _LARGE[device]
        found.append(((_equal(dims.T, most), _equal(dims.S, most)), cost))
    return found


def _equal(length: int, most: int) -> int:
    """Return the size of the fewest equal blocks with at most `most` entries, a multiple of 128."""
    return 128 * -(-length // (128 * -(-length // most)))


def heads_first(x: jax.Array, length: int, lanes: bool = False) -> jax.Array:
    """Return [*B, L, M, F] as [rows, M, length, F], or [rows, M, F, length], padded with 0."""
    x = x.reshape(-1, *x.shape[-3:])
    x = jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
    return x.transpose((0, 2, 3, 1) if lanes else (0, 2, 1, 3))
