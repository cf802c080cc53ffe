"""Tokens and patches of images to features."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.layer import padding
from flax_mha.layer.linear import Projection, default_bias_init, default_kernel_init


class TokenEmbedding(nn.Module):
    """Token ids to features, and features to logits over the tokens, by one table E [V, D].

        x = scale·E[tokens],   logits = x Eᵀ

    Attributes:
      vocab_size: V, number of tokens.
      features: D.
      embedding_init: initializer of the table.
      dtype: of the features (default: that of the table).
      param_dtype: of the table.
      partitioned: box the table with its logical axis names.
      scale: of the features, such as √D (Vaswani et al., 2017; Gemma).

    Source of the table's second use: Press and Wolf, "Using the Output Embedding to Improve
    Language Models", 2017.
    """

    vocab_size: int
    features: int
    embedding_init: Initializer = nn.linear.default_embed_init
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    partitioned: bool = False
    scale: float = 1.0

    def setup(self) -> None:
        """Make the table."""
        checks.fields(self)
        checks.positive(vocab_size=self.vocab_size, features=self.features)
        init = sharding.named(self.embedding_init, ("vocab", "embed"), self.partitioned)
        self.table = nn.Embed(
            self.vocab_size, self.features, dtype=self.dtype, param_dtype=self.param_dtype,
            embedding_init=init,
        )  # fmt: skip

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map ids int [*B, T], in 0 … V−1, to [*B, T, D].

        The features of an id out of range are NaN (`nn.Embed` counts negative ones from the end).

        Raises:
          ValueError, TypeError: if ids are no integers, or known to be out of range.
        """
        ids = shapes.check_tokens("tokens", tokens)
        remedy = "raise vocab_size, or give such tokens an id of their own"
        checks.within("tokens", ids, self.vocab_size, remedy)
        scale = checks.number("scale", self.scale)
        (table,) = promote_dtype(self.table.embedding, dtype=self.dtype, inexact=False)

        def look_up(tokens: jax.Array, table: jax.Array) -> jax.Array:
            x = shapes.look_up(sharding.constrain(table, ("vocab", None)), tokens)
            return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

        return sharding.auto(look_up, ("batch", "norm_length", None), jnp.asarray(ids), table)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map features [*B, T, D] to logits [*B, T, V], float32 at least."""
        shapes.check_features("x", x)
        x, table = promote_dtype(x, self.table.embedding, dtype=self.dtype)

        def product(x: jax.Array, table: jax.Array) -> jax.Array:
            table = sharding.constrain(table, ("vocab", None))
            wide = shapes.wide(x.dtype)
            return jnp.einsum("...td,vd->...tv", x, table, preferred_element_type=wide)

        return sharding.auto(product, ("batch", "length", "vocab"), x, table)


class PatchEmbedding(nn.Module):
    """Images to one token for each patch, row by row.

    Attributes:
      patch_size: height and width of a patch, or one number for both.
      features: D.
      kernel_init: initializer of the projection.
      dtype: of the result (default: promoted from image and parameters).
      param_dtype: of the parameters.
      partitioned: box the parameters with their logical axis names.
      use_bias: whether the projection has a bias.
      norm_epsilon: that of two LayerNorms, of patches before the projection and of features after
        it, as in vit-pytorch; None for no norms.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020.
    """

    patch_size: int | Sequence[int]
    features: int
    kernel_init: Initializer = default_kernel_init
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    partitioned: bool = False
    use_bias: bool = True
    norm_epsilon: float | None = None

    @nn.compact
    def __call__(self, images: jax.Array, *, lengths: jax.Array | None = None) -> jax.Array:
        """Map [*B, height, width, channels] to [*B, (height/h)·(width/w), D].

        Of the patches of a row only the first `lengths` (int [*B], default: all) are real.
        """
        sizes = self.patch_size if isinstance(self.patch_size, Sequence) else [self.patch_size] * 2
        if len(sizes) != 2:
            raise ValueError(
                f"patch_size must be one number, or height and width, got {self.patch_size!r}"
            )
        h, w = sizes
        checks.fields(self)
        checks.positive(patch_height=h, patch_width=w, features=self.features)
        checks.floating("images", images)
        shape = images.shape
        if images.ndim < 3 or 0 in shape[-3:] or shape[-3] % h or shape[-2] % w:
            raise ValueError(
                f"images must have shape [*B, height, width, channels], of one channel or more, "
                f"with height and width positive multiples of the patch {(h, w)}, got {shape}; pad "
                f"or crop them"
            )
        *B, height, width, channels = images.shape

        def cut(images: jax.Array) -> jax.Array:
            patches = images.reshape(*B, height // h, h, width // w, w, channels)
            patches = jnp.swapaxes(patches, -4, -3)
            return patches.reshape(*B, (height // h) * (width // w), h * w * channels)

        patches = sharding.auto(cut, ("batch", "norm_length", None), images)
        patches = self._norm("patches_norm", padding.cleared(patches, lengths))
        x = Projection(
            (self.features,), (None, "embed"), kernel_init=self.kernel_init, dtype=self.dtype,
            param_dtype=self.param_dtype, partitioned=self.partitioned, name="patches",
            rows=("batch", "norm_length"), bias_init=default_bias_init if self.use_bias else None,
        )(patches)  # fmt: skip
        return self._norm("norm", x)

    @nn.nowrap
    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        if self.norm_epsilon is None:
            return x
        epsilon = checks.number("norm_epsilon", self.norm_epsilon)
        return nn.LayerNorm(epsilon, dtype=self.dtype, param_dtype=self.param_dtype, name=name)(x)
