"""The `attention_mask` of tokenizers, 1 for tokens and 0 for padding, as lengths or as a mask."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes, symbols
from flax_mha.base.coordinates import Array


def read_padding(tokens: Any, attention_mask: Any, options: Any) -> tuple[Any, Any]:
    """Return tokens with 0 in place of padding, and the options of layers that hide the padding.

    Padding need not be an id of the vocabulary: Hugging Face's labels, for example, use −100.

    Args:
      tokens: int [*B, T].
      attention_mask: bool or int [*B, T], False or 0 for padding anywhere in a row; or None.
      options: arguments of the layers. Their `lengths` and `order` show padding too. Padding that
        an `attention_mask` has after all tokens becomes `lengths`; elsewhere it becomes a `mask`
        and `positions` that count tokens.
    """
    lengths, order = options.get("lengths"), options.get("order")
    if attention_mask is None and lengths is None:
        return tokens, options
    tokens = checks.integers("tokens", tokens)
    if attention_mask is None:
        *B, T = tokens.shape
        shapes.per_row("lengths", lengths, tuple(B), T)
        order = symbols.count_up(T) if order is None else shapes.check_order(order, T)
        ends, order = map(checks.as_numpy, (checks.integers("lengths", lengths), order))
        return _run(_clear, (), tokens, ends, order), options
    real = _check(tokens, attention_mask)
    is_static = isinstance(real, np.ndarray)
    if is_static and real.all():
        return tokens, options
    for name in ("lengths", "order"):
        if options.get(name) is not None:
            raise ValueError(
                f"attention_mask must be None with {name}, got both; give {name} and "
                f"mask=masks.Keys(attention_mask != 0)"
            )
    tokens = _run(lambda xp, tokens, real: xp.where(real, tokens, 0), (), tokens, real)
    if is_static and (real[..., :-1] >= real[..., 1:]).all():
        return tokens, options | {"lengths": real.sum(-1, dtype=np.int32)}
    if options.get("positions") is None:
        options = options | {"positions": _run(_count, (), real)}
    return tokens, options | {"mask": masks.combine(options.get("mask"), masks.Keys(real))}


def move_to_front(prompt: Any, attention_mask: Any, has_gaps: bool) -> list[Any]:
    """Move the tokens of each row before its padding. Return the prompt and their numbers [B].

    Args:
      prompt: int [B, T].
      attention_mask: bool or int [B, T], False or 0 for padding.
      has_gaps: True if padding may stand between tokens.
    """
    real = _check(prompt, attention_mask)
    is_static = isinstance(real, np.ndarray)
    if not has_gaps:
        begins = (real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0] if is_static else None
        if begins is None or (begins > 1).any():
            got = "a traced array" if begins is None else "padding between tokens"
            raise ValueError(
                f"attention_mask of a Translator must have its padding at one or both ends of a "
                f"row, got {got}; give lengths"
            )
    if is_static and not real.any(-1).all():
        raise ValueError(
            f"attention_mask must have a token in each row, got none in rows "
            f"{np.flatnonzero(~real.any(-1)).tolist()}; drop these rows"
        )
    return _run(_sort, [("batch", None), ("batch",)], prompt, real)


def _check(tokens: Any, attention_mask: Any) -> Any:
    """Return a mask as bools of the tokens' shape, in NumPy if their values are static."""
    is_bool = getattr(attention_mask, "dtype", None) == np.bool_
    real = attention_mask if is_bool else checks.integers("attention_mask", attention_mask)
    remedy = "give the one that the tokenizer returns beside the ids"
    shapes.check_shape("attention_mask", real, {"the tokens' shape": tokens.shape}, remedy)
    if not is_bool:
        checks.within("attention_mask", real, 2, "give 1 for tokens and 0 for padding")
    real = checks.as_numpy(real)
    return real if is_bool else real != 0


def _run(fn: Callable[..., Any], names: Any, *arrays: Any) -> Any:
    """Return fn(np, *arrays) if all are static, else fn(jnp, *arrays) on the mesh."""
    if all(isinstance(x, np.ndarray) for x in arrays):
        return fn(np, *arrays)
    return sharding.auto(lambda *xs: fn(jnp, *xs), names, *map(jnp.asarray, arrays))


def _clear(xp: Any, tokens: Array, ends: Array, order: Array) -> Array:
    """Return 0 in place of the tokens beyond the end of each row."""
    order = xp.expand_dims(order, tuple(range(ends.ndim)))
    return xp.where(order < ends[..., None], tokens, 0)


def _count(xp: Any, real: Array) -> Array:
    """Return the number of tokens before each one."""
    return xp.where(real, xp.cumsum(real, -1, dtype=np.int32) - 1, 0)


def _sort(xp: Any, prompt: Array, real: Array) -> list[Array]:
    """Return each row's tokens before its padding, and their number."""
    order = xp.argsort(~real, axis=-1, stable=True)
    return [xp.take_along_axis(prompt, order, axis=-1), real.sum(-1, dtype=np.int32)]
