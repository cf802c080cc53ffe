"""Stacks of blocks."""

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype

from flax_mha import inputs, masks, mesh_axes, shapes, sharding
from flax_mha.attention import LayerOptions, with_parameters
from flax_mha.blocks import Block, DecoderBlock, EncoderBlock, check_module
from flax_mha.scores import ScoreMod, as_scores


class Stack(nn.Module):
    """A stack of blocks, with a norm at the end if they are pre-norm.

    Attributes:
      num_layers: how many blocks.
      block: the block that each is a copy of, with parameters of its own.
      scan: run them by `nn.scan`, compiled once instead of num_layers times; the parameters are
        then stacked on a leading axis under `layers` instead of `layers_0`, `layers_1`, …
      scores: functions of the scores of all its layers of self-attention, after their own; what
        they learn is shared, such as the table of `RelativeBias()` in T5.
    """

    num_layers: int
    block: Block
    scan: bool = False
    scores: Sequence[ScoreMod] = ()

    kind: ClassVar[type[Block]] = Block

    @mesh_axes.whole_steps("block.attention")
    def run(self, x: jax.Array, *others: jax.Array | None, **call: Any) -> jax.Array:
        """The blocks one after another, each with the same other inputs and arguments."""
        inputs.fields(self)
        shapes.check_features("x", x)
        inputs.positive(num_layers=self.num_layers)
        check_module("block", self.block, self.kind)
        x = sharding.constrain(x, ("batch", "norm_length", None))

        if self.scores:
            own = with_parameters(self, self.scores, self.block.attention)
            call["scores"] = own + as_scores(call.get("scores", ()))
        of_each = self._of_each(call)

        def step(block: Any, x: jax.Array, others: Any, own: Any) -> tuple[jax.Array, None]:
            return block(x, *others, **call, **own), None

        if self.scan:
            # A scan's carry has one dtype, that of the blocks.
            x = x.astype(_residual_dtype(self.block, x.dtype))
            step = nn.scan(
                step,
                variable_axes={"params": 0, "intermediates": 0, "cache": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, 0),
                length=self.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            own = jax.tree.map(lambda *x: jnp.stack(x), *of_each)
            x, _ = step(self.block.copy(name="layers"), x, others, own)
        else:
            for i in range(self.num_layers):
                x, _ = step(self.block.copy(name=f"layers_{i}"), x, others, of_each[i])
        if not self.block.pre_norm:
            return x
        return self.block.make_norm("norm", self)(x)

    def _of_each(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """What each block is given of its own, taken out of the arguments that all share.

        A key for dropout, or all would drop the same weights; and its head_mask, of a list of them.
        """
        own: list[dict[str, Any]] = [{} for _ in range(self.num_layers)]
        if call.get("dropout_rng") is not None:
            key = inputs.key("dropout_rng", call.pop("dropout_rng"))
            for each, part in zip(own, jax.random.split(key, self.num_layers), strict=True):
                each["dropout_rng"] = part
        given = call.get("head_mask")
        if not isinstance(given, list | tuple):
            return own
        if len(given) != self.num_layers:
            raise ValueError(
                f"head_mask must be one array, or a list of one for each of the {self.num_layers} "
                f"blocks, got {len(given)}; give jnp.ones(N) for blocks whose heads all stay"
            )
        del call["head_mask"]
        return [each | {"head_mask": jnp.asarray(x)} for each, x in zip(own, given, strict=True)]


class Encoder(Stack):
    """A stack of `EncoderBlock`: fields of `Stack`."""

    kind = EncoderBlock

    @nn.compact
    def __call__(self, x: jax.Array, **options: Unpack[LayerOptions]) -> jax.Array:
        """Maps [*B, T, D] to [*B, T, D]; options as for `EncoderBlock`, the same in each.

        Of `head_mask` there may be a list, with one for each block.
        """
        return self.run(x, **options)


class Decoder(Stack):
    """A stack of `DecoderBlock`: fields of `Stack`."""

    kind = DecoderBlock

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        memory_mask: masks.MaskLike | None = None,
        memory_lengths: jax.Array | None = None,
        **options: Unpack[LayerOptions],
    ) -> jax.Array:
        """Maps [*B, T, D] to [*B, T, D]; arguments as for `DecoderBlock`, the same in each.

        Of `head_mask` there may be a list, with one for each block.
        """
        return self.run(
            x, memory, memory_mask=memory_mask, memory_lengths=memory_lengths, **options
        )


def _residual_dtype(block: Block, given: Dtype) -> Dtype:
    """What a block makes of an input of the given dtype."""
    layer = block.attention
    computed = layer.dtype or jnp.promote_types(given, layer.param_dtype)
    return jnp.promote_types(given, computed) if block.pre_norm else computed
