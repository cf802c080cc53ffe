"""A layer fed in steps from a cache, compiled once for each width of a step."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

KEY = jax.random.key(0, impl="unsafe_rbg")


def cache_of(layer: nn.Module, *inputs: Any) -> Any:
    """The empty cache of a layer with decode=True."""
    # The parameters, which nobody reads, are neither drawn nor compiled.
    return jax.jit(lambda *inputs: layer.init(KEY, *inputs)["cache"])(*inputs)


def decoded(
    layer: nn.Module, params: Any, x: Any, steps: Sequence[int] | None = None,
    memory: Sequence[Any] = (), positions: Any = None,
) -> jax.Array:  # fmt: skip
    """What a layer with decode=True gives for all of x.

    Args:
      layer: see above.
      params: its variables without a cache.
      x: [*B, T, D].
      steps: how many tokens come at once (default: one).
      memory: inputs_k, which the first step alone is given.
      positions: [T] of the tokens.
    """

    @jax.jit
    def step(cache: Any, x: Any, memory: Any, where: Any) -> Any:
        more = {} if where is None else {"positions": where}
        return layer.apply({**params, "cache": cache}, x, *memory, **more, mutable=["cache"])

    cache, outs, at = cache_of(layer, x, *memory), [], 0
    for count in steps or (1,) * x.shape[-2]:
        part = slice(at, at + count)
        where = None if positions is None else positions[part]
        out, new = step(cache, x[..., part, :], memory if at == 0 else (), where)
        cache, at = new["cache"], at + count
        outs.append(out)
    return jnp.concatenate(outs, -2)


def greedy(logits: Any, tokens: Any, count: int) -> jax.Array:
    """The most likely tokens [B, count] after those of a prompt, by the whole text each time.

    Args:
      logits: of a causal model, tokens [B, T] -> [B, T, V].
      tokens: [B, T], the prompt.
      count: how many.
    """
    length = tokens.shape[1]
    # Padded, so that it is compiled once: no token sees those after it.
    text, whole = jnp.pad(tokens, ((0, 0), (0, count))), jax.jit(logits)
    for at in range(length, length + count):
        text = text.at[:, at].set(jnp.argmax(whole(text)[:, at - 1], -1))
    return text[:, length:]
