"""QK-clip, an optax transformation that shrinks queries and keys where scores grow too large."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

_NAME = "attention_max_logit"
# Parameters of layers with scores other than q·k of each head.
_REFUSED = ("query_ln", "key_ln", "mix_scores")


def qk_clip(
    threshold: float = 100.0, balance: float = 0.5
) -> optax.GradientTransformationExtraArgs:
    """Scale heads with scores beyond a threshold back to it, after an optimizer's step.

        γ = min(1, τ / S),   W_q ← γ^β W_q,   W_k ← γ^(1 − β) W_k

    for each head with the maximum score S; biases too. Where heads share keys, γ scales only their
    queries: all features in grouped-query attention and in layers that take another's keys, the
    rotated features in latent attention. Only q·k shrinks, not biases of scores. Put it last in a
    chain, and give it the scores that the layers captured:

    >>> layer = MultiHeadAttention(8, capture=Capture(("max_logit",)))
    >>> optimizer = optax.chain(optax.adam(1e-3), qk_clip(100.0))
    >>> updates, state = optimizer.update(grads, state, params, max_logits=intermediates)

    Args:
      threshold: the maximum score, τ.
      balance: the share of the queries in the scaling, β.

    Returns:
      A transformation. Its `update` takes `max_logits`: the collection `intermediates` of the
      step, or a tree of that form. Other layers stay as they are.

    Raises:
      ValueError: from `update`, if nothing was captured, if heads are missing, or for a layer that
        norms queries and keys or mixes heads.

    Source: Kimi Team, "Kimi K2", 2025, section 2.1 (MuonClip).
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, max_logits: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        whole, steps = flatten_dict(params), flatten_dict(updates)
        for path, greatest in _captured(max_logits).items():
            S = _by_head(greatest, whole, path)
            shrink = jnp.where(threshold < S, threshold / S, 1.0)
            for name, factor in _factors(shrink, whole, path, balance).items():
                for leaf, by in (("kernel", factor[..., None, :, :]), ("bias", factor)):
                    if (at := (*path, name, leaf)) in whole:
                        step = by * (whole[at] + steps[at]) - whole[at]
                        steps[at] = step.astype(steps[at].dtype)
        return unflatten_dict(steps), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _captured(collection: Any) -> dict[tuple[str, ...], jax.Array]:
    """Return the maximum scores by the paths of their layers, over all calls of a layer."""
    tree = dict(collection or {})
    scores = {
        path[:-1]: jnp.max(jnp.stack(jax.tree.leaves(x)), 0)
        for path, x in flatten_dict(tree.get("intermediates", tree)).items()
        if path[-1] == _NAME
    }
    if not scores:
        raise ValueError(
            "qk_clip needs max_logits=, the collection `intermediates` of layers with "
            "capture=Capture(('max_logit',)), got none of them; apply with "
            "mutable=['intermediates']"
        )
    return scores


def _by_head(
    greatest: jax.Array, params: Mapping[Any, jax.Array], path: tuple[str, ...]
) -> jax.Array:
    """Return the maximum score of each head, [layers…, N], of a layer that can be scaled."""
    where = "/".join(path) or "the top"
    for name in _REFUSED:
        if any(at[: len(path) + 1] == (*path, name) for at in params):
            raise ValueError(
                f"qk_clip is for layers without {name}, got one at {where}; leave it out of "
                f"max_logits"
            )
    query = params[(*path, "query", "kernel")].shape
    if greatest.shape[-2] != query[-2]:
        raise ValueError(
            f"max_logits must be of all {query[-2]} heads of {where}, [*B, {query[-2]}, T], got "
            f"{greatest.shape}; capture them without heads=, which chooses some"
        )
    # Under `scan` layers are stacked on axes before the kernel's.
    rows = tuple(range(len(query) - 3, greatest.ndim - 2))
    return jnp.max(greatest, axis=(*rows, greatest.ndim - 1))


def _factors(
    shrink: jax.Array, params: Mapping[Any, jax.Array], path: tuple[str, ...], balance: float
) -> dict[str, jax.Array]:
    """Return the factors of queries and of keys, [layers…, N, H|1], by each head's γ."""
    whole = shrink[..., None]
    query, key = (params.get((*path, name, "kernel")) for name in ("query", "key"))
    if query is None or key is None or query.shape[-2] != key.shape[-2]:
        return {"query": whole}
    # Later features meet a key that all heads share.
    is_own = jnp.arange(query.shape[-1]) < key.shape[-1]
    return {"query": jnp.where(is_own, whole**balance, whole), "key": whole ** (1 - balance)}
