"""The points of a layer that change more than a tensor: scores, weights, and the heads' shares."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype

from flax_mha import sharding
from flax_mha.base import shapes
from flax_mha.kernels import Capture, dot_product_attention, observe
from flax_mha.kernels.softmax import finite
from flax_mha.kernels.stored import dequantize
from flax_mha.layer.linear import Linear
from flax_mha.layer.points import FEATURES, Edit, Points
from flax_mha.scores import Bias


def edit_result(points: Points, linear: Linear | None, x: jax.Array, out: jax.Array) -> jax.Array:
    """Apply the point of the heads' shares [*B, T, N, D] of the output, and return the output.

    Args:
      points: the points of the call.
      linear: the output projection, or None.
      x: the heads' outputs [*B, T, N, Hv], after gate and head mask.
      out: the output [*B, T, D].
    """
    if linear is None or linear.kernel is None or not points.needs("result"):
        return out

    def share(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x, kernel = promote_dtype(x, kernel, dtype=linear.dtype)
        return jnp.einsum("...tnv,nvd->...tnd", x, kernel, precision=linear.precision)

    names = ("batch", "length", "heads", None)
    shares = points("result", sharding.auto(share, names, x, linear.kernel), names)
    if points.prefix + "result" not in points.edits:
        return out

    def add(shares: jax.Array, bias: jax.Array | None) -> jax.Array:
        total = shares.sum(-2, dtype=shapes.wide(shares.dtype))
        if bias is not None:
            total = total + shapes.lead(bias.astype(total.dtype), total.ndim)
        return total.astype(dtype)

    dtype = out.dtype
    return sharding.auto(add, FEATURES, shares, linear.bias)


def edit_scores(points: Points, arguments: dict[str, Any], q: jax.Array, S: int) -> None:
    """Put edits of scores and weights into the arguments of attention from q to S keys."""
    *B, T, N, _ = q.shape
    scores = jax.ShapeDtypeStruct((*B, N, T, S), shapes.wide(q.dtype))
    edit = points.edit("scores", scores)
    if edit is not None:
        bias = arguments.pop("bias")
        before = () if bias is None else (Bias(bias),)
        arguments["scores"] = (*arguments["scores"], *before, edit)
    if "attention" not in arguments:
        edit = points.edit("weights", scores.update(dtype=q.dtype))
        if edit is not None:
            arguments["attention"] = functools.partial(_attend_with_weights, edit)


def _attend_with_weights(
    edit: Edit, q: jax.Array, k: Any, v: Any, *, capture: Capture | None = None,
    return_weights: bool = False, **call: Any,
) -> Any:  # fmt: skip
    """Compute attention with the weights of some heads edited. The others are the kernel's."""
    if call.get("dropout_rng") is not None:
        raise ValueError(
            "an edit of attention_weights needs a call without dropout, got a key for it; give "
            "deterministic=True"
        )
    dims = shapes.attention_dims(q, k, v)
    heads = Capture((), edit.heads).indices("heads", dims.N)
    is_read = capture is not None and "weights" in capture.what
    reads = capture if is_read and not return_weights else Capture(())
    read = reads.indices("heads", dims.N) if is_read or return_weights else heads
    both = np.union1d(heads, read)
    edited = np.searchsorted(both, heads)
    out, values = dot_product_attention(
        q, k, v, capture=Capture(("weights",), both.tolist()), **call
    )

    def change(out: jax.Array, w: jax.Array, v: jax.Array, edit: Edit) -> tuple[jax.Array, ...]:
        new, v = edit(w[..., edited, :, :]), jnp.take(v, heads // dims.G, -2)
        # A weight of 0 hides a value that is not finite.
        bad = jnp.swapaxes(~jnp.isfinite(v).all(-1), -1, -2)[..., None, :]
        seen = jnp.where((new != 0) & bad, jnp.nan, new)
        z = jnp.einsum("...hts,...shd->...thd", seen, finite(v), precision=call.get("precision"))
        out = out.at[..., heads, :].set(z.astype(out.dtype))
        return out, w.at[..., edited, :, :].set(new)

    layouts = (sharding.HEADS, ("batch", None, "length", None))
    out, w = sharding.auto(change, layouts, out, values["weights"], dequantize(v), edit)
    result = [out, w] if return_weights else [out]
    if capture is None:
        return tuple(result)
    # XLA computes both calls once, as they differ in what they read alone.
    captured = dot_product_attention(q, k, v, capture=capture, **call)[-1]
    if is_read:
        chosen = np.searchsorted(both, capture.indices("heads", dims.N))
        captured["weights"] = observe.pick(w, chosen, capture.indices("queries", dims.T))
    return (*result, captured)
