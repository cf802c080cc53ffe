"""Requests for values of a call, by name."""

import dataclasses
from collections.abc import Sequence, Set
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks
from flax_mha.base.shapes import Dims
from flax_mha.base.tensors import OF_SOFTMAX, TENSORS

# The values with an axis of keys, which are the slots of a cache.
SQUARE = frozenset({"weights", "scores"})


@dataclasses.dataclass(frozen=True)
class Capture:
    """The values of a call to return. See `flax_mha.kernels.observe` for those of a softmax.

    Attributes:
      what: some of "weights", "scores", "lse", "entropy" and "max_logit". Layers also have "q",
        "k", "v", "z" (the heads' outputs), "result" (each head's share of the output) and "out".
        The block around a layer has "resid_pre", "resid_mid", "resid_post", "mlp_pre" and
        "mlp_out", and a stack has "embed".
      heads: indices of query heads, such as (0, 3) (default: all N). With them, "k" and "v" are
        those that each of these heads reads.
      queries: indices of queries, such as range(128) (default: all T). "k" and "v" have all keys.

    Raises:
      ValueError, TypeError: if a name is unknown, or heads or queries are not indices. A call
        raises ValueError if an index is out of range or repeated.
    """

    what: Sequence[str]
    heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None

    def __post_init__(self) -> None:
        names = self.what
        is_collection = isinstance(names, Sequence | Set) and not isinstance(names, str)
        if not is_collection or not all(isinstance(x, str) and x in TENSORS for x in names):
            raise ValueError(f"Capture takes a tuple of names out of {(*TENSORS,)}, got {names!r}")
        # Tuples, because a capture must be hashable.
        object.__setattr__(self, "what", tuple(names))
        for name in ("heads", "queries"):
            object.__setattr__(self, name, _check_indices(f"Capture.{name}", getattr(self, name)))

    def chosen(self, dims: Dims) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the indices of heads and queries, after a check of their range."""
        heads = None if self.heads is None else self.indices("heads", dims.N)
        return heads, None if self.queries is None else self.indices("queries", dims.T)

    def indices(self, name: str, size: int) -> np.ndarray:
        """Return the indices of "heads" or "queries", all `size` by default."""
        chosen = getattr(self, name)
        if chosen is None:
            return np.arange(size)
        if min(chosen) < -size or max(chosen) >= size:
            raise ValueError(
                f"Capture.{name} must be in [{-size}, {size}), got {chosen!r}; this call has {size}"
            )
        indices = np.asarray(chosen) % size
        if len(set(indices.tolist())) < len(indices):
            raise ValueError(f"Capture.{name} must name each index once, got {chosen!r}")
        return indices

    def pick(self, x: jax.Array, axes: Sequence[str | None], num_heads: int = 0) -> jax.Array:
        """Return the chosen heads and queries of a tensor with these axes.

        With `num_heads`, it is keys or values, of which the chosen query heads read some.
        """
        for axis, name in enumerate(axes, -len(axes)):
            if name in ("heads", "kv_heads") and self.heads is not None:
                N = num_heads or x.shape[axis]
                x = jnp.take(x, self.indices("heads", N) // (N // x.shape[axis]), axis)
            elif name in ("length", "norm_length") and not num_heads and self.queries is not None:
                x = jnp.take(x, self.indices("queries", x.shape[axis]), axis)
        return x

    def of_softmax(self) -> Self | None:
        """Return the capture of the values of a softmax alone, or None if there are none."""
        names = tuple(name for name in self.what if name in OF_SOFTMAX)
        return dataclasses.replace(self, what=names) if names else None


def as_capture(capture: Any, in_layer: bool = False) -> Capture | None:
    """Check that `capture` is a `Capture` or None, in a layer of any names, and return it."""
    if capture is None:
        return None
    if not isinstance(capture, Capture):
        raise TypeError(
            f"capture must be a flax_mha.Capture, got {checks.describe(capture)}; give "
            f"Capture(('entropy', 'max_logit')), for example"
        )
    others = {*capture.what} - {*OF_SOFTMAX}
    if others and not in_layer:
        raise ValueError(
            f"capture of a call without a layer must be some of {OF_SOFTMAX}, got "
            f"{sorted(others)}; leave them out"
        )
    return capture


def _check_indices(name: str, chosen: Any) -> tuple[int, ...] | None:
    if chosen is None:
        return None
    is_list = isinstance(chosen, Sequence | np.ndarray | jax.Array) and not isinstance(chosen, str)
    indices = np.asarray(checks.integers(name, chosen) if is_list else ())
    if indices.ndim != 1 or not indices.size:
        raise ValueError(f"{name} takes indices, such as (0, 3) or range(8), got {chosen!r}")
    return tuple(indices.tolist())
