"""What a layer keeps of its tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from flax.typing import Dtype

from flax_mha import masks
from flax_mha.base import checks
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.storage import Memory


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """How a layer's cache holds its tokens.

    Attributes:
      dtype: that keys and values are stored in (default: their own); "int8" has a scale for each
        token and head.
      slots: of a ring buffer, which holds the last so many tokens: at least W + 1 under a mask
        `Window(W, ·)`. Then there is no end to the tokens that follow (default: one for each token
        of the input that the cache is made with).

    Raises:
      ValueError, TypeError: if a dtype can't be stored, or slots are no positive whole number.
    """

    dtype: Dtype | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            checks.dtype("CacheConfig.dtype", self.dtype, "a floating dtype or int8")
        checks.optional(**{"CacheConfig.slots": self.slots})

    def window(self, mask: masks.MaskLike | None) -> int | None:
        """How many tokens before itself a token sees, in a ring buffer under that mask; else None.

        Raises:
          ValueError: if the mask sees what the ring has forgotten.
        """
        if self.slots is None:
            return None
        window = None if mask is None else masks.as_mask(mask).max_lookback()
        if window is None or window >= self.slots:
            raise ValueError(
                f"CacheConfig.slots={self.slots} keeps the last {self.slots} tokens, so the "
                f"layer's mask must see none before them, got mask={mask}; give "
                f"mask=masks.Window(W, 0) with W at most {self.slots - 1}"
            )
        return window

    def empty(self, k: jax.Array, v: jax.Array, mask: masks.MaskLike | None) -> KVCache:
        """A cache with room for as many tokens as those of keys [*B, S, K, H] and values."""
        *B, S, K, H = k.shape
        return KVCache.empty(
            tuple(B), self.slots or S, K, H, v.shape[-1], dtype=self.dtype or k.dtype,
            window=self.window(mask),
        )  # fmt: skip

    def memory(self, k: jax.Array, v: jax.Array) -> Memory:
        """Those keys [*B, S, K, H] and values [*B, S, K, Hv], to attend to again."""
        return Memory.of(k, v, jnp.dtype(self.dtype or k.dtype))


def as_cache_config(config: CacheConfig | None) -> CacheConfig:
    """What is given as a layer's `cache`, or an error that says what to write."""
    if config is None:
        return CacheConfig()
    if isinstance(config, CacheConfig):
        return config
    raise TypeError(
        f"cache must be a flax_mha.CacheConfig, got {checks.describe(config)}; give "
        f"CacheConfig(dtype='int8'), say"
    )
