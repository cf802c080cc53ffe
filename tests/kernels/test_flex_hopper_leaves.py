"""The gradients of float arrays by flax_mha's own kernel for Hopper, in Pallas' interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha.masks import Causal, Predicate, Segments
from flax_mha.scores import Alibi, Score, SoftCap
from tests.kernels.test_flex_hopper import arrays, close, learned, pulled

IDS = np.sort(np.random.default_rng(1).integers(0, 3, (1, 200)))
PACKED = Causal() & Segments(jnp.asarray(IDS[:, :130]), jnp.asarray(IDS))


def user_score(s, row, head, i, j, w, t):
    """Branch, and call functions composed of others."""
    wave = jnp.cos((i - j + head + row).astype(s.dtype)) + jnp.floor(s / 4) + jnp.expm1(s / 9)
    branches = [jnp.sin, lambda wave: w * jnp.tanh(wave), jnp.cos]
    wave = jax.lax.switch((w < 9).astype(jnp.int32), branches, wave)
    return s * (1 + wave) + t * (j - i).astype(s.dtype) / 50 + jax.checkpoint(jax.nn.relu)(s)


# Each call as a function of learned arrays, their shapes, and the features of q and v.
CALLS: dict[str, tuple[Any, dict[str, tuple[int, ...]], tuple[int, int]]] = {
    "everything": (
        lambda x: {
            "mask": PACKED, "bias": x["bias"], "sinks": x["sinks"],
            "scores": (SoftCap(1.5), Alibi(x["slopes"])), "scale": 0.3 + x["scale"] / 10,
            "dropout_rate": 0.3, "dropout_rng": jax.random.key(7),
        },
        {"slopes": (2,), "bias": (130, 200), "sinks": (2,), "scale": ()}, (8, 5),
    ),
    "user_score": (
        lambda x: {
            "mask": Predicate(lambda b, n, i, j, m: (i + j) % m != b, (np.array(3),)),
            "scores": (Score(user_score, (x["w"], x["t"])),),
        },
        {"w": (), "t": ()}, (128, 192),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_all_arrays_match_reference_on_hopper(hopper_memory, name: str) -> None:
    call, shapes, features = CALLS[name]
    args = call, arrays(130, 200, *features), learned(**shapes)
    close(pulled("flex", *args), pulled("reference", *args), 2**-6)


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 130, 200), (1, 2, 130, 200), (2, 1, 130, 200), (1, 2, 130, 1), (2, 1, 1, 200),
     (1, 1, 1, 1)],
)  # fmt: skip
def test_gradients_of_biases_sum_over_what_shares_them_on_hopper(hopper_memory, shape: Any) -> None:
    """With an empty tile, whose gradients are 0, and a slope that the bias passes through."""

    def call(x: Any) -> dict[str, Any]:
        given = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(7)}
        return {"mask": Causal(), "bias": x["b"], "scores": (SoftCap(2.0),), **given}

    args = call, arrays(130, 200, 8, 8, b=2), learned(b=shape)
    close(pulled("flex", *args), pulled("reference", *args), 2**-6)
