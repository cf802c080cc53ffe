"""From a layer's inputs to queries, keys and values of its heads: projections, norms, rotary."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.base import shapes, symbols
from flax_mha.base.coordinates import Array
from flax_mha.cache import resolve
from flax_mha.cache.resolve import CacheLike
from flax_mha.layer import padding
from flax_mha.layer.settings import Call, Settings
from flax_mha.positions import Axial, MRope, Rotary, Rotation
from flax_mha.positions.turn import Turn
from flax_mha.sharding import products

# The rotations of this package, not subclasses, which may rotate otherwise.
_ROTATIONS = (Rotary, Axial, MRope)


class Heads(NamedTuple):
    """Queries, keys and values of the heads, before attention.

    Attributes:
      q: the queries [*B, T, N, H], after norms and, without `turns`, rotation.
      k: the keys [*B, S, K, H], or None, to attend to the tokens of the cache.
      v: the values [*B, S, K, Hv], or None.
      gate: the factor of the heads' outputs, before the sigmoid, or None.
      order: the place of each token in the sequence, as `Call.order`.
      same_tokens: True if keys and queries are of the same tokens.
      turns: the rotations of q and k that are left to the kernel, or None.
      x: the inputs of the queries, without padding.
      kept: a function from k and v to what a cache keeps of these tokens (default: the same).
    """

    q: jax.Array
    k: Any
    v: Any
    gate: jax.Array | None = None
    order: Array | None = None
    same_tokens: bool = True
    turns: tuple[Turn, Turn] | None = None
    x: Any = None
    kept: Callable[[Any, Any], tuple[Any, Any]] = lambda k, v: (k, v)


def project_heads(
    p: Mapping[str, Any], settings: Settings, x_q: jax.Array, x_k: jax.Array | None,
    x_v: jax.Array | None, call: Call, cache: CacheLike, in_kernel: bool = False,
) -> Heads:  # fmt: skip
    """Return queries, keys and values of the heads: the first half of a layer.

    Args:
      p: the parameters by the names of `Settings.table`: projections as `Linear`, norms as
        functions, and arrays. All but `query` can be missing.
      settings: the settings of the layer.
      x_q: the inputs of the queries [*B, T, D].
      x_k: the inputs of the keys [*B, S, D']; None for x_q, or if `cache` has the keys.
      x_v: the inputs of the values [*B, S, D''] (default: x_k).
      call: the other arguments.
      cache: the cache of earlier calls, to which these tokens are appended; the `CacheConfig` of an
        empty one to make, with room for these tokens; `Encoded()` to keep the keys of x_k, or the
        cache that has them; another layer's keys and values; or None.
      in_kernel: True to leave the rotation to the kernel where nothing else reads queries and keys.
    """
    order, T, appends = call.order, x_q.shape[-2], resolve.appends(cache)
    if order is not None:
        is_whole = x_k is None and not appends and resolve.next_positions(cache, T) is None
        order = check_order(order, is_whole, T)
    same_tokens = appends or (x_k is None and cache is None)
    if call.lengths is not None:
        x_q = padding.cleared(x_q, call.lengths, order)
        if same_tokens:
            x_k, x_v = (padding.cleared(x, call.lengths) for x in (x_k, x_v))
    x_q, x_k, x_v = products.joined(x_q, *resolve.projected(x_q, x_k, x_v, cache))
    with jax.named_scope("project"):  # These names are what profiles show.
        has_gate, gate = "output_gate" in p, None
        q: Any = None if has_gate else p["query"](x_q)
        k = v = None
        if "key" in p and x_k is not None and x_v is not None:
            # If a bias, a rotation or a norm follows, it reads merged products at no extra cost.
            is_plain = settings.rotary is None and settings.qk_norm is None
            if is_plain and not (settings.use_bias or has_gate):
                x_k, x_v = products.unmerged(x_k, x_v, q, settings.num_kv_heads or q.shape[-2])
            k, v = p["key"](x_k), p["value"](x_v)
        if has_gate:
            # Side by side: on a mesh that shards the heads of queries alone, XLA sums these two
            # gradients over devices at once only if no other stands between them.
            q, gate = p["query"](x_q), p["output_gate"](x_q)
    norms_after = settings.qk_norm is not None and settings.qk_norm.after_rotary
    if not norms_after:
        q, k = norm(p, q, k)
    turns = None
    with jax.named_scope("rotate"):
        places: Any = turn_positions(
            settings.rotary, q, k, call.positions, order, cache, call.lengths, same_tokens
        )
        # Kernels for TPUs rotate queries and keys that only they read.
        is_left = (
            in_kernel and places is not None and k is not None and not norms_after
            and sharding.platform() == "tpu" and type(settings.rotary) in _ROTATIONS
            and "score_scale" not in p and cache is None and not call.tap.is_active
            and call.attention is None and settings.custom_attention is None
        )  # fmt: skip
        if is_left:
            rotary: Any = settings.rotary
            turns = rotary.turn(q, places[0]), rotary.turn(k, places[1])
        elif places is not None:
            q, k = turn(settings.rotary, q, k, *places)
    if norms_after:
        q, k = norm(p, q, k)
    return Heads(q, k, v, gate, order, same_tokens, turns, x_q)


def norm(p: Mapping[str, Any], q: jax.Array, k: Any) -> tuple[jax.Array, Any]:
    """Return queries and keys after their norms."""
    q = p["query_ln"](q) if "query_ln" in p else q
    return q, p["key_ln"](k) if "key_ln" in p and k is not None else k


def turn_positions(
    rotary: Rotation | None, q: jax.Array, k: jax.Array | None,
    positions: Any, order: Array | None, cache: Any, lengths: Any, same_tokens: bool = True,
) -> tuple[Any, Any] | None:  # fmt: skip
    """Return where `rotary` turns queries and keys: `positions`, or their places in the sequence.

    One array of positions is for queries, and for keys of the `same_tokens`.
    """
    if rotary is None:
        if positions is not None:
            raise ValueError(
                "positions say where `rotary` turns queries and keys, and rotary is None; "
                "set it to positions.Rotary(), or drop positions"
            )
        return None
    q_pos, k_pos = (symbols.count_up(x.shape[-3]) for x in (q, q if k is None else k))
    if order is not None:
        q_pos = jnp.asarray(order)
    next_positions = resolve.next_positions(cache, q.shape[-3])
    q_pos = q_pos if next_positions is None else next_positions
    is_pair = isinstance(positions, tuple) and len(positions) == 2
    q_own, k_own = positions if is_pair else (positions, None)
    q_pos = q_pos if q_own is None else q_own
    k_pos = k_own if k_own is not None else q_pos if same_tokens else k_pos
    if lengths is not None and getattr(rotary, "reads_length", False):
        real = q.shape[:-2], lengths, order
        q_pos = padding.cleared_positions(q_pos, *real)
        k_pos = padding.cleared_positions(k_pos, *real) if same_tokens else k_pos
    return q_pos, k_pos


def turn(
    rotary: Any, q: jax.Array, k: jax.Array | None, q_pos: Any, k_pos: Any
) -> tuple[jax.Array, Any]:
    """Return queries and keys, rotated by their positions."""
    if type(rotary) not in _ROTATIONS:
        q_pos, k_pos = jnp.asarray(q_pos), jnp.asarray(k_pos)
    return rotary(q, q_pos), None if k is None else rotary(k, k_pos)


def check_order(order: Array | None, whole: bool, length: int) -> Array | None:
    """Return the `order` of a call after a check."""
    if order is None:
        return None
    if not whole:
        raise ValueError(
            "order says where the tokens of self-attention stand, all of them in one call; got it "
            "in decoding or with inputs_k; leave it out"
        )
    return shapes.check_order(order, length)
