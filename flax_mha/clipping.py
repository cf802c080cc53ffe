"""QK-clip, an optax transformation: queries and keys shrink where scores grow too large."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha import inputs

_NAME = "attention_max_logit"


def qk_clip(
    threshold: float = 100.0, balance: float = 0.5
) -> optax.GradientTransformationExtraArgs:
    """After an optimizer's step, scales heads whose scores went beyond the threshold back to it.

        γ = min(1, τ / S),   W_q ← γ^β W_q,   W_k ← γ^(1 − β) W_k

    for each head with the greatest score S; biases too. Of heads that share their keys queries
    alone are scaled, by γ. It stands last in a chain, and is given what the layers captured:

    >>> layer = MultiHeadAttention(8, capture=Capture(("max_logit",)))
    >>> optimizer = optax.chain(optax.adam(1e-3), qk_clip(100.0))
    >>> updates, state = optimizer.update(grads, state, params, max_logits=intermediates)

    Args:
      threshold: τ, of the scores as the softmax has them.
      balance: β.

    Returns:
      A transformation whose `update` takes `max_logits`: the collection `intermediates` of the
      step, or a tree of its form. Layers that it has nothing of stay as they are.

    Raises:
      ValueError: if the threshold or the balance is out of range; from `update`, without params,
        if nothing was captured, or of a layer whose queries and keys are normed, for which the
        size of W_q and W_k says nothing.

    Source: Kimi Team, "Kimi K2", 2025, section 2.1 (MuonClip).
    """
    if inputs.number("threshold", threshold) <= 0:
        raise ValueError(f"threshold must be above 0, got {threshold}")
    if not 0 <= inputs.number("balance", balance) <= 1:
        raise ValueError(f"balance must be in [0, 1], got {balance}")

    def update(
        updates: Any, state: Any, params: Any = None, *, max_logits: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("qk_clip needs the parameters, got none; call update(..., params)")
        whole, steps = flatten_dict(params), flatten_dict(updates)
        for path, greatest in _captured(max_logits).items():
            if any((*path, norm, "scale") in whole for norm in ("query_ln", "key_ln")):
                raise ValueError(
                    f"qk_clip is for layers without a norm of queries and keys, got one at "
                    f"{'/'.join(path)}; leave it out of max_logits"
                )
            for name, factor in _factors(greatest, whole, path, threshold, balance).items():
                for leaf in ("kernel", "bias"):
                    at = (*path, name, leaf)
                    if at in whole:
                        steps[at] = _scaled(whole[at], steps[at], factor, leaf)
        return unflatten_dict(steps), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _captured(collection: Any) -> dict[tuple[str, ...], jax.Array]:
    """The greatest scores by the paths of their layers; of a layer called twice the greatest."""
    tree = collection if isinstance(collection, Mapping) else {}
    tree = tree.get("intermediates", tree)
    found = {}
    for path, x in flatten_dict(dict(tree)).items():
        if path[-1] == _NAME:
            each = list(x) if isinstance(x, tuple) else [x]
            found[path[:-1]] = jnp.max(jnp.stack(each), 0)
    if not found:
        raise ValueError(
            "qk_clip needs max_logits=, the collection `intermediates` of layers with "
            "capture=Capture(('max_logit',)), got none of them; apply with "
            "mutable=['intermediates']"
        )
    return found


def _factors(
    greatest: jax.Array, params: Mapping[Any, jax.Array], path: tuple[str, ...], threshold: float,
    balance: float,
) -> dict[str, jax.Array]:  # fmt: skip
    """What queries and keys of each head are scaled by, [layers…, N]."""
    query, key = (params[(*path, name, "kernel")].shape for name in ("query", "key"))
    # Under `scan` layers are stacked on the axes before those of the kernel.
    rows = tuple(range(len(query) - 3, greatest.ndim - 2))
    S = jnp.max(greatest, axis=(*rows, greatest.ndim - 1))
    shrink = jnp.where(threshold < S, threshold / S, 1.0)
    if query[-2] != key[-2]:
        return {"query": shrink}
    return {"query": shrink**balance, "key": shrink ** (1 - balance)}


def _scaled(param: jax.Array, step: jax.Array, factor: jax.Array, leaf: str) -> jax.Array:
    """The step to factor·(param + step)."""
    factor = factor[..., None, :, None] if leaf == "kernel" else factor[..., :, None]
    return (factor * (param + step) - param).astype(step.dtype)
