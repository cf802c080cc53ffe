"""The `attention_mask` of tokenizers, 1 for tokens and 0 for padding, as lengths or as a mask."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes, symbols
from flax_mha.base.coordinates import Array


class Padding(NamedTuple):
    """The arguments of layers that hide padding, each None if it is not needed.

    Attributes:
      lengths: int [*B], the number of tokens of each row, if padding follows them.
      mask: the mask that hides padding from all queries, if it may be elsewhere.
      positions: int [*B, T], the number of tokens before each one, and 0 for padding.
    """

    lengths: Array | None = None
    mask: masks.Mask | None = None
    positions: Array | None = None

    def added_to(self, options: Any) -> Any:
        """Return the arguments of a call with these."""
        if self.lengths is None and self.mask is None:
            return options
        for name in ("lengths", "order"):
            if options.get(name) is not None:
                raise ValueError(
                    f"attention_mask must be None with {name}, got both; give {name} and "
                    f"mask=masks.Keys(attention_mask != 0)"
                )
        positions = options.get("positions")
        return options | {
            "lengths": self.lengths,
            "mask": masks.combine(options.get("mask"), self.mask),
            "positions": self.positions if positions is None else positions,
        }


def read_padding(tokens: Any, attention_mask: Any, options: Any) -> tuple[Any, Padding]:
    """Return tokens with 0 in place of padding, and the arguments that hide it.

    Padding need not be an id of the vocabulary: Hugging Face's labels, for example, use −100.

    Args:
      tokens: int [*B, T].
      attention_mask: bool or int [*B, T], False or 0 for padding, wherever it is; or None.
      options: arguments of the layers, of which `lengths` and `order` show padding too.
    """
    lengths, order = options.get("lengths"), options.get("order")
    if attention_mask is None and lengths is None:
        return tokens, Padding()
    tokens = shapes.check_tokens("tokens", tokens)
    if attention_mask is None:
        *B, T = tokens.shape
        shapes.per_row("lengths", lengths, tuple(B), T)
        order = symbols.count_up(T) if order is None else shapes.check_order(order, T)
        ends, order = map(checks.as_numpy, (checks.integers("lengths", lengths), order))
        return _run(_clear, (), tokens, ends, order), Padding()
    real = _check(tokens, attention_mask)
    is_static = isinstance(real, np.ndarray)
    if is_static and real.all():
        return tokens, Padding()
    tokens = _run(lambda xp, tokens, real: xp.where(real, tokens, 0), (), tokens, real)
    if is_static and (real[..., :-1] >= real[..., 1:]).all():
        return tokens, Padding(lengths=real.sum(-1, dtype=np.int32))
    return tokens, Padding(mask=masks.Keys(real), positions=_run(_count, (), real))


def move_to_front(prompt: Any, attention_mask: Any, has_gaps: bool) -> list[Any]:
    """Return a prompt with the tokens of each row before its padding, and their number.

    Args:
      prompt: int [B, T].
      attention_mask: bool or int [B, T], False or 0 for padding.
      has_gaps: True if padding may be between tokens.
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
