"""Changes of named tensors, x ← fn(keep·x + add).

Sources: Vig et al., "Causal Mediation Analysis for Interpreting Neural NLP", 2020; Meng et al.,
"Locating and Editing Factual Associations in GPT", 2022 (patching); Turner et al., "Activation
Addition", 2023 (steering).
"""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import At, ScoreArray
from flax_mha.scores import ScoreMod


class Edit(ScoreMod):
    """A change of a named tensor: x ← fn(keep·x + add).

    A `keep` of 0 removes x even where it is NaN. `keep` and `add` are used in at least float32.

    >>> Edit(keep=0)  # removes a tensor
    >>> Edit(fn=lambda x: jnp.clip(x, -1, 1))
    >>> Edit(fn=splice, args=(encoder, decoder))  # a sparse autoencoder

    Attributes:
      keep: a number or an array that broadcasts to x, with gradients (default: 1).
      add: the same (default: 0).
      heads: for `attention_weights`, the indices of the heads to change (default: all). The arrays'
        axis of heads has only these.
      fn: a function fn(x, *args) to a tensor of x's shape, for any tensor but `attention_scores`
        (default: x). Reuse it: another function compiles a new program.
      args: the function's arrays, with gradients.
    """

    keep: Any = 1.0
    add: Any = 0.0
    heads: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)
    fn: Callable[..., Any] | None = struct.field(pytree_node=False, default=None)
    args: Any = ()

    def check(self, path: str, x: Any) -> None:
        """Check that the edit fits the tensor at a path, which is like x."""
        shape = x.shape
        if self.heads is not None:
            if not path.endswith("attention_weights"):
                raise ValueError(
                    f"heads of an edit must be None but for attention_weights, got {self.heads} "
                    f"for {path}; give a `keep` of 1 for the other heads"
                )
            shape = (*shape[:-3], len(self.heads), *shape[-2:])
        for name, array in (("keep", self.keep), ("add", self.add)):
            shapes.check_broadcasts(
                f"`{name}` of the edit {path}", np.shape(array), shape, "the tensor",
                "give one number, or an array that broadcasts to it",
            )  # fmt: skip
        if self.fn is None:
            return
        if path.endswith("attention_scores"):
            raise ValueError(
                f"fn of an edit must be None for {path}, because kernels compute scores piece by "
                f"piece, got {self.fn!r}; give the layer scores=(scores.Score(fn),)"
            )
        y = jax.eval_shape(self.fn, jax.ShapeDtypeStruct(shape, x.dtype), *self.args)
        if not jnp.issubdtype(getattr(y, "dtype", bool), jnp.floating) or y.shape != shape:
            raise ValueError(
                f"`fn` of the edit {path} must return real numbers {shape}, got "
                f"{checks.describe(y)}; return the whole tensor"
            )

    def bind(self, dims: shapes.Dims) -> Self:
        """Return the edit for scores."""

        def over_scores(x: Any) -> ScoreArray:
            return ScoreArray(shapes.lead(jnp.asarray(x, jnp.float32), len(dims.logits)))

        edit: Self = jax.tree.map(over_scores, self)
        return edit

    def __call__(self, x: jax.Array, at: At | None = None) -> jax.Array:
        """Return fn(keep·x + add), in the dtype of x."""
        dtype = shapes.wide(x.dtype)
        # For scores, both arrays are wrapped in a `ScoreArray`.
        arrays = (jnp.asarray(y, dtype) for y in jax.tree.leaves((self.keep, self.add)))
        keep, add = (shapes.lead(y, x.ndim) for y in arrays)
        # Choosing x or 0 by `keep`, without the product, would have no gradient at 0.
        kept = jnp.where((keep == 0) & ~jnp.isfinite(x), 0, x).astype(dtype)
        y = (keep * kept + add).astype(x.dtype)
        return y if self.fn is None else self.fn(y, *self.args).astype(x.dtype)
