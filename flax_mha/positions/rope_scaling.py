"""Scalings of rotary embeddings, for sequences longer than in training.

A scaling changes θ_c = base^(−2c/R), the frequencies of pairs c of R features. Some also multiply
queries and keys by a factor.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import shapes
from flax_mha.base.frequencies import Frequencies


def frequencies(R: int, base: float) -> np.ndarray:
    """Return the frequencies θ_c of R features, float64 [R/2]."""
    return base ** (-np.arange(0, R, 2) / R)


def Interpolation(factor: float) -> "Proportional":
    """Return position interpolation, θ_c / factor ("linear" in checkpoints).

    Args:
      factor: the divisor of positions.

    Source: Chen et al., 2023.
    """
    return Proportional(1.0, factor)


@dataclass(frozen=True)
class Ntk:
    """NTK-aware scaling. The base becomes base·factor^(R / (R − 2)).

    Attributes:
      factor: the divisor of the slowest frequency.

    Source: bloc97, 2023; Peng et al., "YaRN", 2023, section 3.1.
    """

    factor: float

    def __call__(self, R: int, base: float) -> tuple[np.ndarray, float]:
        return frequencies(R, base * self.factor ** (R / max(R - 2, 1))), 1.0


@dataclass(frozen=True)
class Yarn:
    """YaRN. Fast pairs keep θ, slow pairs get θ/factor, with a ramp between them.

    Attributes:
      factor: the divisor of θ of slow pairs.
      original_length: the length of training sequences in tokens.
      beta_fast: pairs that rotate more often in it are fast.
      beta_slow: pairs that rotate less often are slow.
      attention_factor: the factor of queries and keys (default: 0.1·ln(factor) + 1).
      truncate: True to round the ends of the ramp to whole pairs, as the paper's code does.

    Source: Peng et al., "YaRN", 2023.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __call__(self, R: int, base: float) -> tuple[np.ndarray, float]:
        theta = frequencies(R, base)

        def index(rotations: float) -> float:
            length = self.original_length / (rotations * 2 * math.pi)
            return R * math.log(length) / (2 * math.log(base))

        first, last = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, R - 1)
        ramp = np.clip((np.arange(R // 2) - first) / max(last - first, 0.001), 0, 1)
        size = self.attention_factor
        if size is None:
            size = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return theta * (1 - ramp) + theta / self.factor * ramp, size


@dataclass(frozen=True)
class Proportional:
    """A rotation of only the fastest pairs: θ_c / factor for c < share·R/2, and 0 for the others.

    Attributes:
      share: the share of the pairs that is rotated, at most 1.
      factor: the divisor of θ.

    Source: Google DeepMind, Gemma 4, 2026 ("proportional" in checkpoints).
    """

    share: float
    factor: float = 1.0

    def __call__(self, R: int, base: float) -> tuple[np.ndarray, float]:
        is_rotated = np.arange(R // 2) < int(self.share * R // 2)
        return frequencies(R, base) / self.factor * is_rotated, 1.0


@dataclass(frozen=True)
class Llama3:
    """Llama 3's scaling. Fast pairs keep θ, slow pairs get θ/factor, others a mean of both.

    Attributes:
      factor: the divisor of θ of slow pairs.
      original_length: the length of training sequences in tokens.
      low: pairs that rotate less often in it are slow.
      high: pairs that rotate more often are fast.

    Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024, and its code.
    """

    factor: float
    original_length: int
    low: float = 1.0
    high: float = 4.0

    def __call__(self, R: int, base: float) -> tuple[np.ndarray, float]:
        theta = frequencies(R, base)
        rotations = self.original_length * theta / (2 * math.pi)
        share = np.clip((rotations - self.low) / (self.high - self.low), 0, 1)
        return theta * share + theta / self.factor * (1 - share), 1.0


@dataclass(frozen=True)
class DynamicNtk:
    """`Ntk` with a factor that grows with the length L of each row ("dynamic" in checkpoints).

    The base is multiplied by max(factor·L/original_length − factor + 1, 1)^(R / (R − 2)). L is the
    greatest position of the row's tokens in the call, without padding, plus 1.

    Attributes:
      factor: the growth of the factor with L.
      original_length: the length of training sequences in tokens.

    Source: emozilla, 2023; Peng et al., "YaRN", 2023, section 3.3.
    """

    factor: float
    original_length: int

    def __call__(self, R: int, base: float, length: jax.Array) -> tuple[Frequencies, float]:
        """Return frequencies [*L, R/2] for rows of length [*L], and the factor of q and k."""
        factor = jnp.maximum(length / self.original_length, 1.0) * self.factor - (self.factor - 1)
        theta, power = (
            shapes.lead(jnp.asarray(x, factor.dtype), factor.ndim + 1)
            for x in (frequencies(R, base), -np.arange(0, R, 2) / max(R - 2, 1))
        )
        return Frequencies.of(theta * factor[..., None] ** power), 1.0


@dataclass(frozen=True)
class LongRope:
    """LongRoPE. θ_c is divided by short_c in short rows and by long_c in long ones.

    Attributes:
      short: the R/2 divisors for rows up to the original length.
      long: the R/2 divisors for longer rows.
      original_length: the length of training sequences in tokens.
      attention_factor: the factor of queries and keys.

    Source: Ding et al., "LongRoPE", 2024.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    attention_factor: float = 1.0

    def __call__(self, R: int, base: float, length: jax.Array) -> tuple[Frequencies, float]:
        theta = frequencies(R, base)
        short, long = (
            Frequencies.of(theta / np.array(x), length.dtype) for x in (self.short, self.long)
        )
        is_long = length[..., None] > self.original_length

        def choose(short: Any, long: Any) -> jax.Array:
            short, long = (shapes.lead(x, is_long.ndim) for x in (short, long))
            return jnp.where(is_long, long, short)

        return jax.tree.map(choose, short, long), self.attention_factor


# Scalings that depend on the length of each row.
Growing: TypeAlias = DynamicNtk | LongRope
Scaling: TypeAlias = Ntk | Yarn | Proportional | Llama3 | Growing
