"""The parts of a layer, each as fields and as operations of the float64 model."""

import types
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flax_mha import QKNorm, masks
from flax_mha.positions import Axial, Interpolation, Llama3, MRope, Ntk, Proportional, Rotary, Yarn
from flax_mha.scores import Alibi, Relative, RelativeBias, SoftCap, TransformerXL
from tests.kernels.problems import bucket_of
from tests.positions.test_rope_scaling import llama, theta, yarn
from tests.support import oracle
from tests.support.algebra import near

# Heads, their features, tokens, and the base of rotations.
N, H, T, BASE = 8, 8, 12, 50.0
NONE: Mapping[str, Any] = types.MappingProxyType({})
# The blocks of 3 keys that each block of 4 queries sees.
CHOSEN = np.array([[0, 1], [1, 2], [3, 2]])


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


def document(i: np.ndarray) -> np.ndarray:
    """Return the document of each token: the first has 3 tokens, the second 5, the third the
    rest.
    """
    return (i >= 3).astype(int) + (i >= 8)


def normed(name: str, epsilon: float) -> Any:
    """Return a norm of oracle, with a scale or without."""
    function = getattr(oracle, name)
    return lambda params, x: function(params or {"scale": np.ones(H)}, x, epsilon)


def over_heads(params: Any, x: np.ndarray) -> np.ndarray:
    flat = x.reshape(*x.shape[:-2], -1)
    return oracle.rms_norm({"scale": params["scale"].reshape(-1)}, flat).reshape(x.shape)


def shaw(params: Any, s: np.ndarray, d: np.ndarray, q: np.ndarray, _: Any) -> np.ndarray:
    keys = params["relative_keys"][np.clip(d, -3, 3) + 3]
    return s + np.einsum("tnh,tsh->nts", q, keys) / np.sqrt(H)


def transformer_xl(
    params: Any, s: np.ndarray, d: np.ndarray, q: np.ndarray, k: np.ndarray
) -> np.ndarray:
    u, v, kernel = (
        params[f"relative_{name}"] for name in ("content_bias", "position_bias", "kernel")
    )
    angles = -d[..., None] * BASE ** (-2 * np.arange(3) / 6)
    r = np.einsum("tsd,dnh->tsnh", np.concatenate([np.sin(angles), np.cos(angles)], -1), kernel)
    moved = np.einsum("tnh,tsnh->nts", q + v, r) + np.einsum("nh,snh->ns", u, k)[:, None]
    return s + moved / np.sqrt(H)


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


def masked(mask: Any, allowed: Any) -> Part:
    return Part({"mask": masks.Causal() & mask}, {"allowed": (allowed,)})


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
    "a soft cap": Part(
        {"scores": (SoftCap(2.0),)}, {"score": (lambda _, s, *more: 2 * np.tanh(s / 2),)}
    ),
    "ALiBi": Part(
        {"scores": (Alibi(),)},
        {"score": (lambda _, s, d, *more: s - 2.0 ** -np.arange(1, 9)[:, None, None] * np.abs(d),)},
    ),
    "T5's bias": Part(
        {"scores": (RelativeBias(),)},
        {"score": (lambda params, s, d, *more: s + params["relative_bias"][:, bucket_of(d)],)},
    ),
    "Shaw's positions": Part({"scores": (Relative(max_distance=3),)}, {"score": (shaw,)}),
    "Transformer-XL": Part(
        {"scores": (TransformerXL(features=6, base=BASE),)}, {"score": (transformer_xl,)}
    ),
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
    "neighborhood": masked(
        masks.Neighborhood((3, 4), (2, 3)), np.vectorize(partial(near, (3, 4), (2, 3)))
    ),
    "dilated": masked(masks.Dilated(2), lambda i, j: (i - j) % 2 == 0),
    "chosen blocks": masked(
        masks.BlockSparse(CHOSEN, 4, 3), lambda i, j: (CHOSEN[i // 4] == j[..., None] // 3).any(-1)
    )._replace(refuses={"steps": r"BlockSparse.blocks .* give 2 blocks of 4 of the 7 queries"}),
    "shared keys": Part({}, {"shared": True}, {"kv_from": (None, 0)}),
    "documents": masked(masks.Documents(np.array([3, 5])), lambda i, j: document(i) == document(j)),
}  # fmt: skip
