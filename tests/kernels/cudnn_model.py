"""A model of cuDNN's primitives in jnp, with NaN wherever cuDNN promises nothing.

It replaces them on machines without a GPU. It follows the graph that XLA builds of them (scale,
bias, masks that select, softmax; backward from lse and Σ dout·out), not flax_mha's kernel.

In the ragged layout each run is its own sequence, as in XLA's graph: q, k, v, out and their
gradients by offsets, the lse in one line per run. Values outside all runs are NaN.
"""

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

MASKS = {fused.MaskType.PADDING: False, fused.MaskType.PADDING_CAUSAL: True}


def scores(q, k, bias, q_length, k_length, scale, variadic_args, mask_type, window):
    """Compute the float32 scores [rows, N, T, S], −∞ if masked."""
    (rows, T, N, F), (_, S, K, _) = q.shape, k.shape
    has_bias, has_dbias = variadic_args
    assert q.dtype == k.dtype
    assert q.dtype in (jnp.bfloat16, jnp.float16)
    assert F % 8 == 0
    assert F <= 256
    assert isinstance(scale, float)
    assert has_bias == bool(bias.size)
    assert has_bias or not has_dbias
    assert (q_length.shape, k_length.shape) == ((rows,), (rows,))
    assert q_length.dtype == k_length.dtype == jnp.int32
    k = jnp.repeat(k, N // K, 2)
    x = jnp.einsum("btnf,bsnf->bnts", q, k, preferred_element_type=jnp.float32) * scale
    if has_bias:
        assert bias.shape[-2:] == (T, S)
        assert bias.shape[0] in (1, rows)
        assert bias.shape[1] in (1, N)
        assert bias.dtype == q.dtype
        assert T % 2 == S % 2 == 0
        x = x + bias.astype(jnp.float32)
    i, j = jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)[None]
    seen = (i[None] < q_length[:, None, None]) & (j[None] < k_length[:, None, None])
    if MASKS[mask_type]:
        seen &= (j <= i)[None]
    if window is not None:
        # Without causality the window has no end.
        assert MASKS[mask_type]
        assert window > 0
        seen &= (i - window < j)[None]
    return jnp.where(seen[:, None], x, -jnp.inf)


def check(paged, seed, dropout_rate):
    assert all(x.shape == (0,) for x in paged)
    assert (seed, dropout_rate) == (0, 0.0)


def by_token(layout, *arrays):
    """Return arrays [rows, T, N, F] of a layout, or in a layout the arrays of these."""
    if layout == fused.AttentionLayout.BTNH.value:
        return arrays
    assert layout == fused.AttentionLayout.BNTH.value
    return tuple(jnp.swapaxes(x, 1, 2) for x in arrays)


def forward(
    query, key, value, bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets, page_table_k, page_table_v,
    score_mod_args=(), *, scale, seed, dropout_rate, variadic_args, mask_type, layout,
    sliding_window_length, is_training, score_mod=None,
):  # fmt: skip
    """Compute out and lse. Fully masked queries, and positions beyond a row's length, are NaN."""
    (q, k, v), q_length, k_length = by_token(layout, query, key, value), q_seqlen, kv_seqlen
    assert (score_mod, score_mod_args) == (None, ())
    check((page_table_k, page_table_v), seed, dropout_rate)
    assert is_training
    settings = scale, variadic_args, mask_type, sliding_window_length
    if q_offsets.size:
        q, k, v, *lengths, covered, _ = cut(q, k, v, q_length, k_length, q_offsets, kv_offsets)
        out, lse = of_rows(q, k, v, bias, *lengths, *settings)
        assert layout == fused.AttentionLayout.BTNH.value
        return joined(out, covered, query.shape), lse
    out, lse = of_rows(q, k, v, bias, q_length, k_length, *settings)
    return *by_token(layout, out), lse


def of_rows(q, k, v, bias, q_length, k_length, *settings):
    assert q.shape[-1] == v.shape[-1]
    x = scores(q, k, bias, q_length, k_length, *settings)
    top = x.max(-1, keepdims=True)
    p = jnp.exp(x - top)
    total = p.sum(-1, keepdims=True)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], 2)
    # As in the kernel, a weight of 0 times NaN is NaN.
    out = jnp.einsum("bnts,bsnf->btnf", (p / total).astype(q.dtype), v)
    return out.astype(q.dtype), (top + jnp.log(total))[..., 0]


def backward(
    query, key, value, bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets, page_table_k, page_table_v,
    activation, fwd_output, grad_output, score_mod_args=(), *, scale, seed, dropout_rate,
    variadic_args, mask_type, layout, sliding_window_length, score_mod=None,
):  # fmt: skip
    """Compute the gradients from the given lse, out and dout."""
    (q, k, v), q_length, k_length = by_token(layout, query, key, value), q_seqlen, kv_seqlen
    assert (score_mod, score_mod_args) == (None, ())
    lse, (out, dout) = activation, by_token(layout, fwd_output, grad_output)
    check((page_table_k, page_table_v), seed, dropout_rate)
    assert lse.dtype == jnp.float32
    assert out.dtype == dout.dtype == q.dtype
    assert out.shape == dout.shape == q.shape
    settings = scale, variadic_args, mask_type, sliding_window_length
    if q_offsets.size:
        q, k, v, *lengths, covered_q, covered_k = cut(
            q, k, v, q_length, k_length, q_offsets, kv_offsets
        )
        out, dout = (taken(x, covered_q) for x in (out, dout))
        dq, dk, dv = gradients(q, k, v, bias, *lengths, lse, out, dout, *settings)
        targets = (covered_q, query.shape), (covered_k, key.shape), (covered_k, key.shape)
        return [joined(x, *target) for x, target in zip((dq, dk, dv), targets, strict=True)]
    dq, dk, dv, *dbias = gradients(q, k, v, bias, q_length, k_length, lse, out, dout, *settings)
    return [*by_token(layout, dq, dk, dv), *dbias]


def gradients(q, k, v, bias, q_length, k_length, lse, out, dout, *settings):
    scale = settings[0]
    groups = q.shape[2] // k.shape[2]
    x = scores(q, k, bias, q_length, k_length, *settings)
    p = jnp.exp(x - lse[..., None])
    wide = [jnp.repeat(x, groups, 2).astype(jnp.float32) for x in (k, v)]
    dp = jnp.einsum("btnf,bsnf->bnts", dout.astype(jnp.float32), wide[1])
    delta = jnp.einsum("btnf,btnf->bnt", dout, out, preferred_element_type=jnp.float32)
    ds = p * (dp - delta[..., None])
    dq = jnp.einsum("bnts,bsnf->btnf", ds, wide[0]) * scale
    dk = jnp.einsum("bnts,btnf->bsnf", ds, q.astype(jnp.float32)) * scale
    dv = jnp.einsum("bnts,btnf->bsnf", p, dout.astype(jnp.float32))
    dk, dv = (x.reshape(*k.shape[:3], groups, -1).sum(3) for x in (dk, dv))
    found = [x.astype(q.dtype) for x in (dq, dk, dv)]
    if settings[1][1]:
        axes = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
        found.append(ds.sum(axes, keepdims=True).astype(bias.dtype))
    return found


def cut(q, k, v, q_lengths, k_lengths, q_offsets, k_offsets):
    """Return the runs as rows, their lengths, and their tokens' indices among all [runs, L].

    JAX describes them by lengths [rows, runs] and offsets [rows, runs + 1], where −1 means no run.
    Other entries move to the front, and the n-th length belongs to the n-th offset.
    """
    indices = []
    for x, lengths, offsets in ((q, q_lengths, q_offsets), (k, k_lengths, k_offsets)):
        rows, L = x.shape[:2]
        assert lengths.shape == (rows, offsets.shape[1] - 1)
        assert lengths.shape[1] > 1, "one run a row is no ragged layout"
        assert lengths.dtype == offsets.dtype == jnp.int32
        offsets = jnp.where(
            offsets < 0, -1, offsets + L * jnp.arange(rows, dtype=jnp.int32)[:, None]
        )
        count = lengths.size
        (order,) = jnp.nonzero(offsets.reshape(-1) >= 0, size=count, fill_value=offsets.size)
        begin = jnp.take(offsets.reshape(-1), order, fill_value=rows * L)[:, None]
        (order,) = jnp.nonzero(lengths.reshape(-1) >= 0, size=count, fill_value=count)
        length = jnp.take(lengths.reshape(-1), order, fill_value=0)
        place = begin + jnp.arange(L, dtype=jnp.int32)[None]
        # Beyond a run's length its contents are undefined.
        indices.append(
            (
                jnp.where(jnp.arange(L, dtype=jnp.int32)[None] < length[:, None], place, rows * L),
                length,
            )
        )
    (of_q, q_length), (of_k, k_length) = indices
    return taken(q, of_q), taken(k, of_k), taken(v, of_k), q_length, k_length, of_q, of_k


def taken(x, indices):
    """Return the tokens [runs, L, …] of x [rows, L, …], 1 where there are none."""
    return jnp.take(x.reshape(-1, *x.shape[2:]), indices, 0, mode="fill", fill_value=1)


def joined(x, indices, shape):
    """Write the runs back to their rows, with NaN outside all runs."""
    empty = jnp.full((shape[0] * shape[1], *shape[2:]), jnp.nan, x.dtype)
    return empty.at[indices].set(x, mode="drop").reshape(shape)
