"""Stacks of blocks."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype

from flax_mha import inputs, layouts, masks, shapes, sharding
from flax_mha.blocks import Block, DecoderBlock, EncoderBlock, check_module, make_norm
from flax_mha.grid import Array


class Stack(nn.Module):
    """A stack of blocks, with a norm at the end if they are pre-norm.

    Attributes:
      num_layers: how many blocks.
      block: the block that each is a copy of, with parameters of its own.
      scan: run them by `nn.scan`, compiled once instead of num_layers times; the parameters are
        then stacked on a leading axis under `layers` instead of `layers_0`, `layers_1`, …
    """

    num_layers: int
    block: Block
    scan: bool = False

    kind: ClassVar[type[Block]] = Block

    @layouts.whole_steps("block.attention")
    def run(self, x: jax.Array, *others: jax.Array | None, **call: Any) -> jax.Array:
        """The blocks one after another, each with the same other inputs and arguments."""
        inputs.fields(self)
        shapes.check_features("x", x)
        inputs.positive(num_layers=self.num_layers)
        check_module("block", self.block, self.kind)
        x = sharding.constrain(x, ("batch", "norm_length", None))

        def step(block: Any, x: jax.Array, others: Any) -> tuple[jax.Array, None]:
            return block(x, *others, **call), None

        if self.scan:
            # A scan's carry has one dtype, that of the blocks.
            x = x.astype(_residual_dtype(self.block, x.dtype))
            step = nn.scan(
                step,
                variable_axes={"params": 0, "intermediates": 0, "cache": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=self.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = step(self.block.copy(name="layers"), x, others)
        else:
            for i in range(self.num_layers):
                x, _ = step(self.block.copy(name=f"layers_{i}"), x, others)
        if not self.block.pre_norm:
            return x
        return make_norm(self.block.norm, "norm", self.block.attention)(x)


class Encoder(Stack):
    """A stack of `EncoderBlock`: fields of `Stack`."""

    kind = EncoderBlock

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: masks.MaskLike | None = None,
        bias: jax.Array | None = None,
        positions: jax.Array | None = None,
        lengths: jax.Array | None = None,
        order: Array | None = None,
        deterministic: bool | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Maps [*B, T, D] to [*B, T, D]; arguments as for `EncoderBlock`, the same in each."""
        return self.run(
            x, mask=mask, bias=bias, positions=positions, lengths=lengths, order=order,
            deterministic=deterministic, sow_weights=sow_weights,
        )  # fmt: skip


class Decoder(Stack):
    """A stack of `DecoderBlock`: fields of `Stack`."""

    kind = DecoderBlock

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        mask: masks.MaskLike | None = None,
        memory_mask: masks.MaskLike | None = None,
        memory_lengths: jax.Array | None = None,
        bias: jax.Array | None = None,
        positions: jax.Array | None = None,
        lengths: jax.Array | None = None,
        order: Array | None = None,
        deterministic: bool | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Maps [*B, T, D] to [*B, T, D]; arguments as for `DecoderBlock`, the same in each."""
        return self.run(
            x, memory, mask=mask, memory_mask=memory_mask, memory_lengths=memory_lengths,
            bias=bias, positions=positions, lengths=lengths, order=order,
            deterministic=deterministic, sow_weights=sow_weights,
        )  # fmt: skip


def _residual_dtype(block: Block, given: Dtype) -> Dtype:
    """What a block makes of an input of the given dtype."""
    layer = block.attention
    computed = layer.dtype or jnp.promote_types(given, layer.param_dtype)
    return jnp.promote_types(given, computed) if block.pre_norm else computed
