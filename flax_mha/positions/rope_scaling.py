"""Scalings of rotary embeddings, for sequences longer than those of training.

Pair c of R features turns by the angle i·θ_c at position i, with θ_c = base^(−2c/R). A scaling
changes the θ_c, and perhaps the size of the queries and keys.
"""

import dataclasses
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks, shapes


def frequencies(R: int, base: float) -> np.ndarray:
    """Return θ_c for the pairs of R features, float64 [R/2]."""
    return base ** (-np.arange(0, R, 2) / R)


@dataclasses.dataclass(frozen=True)
class Interpolation:
    """θ_c / factor: position i is what i / factor was ("linear" in checkpoints).

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023.
    """

    factor: float

    def __post_init__(self) -> None:
        _check(self, ("factor",))

    def __call__(self, R: int, base: float) -> tuple[np.ndarray, float]:
        """Return the scaled θ [R/2], and the factor of queries and keys."""
        return frequencies(R, base) / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class Ntk:
    """A base of base·factor^(R / (R − 2)): the slowest pair as interpolated, the fastest as it was.

    Source: bloc97, "NTK-Aware Scaled RoPE", 2023; Peng et al., "YaRN", 2023, section 3.1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check(self, ("factor",))

    def __call__(self, R: int, base: float) -> tuple[np.ndarray, float]:
        return frequencies(R, base * self.factor ** (R / max(R - 2, 1))), 1.0


@dataclasses.dataclass(frozen=True)
class Yarn:
    """Pairs that turn often in `original_length` tokens keep θ, those that hardly do have θ/factor.

    Between `beta_fast` and `beta_slow` turns a ramp over the index of the pair leads from one to
    the other. Queries and keys are multiplied by `attention_factor`.

    Attributes:
      factor: the divisor of θ of slow pairs.
      original_length: of training, in tokens.
      beta_fast: turns from which a pair keeps θ.
      beta_slow: turns up to which a pair has θ/factor.
      attention_factor: the factor of queries and keys (default: 0.1·ln(factor) + 1).
      truncate: True if the ramp begins and ends at whole indices, as in the paper's code.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check(self, ("factor", "beta_fast", "beta_slow"))
        checks.positive(**{"Yarn.original_length": self.original_length})
        if self.attention_factor is not None:
            checks.number("Yarn.attention_factor", self.attention_factor)
        checks.flag("Yarn.truncate", self.truncate)

    def __call__(self, R: int, base: float) -> tuple[np.ndarray, float]:
        theta = frequencies(R, base)

        def index(turns: float) -> float:
            return R * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, R - 1)
        ramp = np.clip((np.arange(R // 2) - first) / max(last - first, 0.001), 0, 1)
        size = self.attention_factor
        if size is None:
            size = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return theta * (1 - ramp) + theta / self.factor * ramp, size


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Wavelengths 2π/θ beyond original_length / low as θ/factor, those below …/high as they were.

    Between them the mean of both, weighted by (original_length / wavelength − low) / (high − low).

    Attributes:
      factor: the divisor of θ of long waves.
      original_length: of training, in tokens.
      low: turns in that length, up to which a wave is long.
      high: turns from which it is short.

    Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024, and its code.
    """

    factor: float
    original_length: int
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        _check(self, ("factor", "low", "high"))
        checks.positive(**{"Llama3.original_length": self.original_length})
        if self.low >= self.high:
            raise ValueError(
                f"Llama3.low must be below high, got {self.low} and {self.high}; 1 and 4 are usual"
            )

    def __call__(self, R: int, base: float) -> tuple[np.ndarray, float]:
        theta = frequencies(R, base)
        turns = self.original_length * theta / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return theta * kept + theta / self.factor * (1 - kept), 1.0


@dataclasses.dataclass(frozen=True)
class DynamicNtk:
    """`Ntk` that grows with a row of L tokens: the base times (factor·L/original − factor + 1)^….

    The power is R / (R − 2). Up to the original length nothing changes ("dynamic" in checkpoints).
    A row's length is that of its call, and with a cache that of the tokens so far: keys in the
    cache keep the turn that they had.

    Attributes:
      factor: see the equation.
      original_length: of training, in tokens.

    Source: emozilla, "Dynamically Scaled RoPE", 2023; Peng et al., "YaRN", 2023, section 3.3.
    """

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check(self, ("factor",))
        checks.positive(**{"DynamicNtk.original_length": self.original_length})

    def __call__(self, R: int, base: float, length: jax.Array) -> tuple[jax.Array, float]:
        """Return θ [*L, R/2] for rows of length [*L], and the factor of queries and keys."""
        grown = jnp.maximum(length / self.original_length, 1.0) * self.factor - (self.factor - 1)
        theta, power = (
            shapes.lead(jnp.asarray(x, grown.dtype), grown.ndim + 1)
            for x in (frequencies(R, base), -np.arange(0, R, 2) / max(R - 2, 1))
        )
        return theta * grown[..., None] ** power, 1.0


@dataclasses.dataclass(frozen=True)
class LongRope:
    """θ_c / short_c in rows up to the original length, and θ_c / long_c in longer ones.

    A row's length is that of its call, and with a cache that of the tokens so far: keys in the
    cache keep the turn that they had.

    Attributes:
      short: R/2 numbers.
      long: R/2 numbers.
      original_length: of training, in tokens.
      attention_factor: a factor of queries and keys.

    Source: Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(**{"LongRope.original_length": self.original_length})
        checks.number("LongRope.attention_factor", self.attention_factor)

    def __call__(self, R: int, base: float, length: jax.Array) -> tuple[jax.Array, float]:
        if not len(self.short) == len(self.long) == R // 2:
            raise ValueError(
                f"LongRope.short and long must have R/2={R // 2} numbers, one for each pair, got "
                f"{len(self.short)} and {len(self.long)}; take those of this head_dim"
            )
        theta = frequencies(R, base)
        short, long = (
            shapes.lead(jnp.asarray(theta / np.array(x), length.dtype), length.ndim + 1)
            for x in (self.short, self.long)
        )
        is_long = length[..., None] > self.original_length
        return jnp.where(is_long, long, short), self.attention_factor


# By the length of each row.
Growing: TypeAlias = DynamicNtk | LongRope
Scaling: TypeAlias = Interpolation | Ntk | Yarn | Llama3 | Growing


def _check(scaling: Scaling, names: tuple[str, ...]) -> None:
    for name in names:
        full, x = f"{type(scaling).__name__}.{name}", getattr(scaling, name)
        if checks.number(full, x) <= 0:
            raise ValueError(f"{full} must be above 0, got {x}; 1 changes nothing")
