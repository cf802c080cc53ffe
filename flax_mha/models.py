"""Models made of the blocks."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer

from flax_mha import cache, masks, shapes, sharding
from flax_mha.blocks import Dropout, EncoderBlock, check_module, make_norm
from flax_mha.positions import PositionEmbedding
from flax_mha.projections import Projection, default_kernel_init


class Encoder(nn.Module):
    """A stack of blocks, with a norm at the end if they are pre-norm.

    Attributes:
      num_layers: how many blocks.
      block: the block that each is a copy of, with parameters of its own.
      scan: run them by `nn.scan`, compiled once instead of num_layers times; the parameters are
        then stacked on a leading axis under `layers` instead of `layers_0`, `layers_1`, …
    """

    num_layers: int
    block: EncoderBlock
    scan: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: masks.MaskLike | None = None,
        bias: jax.Array | None = None,
        positions: jax.Array | None = None,
        lengths: jax.Array | None = None,
        deterministic: bool = True,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Maps [*B, T, D] to [*B, T, D]; arguments as for `EncoderBlock`, the same in each."""
        shapes.check_positive(num_layers=self.num_layers)
        check_module("block", self.block, EncoderBlock)
        x = sharding.constrain(x, ("batch", "norm_length", None))

        def run(block: EncoderBlock, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            x = block(
                x, mask=mask, bias=bias, positions=positions, lengths=lengths,
                deterministic=deterministic, sow_weights=sow_weights,
            )  # fmt: skip
            return x, None

        if self.scan:
            # A scan's carry has one dtype, that of the blocks.
            x = x.astype(_residual_dtype(self.block, x.dtype))
            run = nn.scan(
                run,
                variable_axes={"params": 0, "intermediates": 0, "cache": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            with cache.reporting(False):
                x, _ = run(self.block.copy(name="layers"), x, None)
        else:
            for i in range(self.num_layers):
                x, _ = run(self.block.copy(name=f"layers_{i}"), x, None)
        return (
            make_norm(self.block.norm, "norm", self.block.attention)(x)
            if self.block.pre_norm
            else x
        )


def _residual_dtype(block: EncoderBlock, given: Dtype) -> Dtype:
    """What a block makes of an input of the given dtype."""
    layer = block.attention
    computed = layer.dtype or jnp.promote_types(given, layer.param_dtype)
    return jnp.promote_types(given, computed) if block.pre_norm else computed


class TokenEmbedding(nn.Module):
    """Token ids to features.

    Attributes:
      vocab_size: number of tokens.
      features: D.
      embedding_init: initializer of the table.
      dtype: of the result (default: that of the table).
      param_dtype: of the table.
      partitioned: box the table with its logical axis names.
    """

    vocab_size: int
    features: int
    embedding_init: Initializer = nn.linear.default_embed_init
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    partitioned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps int [*B, T] to [*B, T, D]."""
        shapes.check_positive(vocab_size=self.vocab_size, features=self.features)
        shapes.check_array("tokens", tokens)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must be integer ids, got {tokens.dtype}; cast them to int32")
        init = sharding.named(self.embedding_init, ("vocab", "embed"), self.partitioned)
        table = nn.Embed(
            self.vocab_size, self.features, dtype=self.dtype, param_dtype=self.param_dtype,
            embedding_init=init, name="table",
        ).embedding  # fmt: skip
        (table,) = promote_dtype(table, dtype=self.dtype, inexact=False)

        def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
            return jnp.take(sharding.constrain(table, ("vocab", None)), tokens, axis=0)

        return sharding.auto(look_up, ("batch", "norm_length", None), table, tokens)


class PatchEmbedding(nn.Module):
    """Images to one token for each patch, row by row.

    Attributes:
      patch_size: height and width of a patch, or one number for both.
      features: D.
      kernel_init: initializer of the projection.
      dtype: of the result (default: promoted from image and parameters).
      param_dtype: of the parameters.
      partitioned: box the parameters with their logical axis names.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020.
    """

    patch_size: int | Sequence[int]
    features: int
    kernel_init: Initializer = default_kernel_init
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    partitioned: bool = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps [*B, height, width, channels] to [*B, (height/h)·(width/w), D]."""
        sizes = self.patch_size if isinstance(self.patch_size, Sequence) else [self.patch_size] * 2
        if len(sizes) != 2:
            raise ValueError(
                f"patch_size must be one number, or height and width, got {self.patch_size!r}"
            )
        h, w = sizes
        shapes.check_positive(patch_height=h, patch_width=w, features=self.features)
        shapes.check_floating("images", images)
        if images.ndim < 3 or images.shape[-3] % h or images.shape[-2] % w:
            raise ValueError(
                f"images must have shape [*B, height, width, channels] with height and width "
                f"multiples of the patch {(h, w)}, got {images.shape}; pad or crop them"
            )
        *B, height, width, channels = images.shape

        def cut(images: jax.Array) -> jax.Array:
            patches = images.reshape(*B, height // h, h, width // w, w, channels)
            patches = jnp.swapaxes(patches, -4, -3)
            return patches.reshape(*B, (height // h) * (width // w), h * w * channels)

        patches = sharding.auto(cut, ("batch", "norm_length", None), images)
        return Projection(
            (self.features,), (None, "embed"), kernel_init=self.kernel_init, dtype=self.dtype,
            param_dtype=self.param_dtype, partitioned=self.partitioned, name="patches",
            rows=("batch", "norm_length"),
        )(patches)  # fmt: skip


class Classifier(nn.Module):
    """Embeds, adds positions, encodes, averages over the tokens, and projects to logits.

    Attributes:
      embedding: `TokenEmbedding`, `PatchEmbedding` or any module that gives [*B, T, D].
      encoder: the stack.
      num_classes: features of the logits.
      positions: "learned", "sinusoidal", or "none" (if the attention layer rotates, say).
      dropout_rate: of the embedded tokens.
    """

    embedding: nn.Module
    encoder: Encoder
    num_classes: int
    positions: str = "learned"
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        *,
        lengths: jax.Array | None = None,
        deterministic: bool = True,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Classifies each row of the batch.

        Args:
          inputs: what the embedding takes.
          lengths: int [*B], how many of each row's tokens are real (default: all). The others
            have no influence.
          deterministic: False turns dropout on; needs the rng `dropout`.
          sow_weights: see `MultiHeadAttention`.

        Returns:
          Logits [*B, num_classes], float32.
        """
        shapes.check_positive(num_classes=self.num_classes)
        shapes.check_rate("dropout_rate", self.dropout_rate)
        x = PositionEmbedding(self.positions, name="positions")(self.embedding(inputs))
        x = Dropout(self.dropout_rate)(x, deterministic=deterministic)
        mask = None if lengths is None else masks.Lengths(lengths)
        x = self.encoder(x, mask=mask, deterministic=deterministic, sow_weights=sow_weights)
        pooled = _mean(x.astype(jnp.float32), lengths)
        head = Projection(
            (self.num_classes,), ("embed", None), rows=("batch",), dtype=jnp.float32, name="head"
        )
        return head(pooled)


def _mean(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """The mean of each row's real tokens, [*B, T, D] to [*B, D]; 0 where there is none."""
    if lengths is None:
        return jnp.mean(x, axis=-2)
    lengths = shapes.row_lengths("lengths", lengths, x.shape[:-2])
    count = lengths[..., None]
    real = shapes.lead(jnp.arange(x.shape[-2]), x.ndim - 1) < count
    return jnp.sum(x, axis=-2, where=real[..., None]) / jnp.maximum(count, 1).astype(x.dtype)
