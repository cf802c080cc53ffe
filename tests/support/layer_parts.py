"""The parts of a layer, each as fields and as operations of the float64 model."""

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_mha import QKNorm, masks
from flax_mha.positions import Axial, Interpolation, Llama3, MRope, Ntk, Proportional, Rotary, Yarn
from tests.masks.catalogue import MASKS, Scene
from tests.positions.test_rope_scaling import llama, theta, yarn
from tests.scores.catalogue import BASE, SCORES
from tests.support import oracle

# Heads, their features, and tokens. Rotations and relative positions have the same base.
N, H, T = 8, 8, 12
NONE: Mapping[str, Any] = types.MappingProxyType({})


def angles(of: Any, size: float = 1.0) -> Any:
    """Return the rotation of each pair c by of(c) at each position."""

    def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, -1)
        angle = positions[:, None] * np.array([of(c) for c in range(H // 2)])
        z = size * (first + 1j * second) * np.exp(1j * angle)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    return turn


def on_image(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Apply the rotation on an image of 3·4 tokens: half the pairs by row, half by column."""
    angle = np.stack([positions // 4, positions % 4], -1)[..., None] / BASE ** (np.arange(2) / 2)
    first, second = np.split(x, 2, -1)
    z = (first + 1j * second) * np.exp(1j * angle.reshape(len(positions), 1, -1))
    return np.concatenate([z.real, z.imag], -1)


def normed(name: str, epsilon: float) -> Any:
    """Return a norm of oracle, with a scale or without."""
    function = getattr(oracle, name)
    return lambda params, x: function(params or {"scale": np.ones(H)}, x, epsilon)


def over_heads(params: Any, x: np.ndarray) -> np.ndarray:
    flat = x.reshape(*x.shape[:-2], -1)
    return oracle.rms_norm({"scale": params["scale"].reshape(-1)}, flat).reshape(x.shape)


class Part(NamedTuple):
    """Fields of the layer with the same part of the model.

    Attributes:
      fields: fields of the layer.
      model: fields of `layer_model.Model`.
      stack: fields of the stack.
      refuses: the words of the error for factor values that the part does not support.
    """

    fields: dict[str, Any]
    model: Mapping[str, Any] = NONE
    stack: Mapping[str, Any] = NONE
    refuses: Mapping[str, str] = NONE


def rotary(scaling: Any, of: Any, size: float = 1.0) -> Part:
    return Part({"rotary": Rotary(BASE, scaling=scaling)}, {"turn": angles(of, size)})


def normalized(name: str, **model: Any) -> Part:
    words = f"'blockwise' can't run .* normalizer='{name}'"
    return Part({"normalizer": name}, {"weigh": name} | model, refuses={"blockwise": words})


def masked(name: str) -> Part:
    """Return the part of a row of the masks' catalogue, under a causal mask.

    Arrays of all tokens do not fit the tokens of a step of decoding.
    """
    mask, allowed = MASKS[name](Scene((), T, T, N=N))
    table = np.broadcast_to(allowed, (1, N, T, T))[0]
    model = {"allowed": (lambda i, j: table[:, i, j],)}
    sizes = [leaf.shape for leaf in jax.tree.leaves(mask) if isinstance(leaf, np.ndarray)]
    is_of_tokens = any(T in shape or len(shape) > 1 for shape in sizes)
    refuses = {"steps": r"must (broadcast to|have shape) \["} if is_of_tokens else NONE
    return Part({"mask": masks.Causal() & mask}, model, refuses=refuses)


def scored(name: str) -> Part:
    """Return the part of a row of the scores' catalogue."""
    row, whole = SCORES[name], Scene((), T, T, N=N)
    made = {} if row.params else {array: make(whole) for array, make in row.arrays.items()}

    def score(params: Any, s: np.ndarray, _: Any, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        at = Scene((), *s.shape[1:], N=N)
        arrays = made | {array: params[name] for array, name in row.params.items()}
        vectors = {} if row.pullback else {"q": q, "k": k}
        return np.broadcast_to(row.value(s[None], at, **vectors, **arrays), s[None].shape)[0]

    return Part({"scores": (row.make(**made),)}, {"score": (score,)})


PARTS: dict[str, Part] = {
    "a number as scale": Part({"scale": 0.2}, {"scale": 0.2}),
    "a learned scale": Part({"scale": "learned"}),
    "RMSNorm": Part({"qk_norm": QKNorm()}, {"norm": normed("rms_norm", 1e-6)}),
    "LayerNorm after rotary": Part(
        {"qk_norm": QKNorm("layernorm", after_rotary=True, epsilon=0.1)},
        {"norm": normed("layer_norm", 0.1), "after": True},
    ),
    "RMSNorm over all heads": Part({"qk_norm": QKNorm(over_heads=True)}, {"norm": over_heads}),
    "a norm without scale": Part(
        {"qk_norm": QKNorm(scale=False)}, {"norm": normed("rms_norm", 1e-6)}
    ),
    "a gate of heads": Part({"gate": "head"}),
    "a gate of features": Part({"gate": "feature"}),
    "exclusive": Part({"exclusive": True}, {"exclusive": True}),
    "exclusive, gated": Part(
        {"exclusive": True, "gate": "head", "v_head_dim": 10}, {"exclusive": True}
    ),
    "some biases": Part({"use_bias": ("query", "value", "out")}),
    "wide values": Part({"v_head_dim": 10}),
    "sinks": Part({"sinks": True}),
    "sigmoid": normalized("sigmoid", keys=T),
    "softpick": normalized("softpick"),
    "interpolation": rotary(Interpolation(4.0), lambda c: theta(c, BASE, H) / 4),
    "NTK": rotary(Ntk(8.0), lambda c: theta(c, BASE * 8 ** (H / (H - 2)), H)),
    "YaRN": rotary(
        Yarn(16.0, 64, 8.0), lambda c: yarn(c, BASE, 16, 64, 8, 1, H), 0.1 * np.log(16) + 1
    ),
    "proportional": rotary(
        Proportional(0.5), lambda c: theta(c, BASE, H) * (c < H // 4)
    ),
    "Llama 3.1": rotary(Llama3(8.0, 64), lambda c: llama(c, BASE, 8, 64, H)),
    "axial": Part({"rotary": Axial((3, 4), BASE)}, {"turn": on_image}),
    "sections": Part(
        {"rotary": MRope((1, 1, 2), BASE)}, {"turn": angles(lambda c: theta(c, BASE, H))}
    ),
    "shared keys": Part(
        {}, {"shared": True}, {"kv_from": (None, 0)}, {"scan": "kv_from .* with scan=True"}
    ),
    # The model computes one row, and functions of users read which.
    **{name: scored(name) for name in SCORES if name != "user"},
    # One reads rows of the batch, and the other needs one.
    **{name: masked(name) for name in MASKS if name not in ("predicate", "lengths_per_query")},
}  # fmt: skip
