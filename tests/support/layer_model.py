"""A layer, a block and a stack with every part, in NumPy float64, for one row of real tokens.

It adds the parts around attention to `oracle` and calls its functions. It imports neither jax nor
flax_mha.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.support import oracle

Array = np.ndarray


class Model(NamedTuple):
    """The operations of a layer. It uses the parameters that exist.

    Attributes:
      scale: the scale of the scores; None for 1/√H.
      norm: the norm of queries and keys, (params, x) -> x.
      after: True if the norm follows the rotation.
      turn: the rotation, (x [T, ·, H], positions [T]) -> x.
      value: a change of the values, x -> x.
      score: score functions in order, (params, s [N, T, T], j − i, q [T, N, H], k) -> s.
      weigh: "softmax", "sigmoid" or "softpick".
      keys: the number of keys in a sigmoid's bias.
      allowed: rules (i, j) -> bool for arrays that broadcast.
      shared: True if the second layer uses the keys and values of the first.
      exclusive: True if outputs lose their part along the token's own value.
    """

    scale: float | None = None
    norm: Callable[..., Array] | None = None
    after: bool = False
    turn: Callable[..., Array] | None = None
    value: Callable[[Array], Array] | None = None
    score: tuple[Callable[..., Array], ...] = ()
    weigh: str = "softmax"
    keys: int = 0
    allowed: tuple[Callable[..., Any], ...] = ()
    shared: bool = False
    exclusive: bool = False


def layer(
    params: Any, x: Array, model: Model, taken: tuple[Array, Array] | None = None
) -> tuple[Array, tuple[Array, Array]]:
    """Map [T, D] to [T, D], and return keys and values too. `taken` are another layer's."""
    T = len(x)

    def rotated(name: str) -> Array:
        """Return queries or keys, normed and rotated."""
        y, norm = oracle.project(params[name], x), params.get(f"{name}_ln")
        y = model.norm(norm, y) if model.norm is not None and not model.after else y
        y = y if model.turn is None else model.turn(y, np.arange(T))
        return model.norm(norm, y) if model.norm is not None and model.after else y

    q = rotated("query")
    own = taken or (rotated("key"), oracle.project(params["value"], x))
    k, v = (np.repeat(each, q.shape[-2] // each.shape[-2], -2) for each in own)
    v = v if model.value is None else model.value(v)
    scale = 1 / math.sqrt(q.shape[-1]) if model.scale is None else model.scale
    scale = params["score_scale"][:, None, None] if "score_scale" in params else scale
    s = np.einsum("tnh,snh->nts", q, k) * scale
    i, j = np.arange(T)[:, None], np.arange(T)
    for change in model.score:
        s = change(params, s, j - i, q, k)
    allowed = np.ones((T, T), bool)
    for rule in model.allowed:
        allowed = allowed & rule(i, j)
    out = np.einsum("nts,snh->tnh", weights(params, s, allowed, model), v)
    if model.exclusive:
        out = out - (out * v).sum(-1, keepdims=True) / (v**2).sum(-1, keepdims=True) * v
    if "output_gate" in params:
        out = out / (1 + np.exp(-oracle.project(params["output_gate"], x)))
    return oracle.project(params["out"], out, contracted=2), own


def weights(params: Any, s: Array, allowed: Array, model: Model) -> Array:
    """Return the attention weights for scores [N, T, S]."""
    if model.weigh == "sigmoid":
        return np.where(allowed, 1 / (1 + np.exp(-s) * model.keys), 0)
    if model.weigh == "softpick":
        e = np.where(allowed, np.exp(s) - 1, 0)
        return np.maximum(e, 0) / (np.abs(e).sum(-1, keepdims=True) + 1e-8)
    e = np.where(allowed, np.exp(s), 0)
    total = e.sum(-1, keepdims=True)
    return e / (total + np.exp(params["sinks"])[:, None, None] if "sinks" in params else total)


def stack(params: Any, x: Array, model: Model) -> Array:
    """Apply pre-norm blocks and a norm, with parameters `layers_0`, `layers_1`, … or stacked
    ones.
    """
    kv = None
    for n in range(2):
        if "layers" not in params:
            block = params[f"layers_{n}"]
        elif "block_0" in params["layers"]:
            block = part(params["layers"][f"block_{n}"], 0)
        else:
            block = part(params["layers"], n)
        normed = oracle.layer_norm(block["attention_norm"], x)
        y, kv = layer(block["attention"], normed, model, kv if model.shared else None)
        x = x + y
        x = x + oracle.mlp(block["mlp"], oracle.layer_norm(block["mlp_norm"], x))
    return oracle.layer_norm(params["norm"], x)


def part(tree: Any, n: int) -> Any:
    """Return the n-th of stacked parameters."""
    return {name: part(x, n) for name, x in tree.items()} if isinstance(tree, dict) else tree[n]
