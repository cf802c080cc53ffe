"""Where a token stands: sinusoidal and rotary formulas, and a learned table."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype, Initializer

from flax_mha import inputs, shapes, sharding, symbols, turning
from flax_mha.axial import Axial as Axial
from flax_mha.axial import MRope as MRope
from flax_mha.rope_scaling import DynamicNtk as DynamicNtk
from flax_mha.rope_scaling import Growing, Scaling
from flax_mha.rope_scaling import Interpolation as Interpolation
from flax_mha.rope_scaling import Llama3 as Llama3
from flax_mha.rope_scaling import LongRope as LongRope
from flax_mha.rope_scaling import Ntk as Ntk
from flax_mha.rope_scaling import Yarn as Yarn

Rotation: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
KINDS = ("learned", "none", "sinusoidal", "sinusoidal_halves")


def sinusoidal(
    positions: jax.Array | int,
    features: int,
    *,
    base: float = 10_000.0,
    halves: bool = False,
    dtype: Dtype = jnp.float32,
) -> jax.Array:
    """The sinusoidal position encoding of the Transformer.

        P[i, 2c] = sin(i / base^(2c/D)),   P[i, 2c+1] = cos(i / base^(2c/D))

    With `halves`, as in tensor2tensor and Whisper, sines come first, and the slowest wavelength is
    reached:

        P[i, c] = sin(i / base^(c/(D/2−1))),   P[i, D/2+c] = cos(i / base^(c/(D/2−1)))

    Args:
      positions: int [*P], or a length T that stands for 0 … T−1.
      features: D; an odd D ends with a sine. With `halves` even, and at least 4.
      base: the ratio of the slowest to the fastest wavelength.
      halves: see above.
      dtype: of the result; the angles are computed in float32.

    Returns:
      [*P, D].

    Raises:
      ValueError: if there are not so many features.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.5.
    """
    inputs.positive(features=features)
    if isinstance(positions, int):
        at = jnp.arange(inputs.integer("positions", positions))
    elif isinstance(positions, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(
        positions.dtype, jnp.floating
    ):
        at = jnp.asarray(positions)
    else:
        at = jnp.asarray(inputs.integers("positions", positions))
    dtype = inputs.dtype("dtype", dtype)
    turning.check_base(base)
    if inputs.flag("halves", halves):
        if features < 4 or features % 2:
            raise ValueError(
                f"halves of sines and cosines need an even number of features, at least 4, got "
                f"{features}; choose another, or halves=False"
            )
        angles = turning.angles(at, features // 2, 1 / (features // 2 - 1), base)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(dtype)
    angles = turning.angles(at, (features + 1) // 2, 2 / features, base)
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*at.shape, features + features % 2)[..., :features].astype(dtype)


def rotary(
    x: jax.Array,
    positions: jax.Array,
    *,
    base: float = 10_000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
    scaling: Scaling | None = None,
) -> jax.Array:
    """Rotary position embedding: turns pairs of features by an angle that grows with position.

        (x₁, x₂) ← (x₁ cos θ − x₂ sin θ, x₂ cos θ + x₁ sin θ),   θ = i / base^(2c/R)

    for pair c of the first R = fraction·H features at position i, so that the score of a query
    at i and a key at j depends on their content and on i − j alone.

    Args:
      x: queries or keys [*B, T, N, H].
      positions: int [T] or [*B, T].
      base: the ratio of the slowest to the fastest wavelength.
      fraction: the share of the features that turn; the rest pass unchanged.
      interleaved: pairs are (0, 1), (2, 3), … (RoFormer, GPT-J) instead of (0, R/2),
        (1, R/2 + 1), … (GPT-NeoX, LLaMA).
      scaling: of θ for longer sequences: `Interpolation`, `Ntk`, `Yarn`, `Llama3`,
        `DynamicNtk` or `LongRope`.

    Returns:
      [*B, T, N, H] in the dtype of x; the rotation is computed in float32 at least.

    Raises:
      ValueError: if R is not a positive even number, or the positions do not fit x.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    turning.heads(x)
    positions = shapes.per_token("positions", positions, x.shape[:-2])
    inputs.flag("interleaved", interleaved)
    turning.check_base(base)
    R = round(inputs.number("fraction", fraction) * x.shape[-1])
    if R < 2 or R % 2 or x.shape[-1] < R:
        raise ValueError(
            f"rotary turns pairs, so fraction·H must be even, at least 2 and at most H; got "
            f"fraction={fraction} of H={x.shape[-1]}; choose an even head_dim or another fraction"
        )
    if scaling is None:
        return turning.turn(x, turning.angles(positions, R // 2, 2 / R, base), interleaved)
    if not isinstance(scaling, Scaling):
        raise TypeError(
            f"scaling must be of flax_mha.positions, got {inputs.came(scaling)}; give "
            f"Llama3(factor=8, original_length=8192), say"
        )
    at = turning.floats(positions)
    if isinstance(scaling, Growing):
        # Of the row, up to the newest of these tokens.
        turns, size = scaling(R, base, jnp.max(at, axis=-1, keepdims=True) + 1)
    else:
        theta, size = scaling(R, base)
        turns = shapes.lead(jnp.asarray(theta, at.dtype), at.ndim + 1)
    angles = at[..., None] * turns
    return turning.turn(x, angles, interleaved, size)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """`rotary` with its settings fixed: what the layer's `rotary` field takes."""

    base: float = 10_000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """See `rotary`."""
        return rotary(x, positions, **vars(self))


def rotate(
    rotation: Rotation | None,
    q: jax.Array,
    k: jax.Array | None,
    positions: jax.Array | tuple[jax.Array, jax.Array] | None,
    q_pos: jax.Array,
    k_pos: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Turns queries and keys by the positions given (both, or a pair), or else by q_pos and k_pos.

    No keys (None) stand for those that a cache holds, turned already.

    Raises:
      ValueError: if positions are given and there is no rotation, or a lattice has too few places.
    """
    if rotation is None:
        if positions is not None:
            raise ValueError(
                "positions say where `rotary` turns queries and keys, and rotary is None; "
                "set it to positions.Rotary(), or drop positions"
            )
        return q, k
    if positions is None and isinstance(rotation, Axial):
        # Inside `jit` q_pos and k_pos are traced, but T tokens need T places wherever they start.
        for x in (q, k):
            rotation.check(np.arange(0 if x is None else x.shape[-3]))
    if isinstance(positions, tuple) and len(positions) == 2:
        q_pos, k_pos = positions
    elif positions is not None:
        k_pos = positions if q_pos.shape[-1] == k_pos.shape[-1] else k_pos
        q_pos = positions
    return _turned(rotation, q, q_pos), None if k is None else _turned(rotation, k, k_pos)


def _turned(rotation: Rotation, x: jax.Array, positions: jax.Array) -> jax.Array:
    """What a rotation, perhaps a user's own, makes of queries or keys."""
    y = rotation(x, positions)
    if getattr(y, "shape", None) != x.shape:
        raise ValueError(
            f"rotary must keep the shape of queries and keys, {x.shape}, got {inputs.came(y)}; "
            f"return what it has turned"
        )
    return inputs.floating("what rotary gives", y)


class PositionEmbedding(nn.Module):
    """Adds a position encoding to token features.

    Attributes:
      kind: "learned" (a table [max_length, D]), "sinusoidal", "sinusoidal_halves" (Whisper's, see
        `sinusoidal`), or "none".
      max_length: rows of the learned table; longer inputs are an error.
      embedding_init: initializer of the learned table.
      dtype: of the result (default: that of the inputs).
      param_dtype: of the learned table.
    """

    kind: str = "learned"
    max_length: int | None = None
    embedding_init: Initializer = nn.initializers.normal(0.02)
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Maps x [*B, T, D] to x + P at positions int [T] or [*B, T] (default 0 … T−1).

        Where a learned table has no such row, the result is NaN.

        Raises:
          ValueError, TypeError: if shapes, dtypes or fields do not fit, or positions are known to
            be beyond a learned table.
        """
        inputs.fields(self)
        shapes.check_features("x", x)
        inputs.choose("kind", self.kind, dict.fromkeys(KINDS))
        inputs.optional(max_length=self.max_length)
        T, D = x.shape[-2:]
        dtype = self.dtype or x.dtype
        given = symbols.count_up(T) if positions is None else positions
        at = shapes.per_token("positions", given, x.shape[:-1])
        if self.kind == "none":
            return x.astype(dtype)
        if self.kind != "learned":
            table = sinusoidal(at, D, halves=self.kind == "sinusoidal_halves", dtype=dtype)
        else:
            rows = T if self.max_length is None else self.max_length
            if self.max_length is not None and symbols.at_most(rows + 1, T):
                raise ValueError(
                    f"the learned position table has max_length={rows} rows, but the input is "
                    f"{T} long; raise max_length, or use kind='sinusoidal'"
                )
            remedy = "raise max_length, or use kind='sinusoidal'"
            inputs.within("positions", at, rows, remedy)
            init = sharding.named(self.embedding_init, ("length", "embed"))
            weights = self.param("embedding", init, (rows, D), self.param_dtype)

            def look_up(weights: jax.Array, positions: jax.Array) -> jax.Array:
                return shapes.look_up(weights.astype(dtype), positions)

            table = sharding.auto(look_up, ("norm_length", None), weights, jnp.asarray(at))
        return x.astype(dtype) + shapes.lead(table, x.ndim)
