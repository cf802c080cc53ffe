"""Each point of each layer means in decoding, for reads and edits, the same as in a full pass."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from flax_mha import CacheConfig, Capture, MultiHeadAttention, edits, masks, positions, variants
from flax_mha.cache import Encoded
from flax_mha.edits import Edit
from tests.layer.test_edits import variables
from tests.support.decoding import KEY, cache_of

B, T, D, N, S = 2, 6, 16, 4, 5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
MEMORY = RNG.normal(size=(B, S, D)).astype(np.float32)
OF_KEYS = ("scores", "weights")
READ = ("q", "k", "v", "z", "result", "out", *OF_KEYS, "lse", "entropy", "max_logit")
ROTARY, CAUSAL = positions.Rotary(), masks.Causal()
RING: dict[str, Any] = {"mask": masks.Window(2, 0), "cache": CacheConfig(slots=5)}
LAYERS: dict[str, nn.Module] = {
    "rotary": MultiHeadAttention(N, num_kv_heads=2, rotary=ROTARY, normalize_qk=True, mask=CAUSAL),
    "sinks": MultiHeadAttention(N, sinks=True, scale="learned", gate="head", mask=CAUSAL),
    "int8": MultiHeadAttention(N, cache=CacheConfig(dtype="int8"), mask=CAUSAL),
    "ring": MultiHeadAttention(N, rotary=ROTARY, **RING),
    "latent": variants.MultiHeadLatentAttention(
        N, kv_rank=8, rope_dim=4, head_dim=4, rotary=ROTARY, mask=CAUSAL
    ),
    "latent ring": variants.MultiHeadLatentAttention(
        N, kv_rank=8, rope_dim=4, head_dim=4, rotary=ROTARY, q_rank=6, use_bias=False, **RING
    ),
    "forgetting": variants.ForgettingAttention(N, num_kv_heads=2, mask=CAUSAL),
    "forgetting ring": variants.ForgettingAttention(N, scale="learned", **RING),
    "differential": variants.DifferentialAttention(N, head_dim=4, mask=CAUSAL),
    "talking": variants.TalkingHeadsAttention(N, num_kv_heads=2, mask=CAUSAL),
    "chosen": variants.ChosenBlocksAttention(N, block=2, count=2, mask=CAUSAL),
}
CROSS: dict[str, nn.Module] = {
    "plain": MultiHeadAttention(N, num_kv_heads=2, normalize_qk=True),
    "int8": MultiHeadAttention(N, cache=CacheConfig(dtype="int8")),
    "talking": variants.TalkingHeadsAttention(N),
}
# Decoding with latents computes no keys and values, and a variant's attention has no weights.
REFUSED = {"latent": ("k", "v", "weights"), "forgetting": ("weights",)}


def changes(layer: nn.Module, values: Any, name: str, *inputs: Any) -> list[tuple[str, Any]]:
    """Return edits of all points of a layer, all but one of them neutral, for each of three kinds.

    Their arrays have one shape, so that they are values of one program.
    """
    points = [
        point for point in edits.names(layer, values, *inputs)
        if point.removeprefix("attention_") not in REFUSED.get(name.split()[0], ())
    ]  # fmt: skip
    kinds = {"half": (0.5, 0.0), "set": (0.0, 0.3), "add": (1.0, 0.2)}
    return [
        (f"{kind} of {one}", {
            point: Edit(*map(np.float32, numbers if point == one else (1, 0))) for point in points
        })
        for one in points for kind, numbers in kinds.items()
    ]  # fmt: skip


def compare(read: Any, steps: list[Any], tolerance: float, is_ring: bool, cross: bool) -> None:
    """Compare the values read in a full pass with those of a prompt and of steps."""
    assert read.keys() == steps[0].keys() == {f"attention_{name}" for name in READ}
    for name in READ:
        want = np.asarray(read[f"attention_{name}"][0])
        parts = [np.asarray(step[f"attention_{name}"][0]) for step in steps]
        if cross and name in ("k", "v"):
            for part in parts:
                np.testing.assert_allclose(part, want, tolerance, tolerance, err_msg=name)
            continue
        queries = -2 if name in OF_KEYS else -1 if want.ndim == 3 and name != "out" else 1
        got = np.concatenate(parts, queries) if not (is_ring and name in OF_KEYS) else None
        if name == "weights" and is_ring:
            got = np.concatenate([np.sort(part)[..., -3:] for part in parts], queries)
            want = np.sort(want)[..., -3:]
        elif name in OF_KEYS:
            if got is None:
                continue
            # Scores of later tokens are not there yet.
            later = 0 if cross else np.where(np.tri(T, dtype=bool), 0, np.nan)
            got, want = got[..., : want.shape[-1]] + later, want + later
        assert got is not None
        np.testing.assert_allclose(got, want, tolerance, tolerance, err_msg=name)


def check(name: str, layer: nn.Module, memory: Any = None) -> None:
    tolerance = 0.05 if name == "int8" else 1e-4
    layer = layer.clone(capture=Capture(READ))
    inputs = (X,) if memory is None else (X, memory)
    values = variables(layer, *inputs)
    cached = layer.clone(decode=True)
    encoded = {} if memory is None else {"kv": Encoded(memory)}
    empty = jax.jit(lambda: cached.init(KEY, X, **encoded)["cache"])()

    @jax.jit
    def whole(changed: Any) -> Any:
        return layer.apply({**values, "edits": changed}, *inputs, mutable="intermediates")

    @jax.jit
    def step(changed: Any, cache: Any, x: Any, more: Any) -> Any:
        state = {**values, "edits": changed, "cache": cache}
        return cached.apply(state, x, **more, mutable=["cache", "intermediates"])

    is_ring = getattr(layer, "cache", None) is RING["cache"]
    for message, changed in changes(layer, values, name, *inputs):
        want, read = whole(changed)
        cache, outs, steps = empty, [], []
        for start, stop in ((0, 3), (3, 4), (4, 5), (5, 6)):
            out, new = step(changed, cache, X[:, start:stop], {} if start else encoded)
            cache = new["cache"]
            outs.append(out)
            steps.append(new["intermediates"])
        np.testing.assert_allclose(
            np.concatenate(outs, 1), want, tolerance, tolerance, err_msg=message
        )
        compare(read["intermediates"], steps, tolerance, is_ring, memory is not None)


@pytest.mark.sampled(0.042)
@pytest.mark.parametrize("name", LAYERS)
def test_points_of_steps_are_those_of_the_whole_sequence(name: str) -> None:
    check(name, LAYERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CROSS)
def test_points_of_steps_with_a_memory_are_those_of_the_whole_sequence(name: str) -> None:
    check(name, CROSS[name], MEMORY)


@pytest.mark.parametrize("name", ["latent", "forgetting"])
def test_edits_that_decoding_cannot_apply_are_refused(name: str) -> None:
    cached = LAYERS[name].clone(decode=True)
    shapes = jax.eval_shape(cached.init, KEY, X)
    changed = {**shapes, "edits": {"attention_z": Edit(add=np.ones((T, 1, 1)))}}
    with pytest.raises(ValueError, match="`add` of the edit attention_z must broadcast"):
        jax.eval_shape(lambda v: cached.apply(v, X[:, :1], mutable="cache"), changed)
    for point in REFUSED[name]:
        changed = {**shapes, "edits": {f"attention_{point}": Edit(0.5)}}
        with pytest.raises(ValueError, match=f"edit.* of .*attention_{point}"):
            jax.eval_shape(lambda v: cached.apply(v, X[:, :1], mutable="cache"), changed)


def test_arrays_over_keys_and_functions_are_refused_in_a_ring_buffer() -> None:
    cached = LAYERS["ring"].clone(decode=True)
    shapes = jax.eval_shape(cached.init, KEY, X)
    over_keys = Edit(np.ones(5))
    clip = Edit(fn=lambda x: x)
    for point, edit in (("weights", over_keys), ("scores", over_keys), ("weights", clip)):
        changed = {**shapes, "edits": {f"attention_{point}": edit}}
        with pytest.raises(ValueError, match="in a ring buffer"):
            jax.eval_shape(lambda v: cached.apply(v, X[:, :1], mutable="cache"), changed)


def test_keys_of_another_layer_that_decodes_are_read_but_not_edited() -> None:
    layer = MultiHeadAttention(N, mask=CAUSAL, capture=Capture(("k", "v")))
    cached = layer.clone(decode=True)
    values = variables(layer, X)
    held = {**values, "cache": cache_of(cached, X)}

    @jax.jit
    def run() -> Any:
        (_, kv), new = cached.apply(held, X, return_kv=True, mutable=["cache", "intermediates"])
        _, read = layer.apply(values, X, kv=kv, mutable="intermediates")
        changed = {**values, "edits": {"attention_v": Edit(0)}}
        message = "attention_v needs a call without kv of a layer that decodes"
        with pytest.raises(ValueError, match=message):
            layer.apply(changed, X, kv=kv)
        return new["intermediates"], read["intermediates"]

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-6), *run())
