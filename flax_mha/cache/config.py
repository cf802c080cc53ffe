"""The options of a layer's cache."""

import dataclasses

import jax
from flax.typing import Dtype

from flax_mha import masks
from flax_mha.base import checks
from flax_mha.cache.format import Format
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.sources import KeyValue, Source, Tokens


@dataclasses.dataclass(frozen=True)
class CacheConfig(Source):
    """The options of a layer's cache.

    Attributes:
      dtype: the dtype of stored keys and values (default: their own): one of 16 bits or more, or
        "int8", "float8_e4m3fn" or "float8_e5m2", with a scale for each token and head.
      slots: the size of a ring buffer that holds the last tokens: at least W + 1 under a mask
        `Window(W, ·)`. A ring buffer never runs out of room (default: no ring buffer; one slot for
        each token of the input that creates the cache).

    Raises:
      ValueError, TypeError: if the dtype cannot be stored, or slots is not a positive integer.
    """

    dtype: Dtype | None = None
    slots: int | None = None
    appends = True

    def __post_init__(self) -> None:
        if self.dtype is not None:
            Format.checked("CacheConfig.dtype", self.dtype)
        checks.optional(**{"CacheConfig.slots": self.slots})

    @property
    def is_ring(self) -> bool:
        """True for a ring buffer."""
        return self.slots is not None

    def open(self, tokens: Tokens) -> tuple[KeyValue, KVCache]:
        """Return the keys and values of the call, and an empty cache with room for as many."""
        return tokens.new, self.empty(*tokens.kept, tokens.mask)

    def window(self, mask: masks.MaskLike | None) -> int | None:
        """Return a ring buffer's window: the number of earlier tokens that a token sees, or None.

        Raises:
          ValueError: if the mask sees tokens that the ring has overwritten.
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
        """Return an empty cache with room for the tokens of keys [*B, S, K, H] and values."""
        *B, S, K, H = k.shape
        return KVCache.empty(
            tuple(B), self.slots or S, K, H, v.shape[-1], dtype=self.dtype or k.dtype,
            window=self.window(mask),
        )  # fmt: skip


def as_cache_config(config: CacheConfig | None) -> CacheConfig:
    """Return a layer's `cache` argument as a `CacheConfig`."""
    if config is None:
        return CacheConfig()
    if isinstance(config, CacheConfig):
        return config
    raise TypeError(
        f"cache must be a flax_mha.CacheConfig, got {checks.describe(config)}; give "
        f"CacheConfig(dtype='int8'), for example"
    )
