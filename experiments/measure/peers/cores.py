"""Attention alone, for given queries, keys and values."""

import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import flax_mha
from experiments.measure.peers.cases import Case
from experiments.measure.peers.work import jitted, visible
from experiments.measure.timing import RefusalError, Work
from flax_mha import masks


def ours(case: Case, kernel: str = "auto") -> Work:
    """Build `flax_mha.dot_product_attention`, by a named kernel unless it refuses."""
    mask = our_mask(case)
    if kernel != "auto":
        like = [jax.ShapeDtypeStruct(x.shape, jax.numpy.dtype(case.dtype)) for x in case.inputs()]
        refused = flax_mha.explain(*like, kernel=kernel, mask=mask).refused
        if kernel in refused:
            raise RefusalError(refused[kernel])

    def apply(_: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out: jax.Array = flax_mha.dot_product_attention(q, k, v, mask=mask, kernel=kernel)
        return out

    return jitted(case, apply)


def jax_nn(case: Case, implementation: Literal["xla", "cudnn"]) -> Work:
    """Build `jax.nn.dot_product_attention`."""
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise RefusalError(f"needs an NVIDIA GPU; this is {jax.default_backend()}")
    reach = case.window - 1

    def apply(_: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if case.documents:
            mask = _table(case)
            return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=case.causal, implementation=implementation,
            local_window_size=(reach, 0 if case.causal else reach) if case.window else None,
        )  # fmt: skip

    return jitted(case, apply)


def linen(case: Case) -> Work:
    """Build `flax.linen.dot_product_attention`."""
    if case.K not in (0, case.N):
        raise RefusalError("has as many key/value heads as query heads")

    def apply(_: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return nn.dot_product_attention(q, k, v, mask=_table(case))

    return jitted(case, apply)


def tokamax(case: Case) -> Work:
    """Build `tokamax.dot_product_attention`, by the implementation that it chooses."""
    import tokamax

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["peers"])  # otherwise tokamax would parse this program's flags
    attend = functools.partial(tokamax.dot_product_attention, is_causal=case.causal)
    reach = case.window - 1
    if case.window:
        attend = functools.partial(attend, local_window_size=(reach, 0 if case.causal else reach))

    def apply(_: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out: jax.Array = attend(q, k, v, mask=_table(case) if case.documents else None)
        return out

    return jitted(case, apply)


def fa4(case: Case) -> Work:
    """Build FlashAttention-4 by `fa4_jax.flash_attn`."""
    import fa4_jax

    reach = case.window - 1
    window = (reach, 0 if case.causal else reach) if case.window else None

    def apply(_: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        documents = None
        if case.documents:
            ids = np.repeat(np.arange(case.documents, dtype=np.int32), case.lengths())
            documents = fa4_jax.document_mask(jnp.broadcast_to(ids, (case.B, case.T)))
        out: jax.Array = fa4_jax.flash_attn(
            q, k, v, causal=case.causal, window_size=window, mask_mod=documents
        )
        return out

    return jitted(case, apply)


def our_mask(case: Case) -> masks.Mask | None:
    """Return the case's mask as a flax_mha mask."""
    reach = case.window - 1
    window = masks.Window(reach, None if case.causal else reach) if case.window else None
    packed = masks.Documents(case.lengths()) if case.documents else None
    return masks.combine(masks.Causal() if case.causal else None, window, packed)


def _table(case: Case) -> jax.Array | None:
    mask = visible(case)
    return None if mask is None else mask[None, None]
