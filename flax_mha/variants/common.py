"""What several variants refuse, and how they change what attention gives."""

from collections.abc import Callable
from typing import Any

import jax

from flax_mha.kernels import dot_product_attention


def check(what: str, layer: Any, absent: tuple[str, ...], learns_scale: bool = False) -> None:
    """None of the absent fields may be set; nor may `scale` be learned, unless the layer can."""
    if isinstance(layer.scale, str) and not learns_scale:
        raise ValueError(f"{what} has a number for scale, got {layer.scale!r}; give one")
    for name in absent:
        if getattr(layer, name):
            raise ValueError(f"{what} has no {name}, got {getattr(layer, name)!r}; leave it out")


def check_inputs(what: str, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None) -> None:
    """Keys and values must be of the queries' tokens."""
    if x_k is not x_q or x_v is not x_q:
        raise ValueError(f"{what} is self-attention, got inputs_k or kv; leave it out")


def attend(change: Callable[[jax.Array], jax.Array], q: Any, k: Any, v: Any, **call: Any) -> Any:
    """`dot_product_attention` with its output changed, and what else was asked for as it is."""
    found = dot_product_attention(q, k, v, **call)
    out, *more = found if isinstance(found, tuple) else (found,)
    return (change(out), *more) if more else change(out)
