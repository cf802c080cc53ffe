"""Rings under sliding windows: a step that needs a part of each shard's keys gets no others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.plan.collectives import read
from flax_mha import dot_product_attention, masks
from tests.kernels.cases import pairs
from tests.support import oracle
from tests.support.meshes import BACKWARD, EIGHT, FORWARD, KINDS, on, total
from tests.support.oracle import error

RNG = np.random.default_rng(11)
B, N, K, H, DEVICES = 2, 4, 2, 8, 8
AT = P("data", "model")
# Windows (left, right) over shards of 8 keys.
WINDOWS = {
    "a part of the shard before": (3, 0),
    "a part of the shard after": (0, 5),
    "parts of both": (2, 6),
    "a shard": (8, 0),
    "a shard and a part": (10, 0),
    "a shard and a part on each side": (9, 10),
    "a shard before and a part after": (8, 1),
    "almost all": (57, 1),
    "more than all": (90, 0),
    "all later keys": (2, None),
}
T = 64


@pytest.mark.sampled(0.05)
@pytest.mark.parametrize(
    ("window", "beside", "kernel", "kind"),
    [
        *pairs(
            window=[*WINDOWS], beside=["", "lengths", "segments"], kernel=["ring:blockwise"],
            kind=[*KINDS],
        ),
        ("parts of both", "segments", "ring:reference", "Auto"),
        ("a shard and a part", "", "ring:reference", "Explicit"),
        # Transfers of both passes, and of loops.
        ("all later keys", "", "ring:reference", "Auto"),
        ("all later keys", "lengths", "ring:reference", "Explicit"),
    ],
)  # fmt: skip
def test_windows_match_the_definition(window: str, beside: str, kernel: str, kind: str) -> None:
    """Outputs, sums and gradients of grouped heads, the lengths or segments traced."""
    left, right = WINDOWS[window]
    q, k, v, dout = (RNG.normal(size=(B, T, n, H)).astype("float32") for n in (N, K, K, N))
    dlse = RNG.normal(size=(B, N, T)).astype("float32")
    lengths = np.array([T - 5, 12])
    segments = np.sort(RNG.integers(0, 4, (B, T)), axis=1)
    distance = np.arange(T) - np.arange(T)[:, None]
    allowed = (distance >= -left) & (distance <= (T if right is None else right))
    allowed = np.broadcast_to(allowed, (B, 1, T, T))
    if beside == "lengths":
        allowed = allowed & (np.arange(T) < lengths[:, None])[:, None, None]
    if beside == "segments":
        allowed = allowed & (segments[:, None, None] == segments[:, None, :, None])
    # The lse of a query that sees nothing is −∞, and has no gradient.
    dlse = np.where(allowed.any(-1), dlse, np.float32(0))

    def gradients(*args: Any) -> Any:
        q, k, v, dout, dlse, lengths, segments = args
        mask: Any = masks.Window(left, right)
        if beside:
            mask &= masks.Lengths(lengths) if beside == "lengths" else masks.Segments(segments)

        def attend(*qkv: Any) -> Any:
            return dot_product_attention(*qkv, mask=mask, kernel=kernel, return_residuals=True)

        (out, lse), pull = jax.vjp(attend, q, k, v)
        return out, lse, pull((dout, dlse))

    mesh, leave = on(kind, EIGHT, shape=(1, DEVICES))
    try:
        placed = jax.device_put((q, k, v, dout), NamedSharding(mesh, AT))
        sums = jax.device_put(dlse, NamedSharding(mesh, P("data", None, "model")))
        results = jax.jit(gradients)(*placed, sums, lengths, segments)
        out, lse, slopes = jax.device_get(results)
    finally:
        leave()
    want, want_lse, _ = oracle.attention(q, k, v, allowed=allowed)
    assert error(out, want) < FORWARD
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    finite = np.isfinite(want_lse)
    assert error(lse[finite], want_lse[finite]) < FORWARD
    expected = oracle.attention_gradients(
        q, k, v, cotangent=dout, lse_cotangent=dlse, allowed=allowed
    )
    for got, wanted in zip(slopes, expected[:3], strict=True):
        assert error(got, wanted) < BACKWARD


def sent(mask: Any, T: int, *, grad: bool = False, order: Any = None) -> float:
    """Return the positions whose keys and values, or their gradients, a device sends."""

    def attend(*qkv: Any, order: Any = None) -> Any:
        return dot_product_attention(
            *qkv, mask=mask, kernel="ring", q_positions=order, kv_positions=order
        )

    def backward(q: Any, k: Any, v: Any, dout: Any, order: Any = None) -> Any:
        return jax.vjp(lambda *qkv: attend(*qkv, order=order), q, k, v)[1](dout)

    mesh, leave = on("Auto", EIGHT, shape=(1, DEVICES))
    try:
        at = NamedSharding(mesh, AT)
        q, k = (jax.ShapeDtypeStruct((B, T, n, H), "float32", sharding=at) for n in (N, K))
        fn, args = (backward, (q, k, k, q)) if grad else (attend, (q, k, k))
        lowered = jax.jit(fn, out_shardings=at).lower(*args, order=order)
        found = total(read(lowered.compile().as_text(), DEVICES))
    finally:
        leave()
    return found["collective-permute"][1] / (2 * 4 * B * K * H)


@pytest.mark.sampled(0.2)
def test_windows_send_the_keys_that_they_reach(optimized: None) -> None:
    """Over shards of 1,024 keys. Later keys come from the other direction."""
    T = 1024 * DEVICES
    assert sent(masks.Causal() & masks.Window(255), T) == 256
    assert sent(masks.Window(256, 0), T) == 256
    assert sent(masks.Window(0, 64), T) == 64
    assert sent(masks.Window(256, 64), T) == 256 + 64
    assert sent(masks.Window(1024 + 128, 0), T) == 1024 + 128
    # Rounded up to a sixteenth of a shard.
    assert sent(masks.Window(1, 65), T) == 64 + 128
    # The parts are kept for the backward pass, and their gradients return.
    assert sent(masks.Window(256, 64), T, grad=True) == 2 * (256 + 64)


@pytest.mark.slow
def test_whole_shards_are_sent_where_parts_are_not_known(optimized: None) -> None:
    T = 32 * DEVICES
    assert sent(masks.Window(32, 0), T) == 32
    # A part that comes from two devices away would cross more links than a whole shard.
    assert sent(masks.Window(32 + 20, 0), T) == 2 * 32
    traced = jax.ShapeDtypeStruct((T,), jnp.int32)
    assert sent(masks.Window(8, 0), T, order=traced) == (DEVICES - 1) * 32
