"""The `attention_mask` of tokenizers, 1 for tokens and 0 for padding, as lengths or as a mask."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes
from flax_mha.layer import padding
from flax_mha.sharding.prefix_sums import counts


def read_padding(tokens: Any, attention_mask: Any, options: Any) -> tuple[Any, Any]:
    """Return tokens with 0 in place of padding, and the options of layers that hide the padding.

    Padding need not be an id of the vocabulary: Hugging Face's labels, for example, use −100.

    Args:
      tokens: int [*B, T].
      attention_mask: bool or int [*B, T], 0 for padding; or None. Static padding after all tokens
        becomes `lengths`, other padding a `mask` and `positions` that count tokens.
      options: arguments of the layers. Their `lengths` and `order` show padding too.
    """
    lengths, order = options.get("lengths"), options.get("order")
    if attention_mask is None and lengths is None:
        return tokens, options
    tokens = checks.integers("tokens", tokens)
    if attention_mask is None:
        return padding.cleared_positions(tokens, tokens.shape, lengths, order), options
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

    def clear_and_count(tokens: jax.Array, real: jax.Array) -> list[jax.Array]:
        return [jnp.where(real, x, 0) for x in (tokens, counts(real) - 1)]

    cleared, positions = sharding.auto(clear_and_count, [(), ()], tokens, jnp.asarray(real))
    if is_static and (real[..., :-1] >= real[..., 1:]).all():
        return cleared, options | {"lengths": real.sum(-1, dtype=np.int32)}
    if options.get("positions") is None:
        options = options | {"positions": positions}
    return cleared, options | {"mask": masks.combine(options.get("mask"), masks.Keys(real))}


def move_to_front(prompt: Any, attention_mask: Any, has_gaps: bool = True) -> list[jax.Array]:
    """Move the tokens of each row before its padding. Return the prompt and their numbers [B].

    Args:
      prompt: int [B, T].
      attention_mask: bool or int [B, T], 0 for padding.
      has_gaps: True if padding may be between tokens. Traced masks are not checked.
    """
    real = _check(prompt, attention_mask)
    if not has_gaps and isinstance(real, np.ndarray):
        has_gap = (real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0] > 1
        if has_gap.any():
            raise ValueError(
                f"attention_mask must have no padding between tokens for an encoder with scores, "
                f"got it in row {np.argmax(has_gap)}: distances would count it in T5, and not "
                f"here; remove it from the row"
            )

    def sort(prompt: jax.Array, real: jax.Array) -> list[jax.Array]:
        order = jnp.argsort(~real, axis=-1, stable=True)
        return [jnp.take_along_axis(prompt, order, axis=-1), real.sum(-1, dtype=jnp.int32)]

    arrays = map(jnp.asarray, (prompt, real))
    return sharding.auto(sort, [("batch", None), ("batch",)], *arrays)


def _check(tokens: Any, attention_mask: Any) -> Any:
    """Return a mask as bools of the tokens' shape, in NumPy if their values are static."""
    if getattr(attention_mask, "dtype", None) == np.bool_:
        attention_mask = attention_mask.astype(np.int32)
    real = checks.integers("attention_mask", attention_mask)
    remedy = "give the one that the tokenizer returns with the ids"
    shapes.check_shape("attention_mask", real, {"the tokens' shape": tokens.shape}, remedy)
    checks.within("attention_mask", real, 2, "give 1 for tokens and 0 for padding")
    return checks.as_numpy(real) != 0
