"""Positions added to features: the sinusoidal formula, and a learned table."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from flax_mha import sharding
from flax_mha.base import checks, numerics, shapes, symbols
from flax_mha.positions import rope


def sinusoidal(
    positions: jax.Array | int, features: int, *, base: float = 10_000.0, halves: bool = False,
    dtype: Dtype = jnp.float32,
) -> jax.Array:  # fmt: skip
    """Return the Transformer's sinusoidal position encoding, [*P, D].

        P[i, 2c] = sin(i / base^(2c/D)),   P[i, 2c+1] = cos(i / base^(2c/D))

    With `halves` (tensor2tensor, Whisper):

        P[i, c] = sin(i / base^(c/(D/2−1))),   P[i, D/2+c] = cos(i / base^(c/(D/2−1)))

    Args:
      positions: int [*P], or a length T for 0 … T−1.
      features: D. With `halves`, D must be even and at least 4.
      base: the ratio of the slowest to the fastest wavelength.
      halves: True for sines first, then cosines.
      dtype: the dtype of the result.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.5.
    """
    is_length = isinstance(positions, int)
    at = symbols.count_up(positions) if is_length else checks.integers("positions", positions)
    if halves and (features < 4 or features % 2):
        raise ValueError(
            f"features must be even and at least 4 with halves=True, got {features}; change it, or "
            f"give halves=False"
        )
    pairs = (features + 1) // 2
    angles = rope.compute_angles(at, pairs, 1 / (pairs - 1) if halves else 2 / features, base)
    waves = jnp.sin(angles), jnp.cos(angles)
    x = jnp.concatenate(waves, -1) if halves else jnp.stack(waves, -1).reshape(*at.shape, 2 * pairs)
    return x[..., :features].astype(dtype)


class PositionEmbedding(nn.Module):
    """A layer that adds an encoding of the position to token features.

    Attributes:
      kind: "learned" (a table [max_length, D]), "sinusoidal", "sinusoidal_halves" or "none".
      max_length: the rows of the learned table.
      embedding_init: the initializer of the learned table.
      dtype: the dtype of the result (default: the input's).
      param_dtype: the dtype of the learned table.
    """

    kind: str = "learned"
    max_length: int | None = None
    embedding_init: Initializer = nn.initializers.normal(0.02)
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Return x plus the encoding of its positions.

        Args:
          x: [*B, T, D].
          positions: int [T] or [*B, T] (default: 0 … T−1). Beyond a learned table, a static
            position is an error, a traced one gives NaN.
        """
        checks.fields(self)
        shapes.check_features("x", x)
        kinds = ("learned", "none", "sinusoidal", "sinusoidal_halves")
        checks.choice("kind", self.kind, dict.fromkeys(kinds))
        T, D = x.shape[-2:]
        dtype = self.dtype or x.dtype
        positions = symbols.count_up(T) if positions is None else positions
        at = shapes.per_token("positions", positions, x.shape[:-1])
        if self.kind == "none":
            return x.astype(dtype)
        if self.kind != "learned":
            table = sinusoidal(at, D, halves=self.kind == "sinusoidal_halves", dtype=dtype)
        else:
            rows = T if self.max_length is None else self.max_length
            checks.within("positions", at, rows, "raise max_length, or use kind='sinusoidal'")
            init = sharding.named(self.embedding_init, ("length", "embed"))
            weights = self.param("embedding", init, (rows, D), self.param_dtype)
            names = ("norm_length", None)
            table = sharding.auto(numerics.look_up, names, weights, jnp.asarray(at))
        return numerics.plus(x.astype(dtype), table)
