"""Embeddings of tokens and of image patches."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer

from flax_mha import sharding
from flax_mha.base import checks, numerics, shapes
from flax_mha.layer.linear import Projection, default_bias_init, default_kernel_init
from flax_mha.layer.qk_norm import layer_norm


class TokenEmbedding(nn.Module):
    """A token embedding whose table E [V, D] also gives logits.

        x = scale·E[tokens],   logits = x Eᵀ

    Attributes:
      vocab_size: V, the number of tokens.
      features: D, the number of features.
      embedding_init: the initializer of the table.
      dtype: the dtype of the features (default: the table's).
      param_dtype, partitioned: as in `MLP`.
      scale: the factor of the features, such as √D (Gemma).

    Source: Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017 (logits).
    """

    vocab_size: int
    features: int
    embedding_init: Initializer = nn.linear.default_embed_init
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    partitioned: bool = False
    scale: float = 1.0

    def setup(self) -> None:
        """Create the table."""
        checks.fields(self)
        init = sharding.named(self.embedding_init, ("vocab", "embed"), self.partitioned)
        self.table = nn.Embed(
            self.vocab_size, self.features, dtype=self.dtype, param_dtype=self.param_dtype,
            embedding_init=init,
        )  # fmt: skip

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the features [*B, T, D] of tokens.

        Args:
          tokens: int [*B, T]. A static id out of range is an error; a traced one gives NaN.
        """
        ids = checks.integers("tokens", tokens)
        remedy = "raise vocab_size, or map such tokens to another id"
        checks.within("tokens", ids, self.vocab_size, remedy)

        def look_up(tokens: jax.Array, table: jax.Array) -> jax.Array:
            x = numerics.look_up(sharding.constrain(table, ("vocab", None)), tokens, self.dtype)
            return x * jnp.asarray(self.scale, x.dtype)

        return sharding.auto(
            look_up, ("batch", "norm_length", None), jnp.asarray(ids), self.table.embedding
        )

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits [*B, T, V] of features [*B, T, D], float32 or wider."""
        shapes.check_features("x", x)

        def project(x: jax.Array, table: jax.Array) -> jax.Array:
            # First gathered as for `look_up`: XLA then sums both gradients over devices at once.
            table = sharding.constrain(table, ("vocab", None))
            x, table = promote_dtype(x, table, dtype=self.dtype)
            wide = shapes.wide(x.dtype)
            return jnp.einsum("...td,vd->...tv", x, table, preferred_element_type=wide)

        return sharding.auto(project, ("batch", "length", "vocab"), x, self.table.embedding)


class PatchEmbedding(nn.Module):
    """An embedding of images, with a token for each patch in row-major order.

    Attributes:
      patch_size: the height and width of a patch, or one number for both.
      features: D, the number of features.
      kernel_init, dtype, param_dtype, partitioned: as in `MLP`.
      use_bias: True if the projection has a bias.
      norm_epsilon: the epsilon of LayerNorms before and after the projection (default: none).

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
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return features [*B, (height/h)·(width/w), D] of images [*B, height, width, channels]."""
        size = self.patch_size
        h, w = size if isinstance(size, Sequence) else (size, size)
        checks.fields(self)
        checks.floating("images", images)
        *B, height, width, channels = images.shape

        def cut(images: jax.Array) -> jax.Array:
            patches = images.reshape(*B, height // h, h, width // w, w, channels)
            patches = jnp.swapaxes(patches, -4, -3)
            return patches.reshape(*B, (height // h) * (width // w), h * w * channels)

        patches = sharding.auto(cut, ("batch", "norm_length", None), images)
        patches = self._norm("patches_norm", patches)
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
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        return layer_norm(self.norm_epsilon, **dtypes, name=name)(x)
