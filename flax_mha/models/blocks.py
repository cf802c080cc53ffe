"""Transformer blocks around the attention layer."""

from typing import Any, Literal, Unpack, overload

import flax.linen as nn
import jax

from flax_mha import masks
from flax_mha.base import checks
from flax_mha.cache.sources import Shared
from flax_mha.layer import padding, settings
from flax_mha.linen import LayerOptions, MultiHeadAttention
from flax_mha.models.residual import Block as Block
from flax_mha.models.residual import Calls

# Of a block's options, those for its cross-attention too.
_OF_BOTH: tuple[Literal["lengths", "dropout_rng", "sow_weights"], ...] = (
    "lengths", "dropout_rng", "sow_weights",
)  # fmt: skip


class EncoderBlock(Block):
    """Self-attention and an MLP, each with a norm and a residual: fields and equation of `Block`.

        x ← x + attention(norm(x));   x ← x + mlp(norm(x))

    Sources: see `Block`.
    """

    @overload
    def __call__(
        self, x: jax.Array, *, return_kv: Literal[False] = ..., **options: Unpack[LayerOptions]
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: jax.Array, *, return_kv: Literal[True], **options: Unpack[LayerOptions]
    ) -> tuple[jax.Array, Shared]: ...
    @nn.compact
    def __call__(
        self, x: jax.Array, *, return_kv: bool = False, **options: Unpack[LayerOptions]
    ) -> Any:
        """Maps [*B, T, D] to [*B, T, D]; options are the arguments of `MultiHeadAttention`.

        `deterministic` must be given if something is dropped; a layer whose field of that name is
        set keeps to that. With `return_kv` the layer's keys and values are returned, too.
        """
        x = padding.cleared(x, options.get("lengths"), options.get("order"))
        deterministic = options.pop("deterministic", None)
        return self.run(x, deterministic, {"attention": options}, return_kv)


class DecoderBlock(Block):
    """Causal self-attention, attention to a memory, and an MLP: fields and equation of `Block`.

        x ← x + attention(norm(x));                causally
        x ← x + cross_attention(norm(x), memory);  unless that is None
        x ← x + mlp(norm(x))

    Attributes:
      cross_attention: the layer that attends to the memory, such as an encoder's output (default:
        None, there is no memory).

    With `decode=True` in its layers the block goes on from the tokens so far: `MultiHeadAttention`
    says how. The memory is then given once, when the cache is made.
    """

    cross_attention: MultiHeadAttention | None = None

    @overload
    def __call__(
        self, x: jax.Array, memory: jax.Array | None = ..., *,
        memory_mask: masks.MaskLike | None = ..., memory_lengths: jax.Array | None = ...,
        return_kv: Literal[False] = ..., **options: Unpack[LayerOptions],
    ) -> jax.Array: ...  # fmt: skip
    @overload
    def __call__(
        self, x: jax.Array, memory: jax.Array | None = ..., *,
        memory_mask: masks.MaskLike | None = ..., memory_lengths: jax.Array | None = ...,
        return_kv: Literal[True], **options: Unpack[LayerOptions],
    ) -> tuple[jax.Array, Shared]: ...  # fmt: skip
    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        memory_mask: masks.MaskLike | None = None,
        memory_lengths: jax.Array | None = None,
        return_kv: bool = False,
        **options: Unpack[LayerOptions],
    ) -> Any:
        """Decodes.

        Args:
          x: [*B, T, D].
          memory: [*B, S, D'], what `cross_attention` attends to.
          memory_mask: which of the memory a token may see.
          memory_lengths: int [*B], how many of the memory's tokens are real (default: all). The
            others are not attended to, and reach neither outputs nor gradients.
          return_kv: also return the keys and values of self-attention.
          **options: arguments of the self-attention, see `MultiHeadAttention`; its mask joins
            causality. `lengths`, `dropout_rng` and `sow_weights` are for both layers.
            `deterministic` must be given if there is something to drop; a layer whose field of that
            name is set keeps to that.

        Returns:
          [*B, T, D]; or a tuple of it and the keys and values.

        Raises:
          ValueError: if there is a memory and no `cross_attention`, or the other way round; if
            both layers are one module.
        """
        cross = self.cross_attention
        if cross is not None:
            settings.check_module("cross_attention", cross, MultiHeadAttention)
        if cross is self.attention:
            raise ValueError(
                "attention and cross_attention must be two modules, got one that would share its "
                "parameters; give cross_attention=layer.copy()"
            )
        if cross is None and any(x is not None for x in (memory, memory_mask, memory_lengths)):
            raise ValueError(
                "memory, memory_mask and memory_lengths are for cross_attention, which is None; "
                "set it to a MultiHeadAttention, or drop them"
            )
        if cross is not None and memory is None and not cross.decode:
            raise ValueError(
                "cross_attention needs a memory to attend to, got None; give the encoder's output"
            )
        x = padding.cleared(x, options.get("lengths"), options.get("order"))
        deterministic = options.pop("deterministic", None)
        if memory_lengths is not None:
            memory_mask = masks.combine(memory_mask, masks.Lengths(memory_lengths))
            memory = None if memory is None else padding.cleared(memory, memory_lengths)
        of_both: dict[str, Any] = {name: options.get(name) for name in _OF_BOTH if name in options}
        options["mask"] = masks.combine(masks.Causal(), options.get("mask"))
        calls: Calls = {"attention": options}
        if cross is not None:
            if of_both.get("dropout_rng") is not None:
                # Two keys, or both layers would drop the same weights.
                key = checks.key("dropout_rng", of_both["dropout_rng"])
                options["dropout_rng"], of_both["dropout_rng"] = jax.random.split(key)
            calls["cross_attention"] = {"inputs_k": memory, "mask": memory_mask, **of_both}
        return self.run(x, deterministic, calls, return_kv)
