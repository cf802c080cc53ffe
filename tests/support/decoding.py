"""Run a layer in steps from a cache, compiled once for each number of tokens."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from flax_mha.cache import Encoded

KEY = jax.random.key(0, impl="unsafe_rbg")


def cache_of(layer: nn.Module, *inputs: Any, **call: Any) -> Any:
    """Return the empty cache of a layer with decode=True."""
    # XLA removes the unused parameters: they are neither drawn nor compiled.
    return jax.jit(lambda inputs, call: layer.init(KEY, *inputs, **call)["cache"])(inputs, call)


def decoded(
    layer: nn.Module, params: Any, x: Any, steps: Sequence[int] | None = None,
    memory: Any = None, positions: Any = None, **call: Any,
) -> jax.Array:  # fmt: skip
    """Return the outputs of a layer with decode=True for all of x.

    Args:
      layer: the layer, with decode=True.
      params: its variables without a cache.
      x: the inputs [*B, T, D].
      steps: the number of tokens in each call (default: one each).
      memory: inputs of keys that the first call keeps for the others, for cross-attention.
      positions: the tokens' positions [T].
      call: more arguments of every call, traced.
    """

    @jax.jit
    def step(cache: Any, x: Any, kv: Any, call: Any) -> Any:
        return layer.apply({**params, "cache": cache}, x, kv=kv, **call, mutable=["cache"])

    x = np.asarray(x)
    encoded = None if memory is None else Encoded(memory)
    cache, outs, at = cache_of(layer, x, kv=encoded), [], 0
    for count in steps or (1,) * x.shape[-2]:
        part = slice(at, at + count)
        if positions is not None:
            call["positions"] = np.asarray(positions)[part]
        out, new = step(cache, x[..., part, :], encoded if at == 0 else None, call)
        cache, at = new["cache"], at + count
        outs.append(out)
    return jax.device_put(np.concatenate(outs, -2))


def greedy(logits: Any, tokens: Any, count: int) -> jax.Array:
    """Return the most likely tokens [B, count] after a prompt, by a call over all tokens each time.

    Args:
      logits: a causal model, tokens [B, T] -> [B, T, V].
      tokens: the prompt [B, T].
      count: the number of new tokens.
    """
    length = tokens.shape[1]
    # Padded, so that it compiles once: no token sees later ones.
    text, whole = np.pad(tokens, ((0, 0), (0, count))), jax.jit(logits)
    for at in range(length, length + count):
        text[:, at] = np.argmax(np.asarray(whole(text))[:, at - 1], -1)
    return jax.device_put(text[:, length:])
