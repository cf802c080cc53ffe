"""Rings under sliding windows: a step that needs a part of each shard's keys gets no others."""

import functools
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
from tests.support.meshes import EIGHT, KINDS, compare, on, total

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


@pytest.mark.sampled(0.018)
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
def test_windows_match_one_device(window: str, beside: str, kernel: str, kind: str) -> None:
    """Outputs, sums and gradients of grouped heads, the lengths or segments traced."""
    q, k, v = (RNG.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K))
    lengths, segments = np.array([T - 5, 12]), np.sort(RNG.integers(0, 4, (B, T)), axis=1)

    def attend(
        q: Any, k: Any, v: Any, lengths: Any, segments: Any, kernel: str = kernel
    ) -> tuple[jax.Array, jax.Array]:
        mask: Any = masks.Window(*WINDOWS[window])
        if beside:
            mask &= masks.Lengths(lengths) if beside == "lengths" else masks.Segments(segments)
        out, lse = dot_product_attention(q, k, v, mask=mask, kernel=kernel, return_residuals=True)
        # The lse of a query that sees nothing is −∞, and has no gradient.
        return out, jnp.where(jnp.isneginf(lse), 99.0, lse)

    args, specs = (q, k, v, lengths, segments), [AT] * 3 + [P()] * 2
    alone = functools.partial(attend, kernel="reference")
    compare(attend, args, kind, EIGHT, specs, (1, DEVICES), alone=alone)


def sent(mask: Any, T: int, *, grad: bool = False, order: Any = None) -> float:
    """Return the positions whose keys and values, or their gradients, a device sends."""

    def attend(*qkv: Any, order: Any = None) -> Any:
        return dot_product_attention(
            *qkv, mask=mask, kernel="ring", q_positions=order, kv_positions=order
        )

    def backward(q: Any, k: Any, v: Any, dout: Any, order: Any = None) -> Any:
        return jax.vjp(lambda *qkv: attend(*qkv, order=order), q, k, v)[1](dout)

    with on("Auto", EIGHT, shape=(1, DEVICES)) as mesh:
        at = NamedSharding(mesh, AT)
        q, k = (jax.ShapeDtypeStruct((B, T, n, H), "float32", sharding=at) for n in (N, K))
        fn, args = (backward, (q, k, k, q)) if grad else (attend, (q, k, k))
        lowered = jax.jit(fn, out_shardings=at).lower(*args, order=order)
        found = total(read(lowered.compile().as_text(), DEVICES))
    return found["collective-permute"][1] / (2 * 4 * B * K * H)


@pytest.mark.sampled(0.048)
def test_windows_send_the_keys_that_they_reach(optimized: None) -> None:
    """Over shards of 1,024 keys. Later keys come from the other direction."""
    T = 1024 * DEVICES
    assert sent(masks.Causal() & masks.Window(255), T) == 256
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
