"""Circuits of heads, read from the weights of a layer, as products of thin matrices.

With features x as rows, a head's query i and key j have

    scores    x_i W_QK x_jᵀ,   W_QK = scale · W_Q R(i − j) W_Kᵀ     [D, D] of rank H
    output    Σ_j p_ij x_j W_OV,   W_OV = W_V W_O                   [D, D] of rank Hv

with R the rotation of `rotary`, or 1. No [D, D] is formed.

Source: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import meta

from flax_mha.base import checks
from flax_mha.layer.settings import unhandled
from flax_mha.linen import MultiHeadAttention
from flax_mha.positions import Rotary
from flax_mha.positions.rope_scaling import Growing


class Factored(struct.PyTreeNode):
    """A product left · right of thin matrices.

    Attributes:
      left: [..., D, r].
      right: [..., r, D'].
    """

    left: jax.Array
    right: jax.Array

    def __matmul__(self, other: "Factored") -> "Factored":
        """Return the factored product with another."""
        return Factored(self.left, (self.right @ other.left) @ other.right)

    @property
    def T(self) -> "Factored":
        """The transpose."""
        return Factored(jnp.swapaxes(self.right, -1, -2), jnp.swapaxes(self.left, -1, -2))

    def dense(self) -> jax.Array:
        """Return the product [..., D, D']."""
        return self.left @ self.right

    def svd(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return u [..., D, r], the singular values s [..., r] and vh [..., r, D']."""
        # Only the product of two triangles, [r, r], needs an SVD.
        (q, r), (p, t) = (jnp.linalg.qr(x.left) for x in (self, self.T))
        u, s, vh = jnp.linalg.svd(r @ jnp.swapaxes(t, -1, -2), full_matrices=False)
        return q @ u, s, vh @ jnp.swapaxes(p, -1, -2)

    def norm(self) -> jax.Array:
        """Return the Frobenius norm [...]."""
        return jnp.linalg.norm(self.svd()[1], axis=-1)


def parameters(variables: Mapping[str, Any], path: str, layer: int | None = None) -> Any:
    """Return the parameters of a module.

    Args:
      variables: the variables of a linen model, or the parameters of an nnx model as a dict.
      path: the path of the module, such as "decoder/layers_0/attention".
      layer: the index on the leading axis of layers under `nn.scan`.
    """
    part = meta.unbox(variables.get("params", variables))
    for name in path.split("/"):
        part = part[name]
    return part if layer is None else jax.tree.map(lambda x: x[layer], part)


def qk(
    layer: Any, p: Mapping[str, Any], *, distance: int | None = None,
    norm: Mapping[str, Any] | None = None, biases: bool = False,
) -> Factored:  # fmt: skip
    """Return W_QK of each head, [N, D, D].

    Args:
      layer: the layer, linen or nnx.
      p: its parameters, as `parameters` returns them.
      distance: i − j for a layer with `rotary`.
      norm: the parameters of the norm before the layer, for features that are normalized, but not
        scaled. Its bias is one of `biases`.
      biases: True for [N, D + 1, D + 1] with biases, for features that end with a 1.

    Raises:
      ValueError: if scores are no bilinear forms, as with a norm of queries and keys.
    """
    handled = ("rotary", "scale", "sinks", "normalizer", "gate", "exclusive", "project_out")
    layer = _check(layer, handled)
    q, k = (_fold(p[name], norm, biases) for name in ("query", "key"))
    if (rotary := layer.rotary) is not None:
        if not isinstance(rotary, Rotary) or isinstance(rotary.scaling, Growing):
            raise ValueError(
                f"rotary must depend only on i − j, as positions.Rotary() does, got {rotary!r}; "
                f"rotate queries and keys by hand"
            )
        if distance is None:
            raise ValueError("a layer that rotates needs a distance, got None; give distance=0")
        at = jnp.zeros(len(q), jnp.int32)
        q, k = rotary(q, at + distance), rotary(k, at)
    scale = q.shape[-1] ** -0.5 if layer.scale is None else layer.scale
    scale = p["score_scale"][None, :, None] if "score_scale" in p else scale
    q, k = jnp.swapaxes(q * scale, 0, 1), jnp.moveaxis(k, 0, -1)
    return Factored(q, jnp.repeat(k, len(q) // len(k), axis=0))


def ov(
    layer: Any, p: Mapping[str, Any], *, norm: Mapping[str, Any] | None = None, biases: bool = False
) -> Factored:
    """Return W_OV of each head, [N, D, D].

    Arguments are as for `qk`. With `biases`, b_V W_O is one more row. b_O belongs to no head.

    Raises:
      ValueError: if outputs are no such products, as with `gate`.
    """
    handled = ("rotary", "scores", "scale", "sinks", "normalizer", "qk_norm", "normalize_qk")
    _check(layer, handled)
    v, out = jnp.swapaxes(_fold(p["value"], norm, biases), 0, 1), p["out"]["kernel"]
    return Factored(jnp.repeat(v, len(out) // len(v), axis=0), out)


def composition(kind: str, earlier: Factored, later: Factored) -> jax.Array:
    """Return how much later heads read from earlier ones, [N, N'].

        q: ‖W_OV W_QK‖ / (‖W_OV‖ ‖W_QK‖),   k: ‖W_QK W_OVᵀ‖ / …,   v: ‖W_OV W′_OV‖ / …

    with Frobenius norms.

    Args:
      kind: "q", "k" or "v".
      earlier: `ov` of the earlier layer, without biases.
      later: `qk` of the later layer, or for "v" its `ov`.
    """
    # ‖W_QK W_OVᵀ‖ = ‖W_OV W_QKᵀ‖.
    later = checks.choice("kind", kind, {"q": later, "k": later.T, "v": later})
    r, t = (jnp.linalg.qr(x.left, mode="r") for x in (earlier, later.T))
    products = jnp.einsum("nir,nrd,mds,mjs->nmij", r, earlier.right, later.left, t)
    norms = earlier.norm()[:, None] * later.norm()[None]
    return jnp.linalg.norm(products, axis=(-2, -1)) / norms


def _fold(linear: Mapping[str, Any], norm: Mapping[str, Any] | None, biases: bool) -> jax.Array:
    """Return the kernel [D, N, H], with biases [D + 1, N, H], with a norm folded in."""
    kernel, norm = linear["kernel"], norm or {}
    scaled = kernel * norm["scale"][:, None, None] if "scale" in norm else kernel
    if not biases:
        return scaled
    bias = linear.get("bias", jnp.zeros(kernel.shape[1:], kernel.dtype))
    if "bias" in norm:
        bias = bias + jnp.einsum("d,dnh->nh", norm["bias"], kernel)
    return jnp.concatenate([scaled, bias[None]])


def _check(layer: Any, handled: tuple[str, ...]) -> MultiHeadAttention:
    """Return a layer's fields if its circuit follows from parameters only."""
    layer = getattr(layer, "settings", layer)  # of an nnx layer
    if (
        not isinstance(layer, MultiHeadAttention)
        or type(layer).compute is not MultiHeadAttention.compute
    ):
        raise ValueError(f"layer must be a MultiHeadAttention, got {type(layer).__qualname__}")
    for name, value in unhandled(layer, handled).items():
        raise ValueError(
            f"a circuit of only weights needs a layer without {name}, got {value!r}; read the "
            f"layer's values with Capture, or clone the layer without {name}"
        )
    return layer
