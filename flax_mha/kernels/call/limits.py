"""The features that a kernel may lack."""

from typing import Any

import jax

from flax_mha.base import symbols
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.spec import AttentionSpec, Unsupported


def check(
    spec: AttentionSpec, q: jax.Array, k: Any, *, normalizers: bool = False, vectors: bool = False,
    blocks: bool = False, symbolic: bool = False,
) -> None:  # fmt: skip
    """Refuse a call for a kernel that lacks something it needs.

    Args:
      spec: the call.
      q: its queries.
      k: its keys.
      normalizers: True if the kernel has other normalizers than the softmax.
      vectors: True if it has scores of query and key vectors.
      blocks: True if the caller may set the sizes of tiles.
      symbolic: True if it has symbolic sizes of `jax.export`.

    Raises:
      Unsupported: if the call needs one of the others.
    """
    if spec.normalizer != SOFTMAX and not normalizers:
        raise Unsupported(f"has the softmax only, got normalizer={spec.normalizer!r}")
    if spec.vectors and not vectors:
        names = ", ".join(type(mod).__name__ for mod in spec.scores if mod.vectors)
        raise Unsupported(f"has no scores that see queries and keys, got {names}")
    if any(spec.blocks) and not blocks:
        raise Unsupported(f"has no blocks to set, got {spec.blocks}")
    if symbols.is_symbolic(*q.shape, *k.shape) and not symbolic:
        raise Unsupported(f"needs static sizes, got q {q.shape} and k {k.shape}")
