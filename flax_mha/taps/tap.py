"""The tap of a call, which edits and captures its named tensors, and the context that it reads.

Sources: Vig et al., "Causal Mediation Analysis for Interpreting Neural NLP", 2020; Meng et al.,
"Locating and Editing Factual Associations in GPT", 2022 (patching); Turner et al., "Activation
Addition", 2023 (steering).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import At, ScoreArray
from flax_mha.base.tensors import TENSORS
from flax_mha.kernels import Capture
from flax_mha.scores import ScoreMod

COLLECTION = "edits"


# Contexts of all modules that run in them: the values to capture (default: the modules' fields);
capturing = jax.make_user_context(None)
# a function of a module, a tensor's name, the tensor, and whether it is edited;
at_tensor = jax.make_user_context(None)
# a function of a tap, queries, their keys and values, and a call's arguments.
at_softmax = jax.make_user_context(None)


def capture_of(own: Capture | None) -> Capture | None:
    """Return the capture of a module: the context's, or else its own."""
    capture = capturing.value or own
    return capture if capture and capture.what else None


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
      fn: a function fn(x, *args) to a tensor of x's shape, not for `attention_scores` (default: x).
        Another function compiles a new program.
      args: the function's arrays, with gradients.
    """

    keep: Any = 1.0
    add: Any = 0.0
    heads: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)
    fn: Callable[..., Any] | None = struct.field(pytree_node=False, default=None)
    args: Any = ()

    def check(self, path: str, x: Any) -> None:
        """Check that the edit fits a tensor like x."""
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


@dataclasses.dataclass(eq=False)
class Tap:
    """The named tensors of one call of a module.

    Attributes:
      module: the module, which sows as `intermediates`.
      edits: edits by name.
      prefix: the prefix of names in `base.tensors`.
      reads: the tensors to sow.
      seen: the shapes of tensors so far, by name.
      sower: the module into which an `attention_fn` sows its weights.
    """

    module: Any = None
    edits: Mapping[str, Edit] = dataclasses.field(default_factory=dict)
    prefix: str = "attention_"
    reads: Capture | None = None
    seen: dict[str, shapes.Shape] = dataclasses.field(default_factory=dict)
    sower: Any = None

    @property
    def is_active(self) -> bool:
        """True if tensors are edited, captured or listed."""
        return bool(self.edits or self.reads or at_tensor.value or at_softmax.value)

    def is_edited(self, name: str) -> bool:
        """Return True if a tensor is edited."""
        return self.prefix + name in self.edits

    def needs(self, name: str) -> bool:
        """Return True if a tensor must be computed, though the output doesn't need it."""
        is_read = self.reads is not None and name in self.reads.what
        return is_read or self.is_edited(name) or at_tensor.value is not None

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        """Return a tensor after its edit, named for remat, and sow it if it is captured."""
        axes = TENSORS[name].axes
        if self.is_active:
            if (edit := self.edit(name, x)) is not None:
                x = sharding.auto(lambda x, edit: edit(x), axes, x, edit)
            if self.reads is not None and name in self.reads.what:
                num_heads = self.seen["attention_q"][-2] if "kv_heads" in axes else 0
                self.sow(name, self.reads.pick(x, axes, num_heads))
        return checkpoint_name(x, name) if TENSORS[name].named else x

    def edit(self, name: str, x: jax.Array | jax.ShapeDtypeStruct) -> Edit | None:
        """Return the edit of a tensor like x, or None."""
        name = self.prefix + name
        edit, self.seen[name] = self.edits.get(name), x.shape
        if at_tensor.value is not None:
            at_tensor.value(self.module, name, x, edit is not None)
        if edit is not None:
            edit.check(self.path(name), x)
        return edit

    def last(self, name: str, x: jax.Array) -> jax.Array:
        """Return the last tensor of a call, and refuse edits that no tensor had."""
        x = self(name, x)
        if unused := sorted({*self.edits} - {*self.seen}):
            raise ValueError(
                f"edits must be of tensors that the call has, {[*self.seen]}, got "
                f"{[*map(self.path, unused)]}; flax_mha.edits.names lists those of a model"
            )
        return x

    def refuse(self, names: str, reason: str) -> None:
        """Refuse edits of tensors with names of one letter."""
        for name in filter(self.is_edited, names):
            path = self.path(self.prefix + name)
            raise ValueError(f"an edit of {path} needs a call without {reason}")

    def sow(self, name: str, x: Any) -> None:
        """Sow a tensor or a tree of them."""
        self.module.sow("intermediates", self.prefix + name, x)

    def path(self, name: str) -> str:
        """Return the path of a name. An nnx module doesn't know its own."""
        return "/".join((*getattr(self.module, "path", ()), name))

    def warn_if_lost(self) -> None:
        """Warn if a transformation around this module drops its intermediates."""
        # Flax has no public way to the modules around a transformation.
        around = getattr(getattr(nn.module, "_context", None), "module_stack", ())
        scopes = [getattr(module, "scope", None) for module in around]
        if any(scope and scope.is_mutable_collection("intermediates") for scope in scopes):
            checks.warn(
                f"the capture of {self.path('')[:-1]} is lost, because a transformation around it "
                f"passes no intermediates; give nn.scan variable_axes={{'intermediates': 0}}, say"
            )


def tap_of(module: nn.Module, reads: Capture | None = None, prefix: str = "") -> Tap:
    """Return the tap of a linen module."""
    values = module.variables.get(COLLECTION, {})
    edits = {name: edit for name, edit in values.items() if isinstance(edit, Edit)}
    reads = capture_of(reads) if module.is_mutable_collection("intermediates") else None
    return Tap(module, edits, prefix, reads=reads)
