"""QK-clip scales heads with too large scores back to the threshold."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flax_mha import Capture, Encoder, EncoderBlock, MultiHeadAttention, QKNorm, qk_clip
from flax_mha.positions import Rotary
from flax_mha.variants import MultiHeadLatentAttention, TalkingHeadsAttention
from tests.support.layer_checks import drawn
from tests.support.oracle import error, random_like

X = np.random.default_rng(0).normal(size=(2, 7, 16)).astype(np.float32)
KEY = jax.random.key(0)
SCORES = Capture(("max_logit",))


@functools.partial(jax.jit, static_argnums=0)
def captured(module: Any, params: Any, x: Any = X) -> Any:
    return module.apply({"params": params}, x, mutable=["intermediates"])[1]["intermediates"]


def max_scores(found: Any) -> np.ndarray:
    """Return the maximum of each layer and head, [layers, N]."""
    return np.stack([np.asarray(x).max((-1, 0)) for x in jax.tree.leaves(found)])


def layer(**fields: Any) -> MultiHeadAttention:
    return MultiHeadAttention(4, capture=SCORES, **fields)


def clipped(module: Any, params: Any, clip: Any) -> Any:
    seen = captured(module, params)

    @jax.jit
    def run(params: Any) -> Any:
        steps = jax.tree.map(jnp.zeros_like, params)
        steps, _ = clip.update(steps, clip.init(params), params, max_logits=seen)
        return optax.apply_updates(params, steps)

    return run(params)


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 2}], ids=str)
def test_clip_scales_only_heads_beyond_threshold(fields: dict[str, Any]) -> None:
    """Their scores end at the threshold. The other heads' parameters do not change."""
    balance = 0.2
    module = layer(**fields)
    params = random_like(jax.eval_shape(module.init, KEY, X))["params"]
    before = max_scores(captured(module, params))[0]
    threshold = float(np.sort(before)[1:3].mean())
    after = clipped(module, params, qk_clip(threshold, balance))
    np.testing.assert_allclose(
        max_scores(captured(module, after))[0], np.minimum(before, threshold), rtol=1e-5
    )
    beyond = before > threshold
    for name in ("query", "key"):
        old, new = params[name]["kernel"], after[name]["kernel"]
        if old.shape[1] == 4:
            changed = np.abs(new - old).max((0, 2)) > 1e-6
            shared = name == "query" and "num_kv_heads" in fields
            power = 1.0 if shared else balance if name == "query" else 1 - balance
            np.testing.assert_array_equal(changed, beyond)
            expected = old * np.minimum(1, threshold / before)[None, :, None] ** power
            assert error(new, expected) < 1e-6
        else:
            np.testing.assert_array_equal(new, old)
    np.testing.assert_array_equal(after["value"]["kernel"], params["value"]["kernel"])


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("scan", [False, True])
def test_clip_acts_on_every_layer_of_stack(scan: bool) -> None:
    module = Encoder(3, EncoderBlock(layer(), 24), scan=scan)
    params = random_like(jax.eval_shape(module.init, KEY, X))["params"]
    after = clipped(module, params, qk_clip(1e-6))
    for x in jax.tree.leaves(captured(module, after)):
        assert x.max() < 1e-4


def test_scores_of_other_layers_are_refused() -> None:
    params = drawn(layer(), X)["params"]
    for more in ({}, {"max_logits": {"x": 1}}):
        with pytest.raises(ValueError, match="needs max_logits="):
            qk_clip().update(params, None, params, **more)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (layer(qk_norm=QKNorm()), "without query_ln, got one at the top"),
        (TalkingHeadsAttention(4, capture=SCORES), "without mix_scores, got one"),
        (
            MultiHeadAttention(4, capture=Capture(("max_logit",), heads=(0,))),
            r"of all 4 heads of the top, \[\*B, 4, T\], got \(2, 1, 7\)",
        ),
    ],
)
def test_unsupported_layers_raise(module: Any, words: str) -> None:
    params = drawn(module, X)["params"]
    with pytest.raises(ValueError, match=words):
        clipped(module, params, qk_clip())


@pytest.mark.sampled(0.08)
def test_clip_of_latent_attention() -> None:
    """The shared key stays, so its part of the queries takes the whole factor."""
    module = MultiHeadLatentAttention(
        4, head_dim=6, kv_rank=7, rope_dim=4, rotary=Rotary(), capture=SCORES
    )
    params = drawn(module, X)["params"]
    before = max_scores(captured(module, params))[0]
    threshold = float(np.sort(before)[1:3].mean())
    after = clipped(module, params, qk_clip(threshold, 0.3))
    factor = np.minimum(1, threshold / before)[:, None]
    for leaf in ("kernel", "bias"):
        old, new = (tree["query"][leaf] for tree in (params, after))
        expected = np.concatenate([old[..., :6] * factor**0.3, old[..., 6:] * factor], -1)
        assert error(new, expected) < 1e-6
        assert error(after["key"][leaf], params["key"][leaf] * factor**0.7) < 1e-6
    np.testing.assert_array_equal(after["kv_down"]["kernel"], params["kv_down"]["kernel"])
    np.testing.assert_allclose(
        max_scores(captured(module, after))[0], np.minimum(before, threshold), rtol=1e-5
    )


def test_clip_of_layer_with_shared_kv() -> None:
    """Only the queries are scaled there."""
    module, kv = layer(), (X[..., None, :4], X[..., None, 4:8])
    params = random_like(jax.eval_shape(lambda: module.init(KEY, X, kv=kv)))["params"]

    @jax.jit
    def scores(params: Any) -> Any:
        return module.apply({"params": params}, X, kv=kv, mutable=["intermediates"])[1]

    before = max_scores(scores(params))[0]
    threshold = 0.5 * before.max()
    steps = jax.tree.map(np.zeros_like, params)
    steps, _ = qk_clip(threshold).update(steps, None, params, max_logits=scores(params))
    after = optax.apply_updates(params, steps)
    expected = np.minimum(before, threshold)
    np.testing.assert_allclose(max_scores(scores(after))[0], expected, rtol=1e-5)
