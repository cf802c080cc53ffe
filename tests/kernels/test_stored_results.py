"""The names of the kernels' results, with which `jax.checkpoint` runs no forward kernel again."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention
from flax_mha.masks import Causal
from tests.support.programs import count_equations

STORED = jax.checkpoint_policies.save_only_these_names("z", "lse")
# A primitive or kernel of the forward pass.
FORWARD = {
    "blockwise": "dot_general", "flex": "flex_forward",
    "splash": "fwd_residuals", "cudnn": "dot_product_attention_fwd",
    "ring:blockwise": "dot_general",
}  # fmt: skip


def loss(kernel: str, sinks: bool) -> Callable[..., Any]:
    """Return a loss of queries, keys, values and sinks, whose gradient needs out and lse."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array, s: jax.Array) -> jax.Array:
        call: dict[str, Any] = {"mask": Causal(), "sinks": s if sinks else None}
        if kernel == "splash":
            return jnp.sum(dot_product_attention(q, k, v, kernel=kernel, mask=Causal()) ** 2)
        out, lse = dot_product_attention(q, k, v, kernel=kernel, return_residuals=True, **call)
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(lse**2)

    return fn


def arrays(T: int, H: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (2, T, 4, H), (2, T, 2, H), (2, T, 2, H), (4,)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def check_calls(kernel: str, args: list[jax.Array], sinks: bool) -> None:
    """Check that the gradient has the forward kernel once with stored results, else twice."""
    fn, marker = loss(kernel, sinks), FORWARD[kernel]
    counts = [
        count_equations(jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(*args), marker)
        for f in (fn, jax.checkpoint(fn, policy=STORED), jax.checkpoint(fn))
    ]
    assert 0 < counts[0] == counts[1] < counts[2], counts


@pytest.mark.parametrize(
    ("kernel", "platform", "features", "dtype", "sinks"),
    [
        ("blockwise", None, 8, "float32", True),
        ("flex", "tpu", 128, "float32", True),
        ("splash", "tpu", 128, "float32", False),
        ("cudnn", "hopper", 8, "bfloat16", False),
        ("cudnn", "hopper", 8, "bfloat16", True),
    ],
)
def test_stored_results_spare_the_forward_kernel(
    kernel: str, platform: str | None, features: int, dtype: str, sinks: bool,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if platform:
        request.getfixturevalue(platform)
    check_calls(kernel, arrays(128, features, dtype), sinks)


@pytest.mark.sampled(0.08)
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_stored_results_spare_the_ring() -> None:
    """The ring stores its merged result once, and no result of a step."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    args = arrays(64, 8)
    rules = (("length", "model"),)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        check_calls("ring:blockwise", args, sinks=True)


@pytest.mark.parametrize("kernel", ["checkpointed", "reference", "decode"])
def test_every_kernel_names_its_result_once(kernel: str, capsys: pytest.CaptureFixture) -> None:
    """A second name would store a second copy. The name "lse" is that of a maximum and a sum."""
    args = arrays(16, 8)
    fn = jax.checkpoint(loss(kernel, False), policy=STORED)
    jax.ad_checkpoint.print_saved_residuals(fn, *args)
    report = capsys.readouterr().out
    assert 2 * report.count("named 'z'") == report.count("named 'lse'") == 2, report
