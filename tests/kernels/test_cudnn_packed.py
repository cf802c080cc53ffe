"""Packed documents on NVIDIA GPUs in cuDNN's ragged layout, with a model of cuDNN."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from flax_mha import MultiHeadAttention
from flax_mha.base.coordinates import whole
from flax_mha.base.shapes import Dims
from flax_mha.kernels import cudnn
from flax_mha.kernels.cudnn import primitives
from flax_mha.kernels.cudnn.bands import Runs
from flax_mha.masks import Causal, Documents, Lengths, Mask, Segments, Window
from flax_mha.positions import Rotary
from tests.kernels import cudnn_model
from tests.kernels.half_precision import close, run
from tests.kernels.oracle_check import B, N, arrays, check
from tests.kernels.test_cudnn_lowering import lowered
from tests.support.oracle import random_like

T = 40
LENGTHS = np.array([[13, 1, 20, 6], [40, 0, 0, 0]])
IDS = np.stack([np.repeat(np.arange(5), n) for n in ([13, 1, 20, 4, 2], [7, 0, 30, 3, 0])])
GROUPS = pytest.mark.skipif(not cudnn.PACKED_GROUPS, reason="this JAX has no such groups")

MASKS: dict[str, Mask] = {
    "known ids": Segments(IDS),
    "known ids in any order": Causal() & Segments(7 - IDS[0]),
    "windows": Causal() & Window(5) & Segments(IDS),
    "promised runs": Causal() & Segments(IDS, runs=True, at_most=6),
    "documents": Causal() & Documents(LENGTHS),
    "documents and the rest": Causal() & Documents(np.array([[3, 9], [0, 40]])),
    "more documents than tokens": Documents(np.array([0] * 50 + [11, 0, 29])),
    "padding": Causal() & Documents(LENGTHS) & Lengths(np.array([15, 0])),
    "padding of both": Documents(LENGTHS) & Lengths(np.array([39, 12]), np.array([5, 40])),
}


@pytest.mark.sampled(0.03)
@pytest.mark.parametrize("K", [pytest.param(2, marks=GROUPS), 4])
@pytest.mark.parametrize("name", MASKS)
def test_packed_documents_match_definition(nvidia, name: str, K: int) -> None:
    """Masks are static, or traced if their ids promise runs. Sinks and the lse have gradients."""
    mask, learned = MASKS[name], {"sinks": np.float32([-1, 0, 0.5, 2])}
    known = {"allowed": np.asarray(mask.dense(T, T, (B,), N))} | learned
    if K == 4 and not ("ids" in name or name == "windows"):
        mask = jax.tree.map(jnp.asarray, mask)  # Traced inside a jit.
    check(arrays(T, T, K, "bfloat16"), known, {"mask": mask}, learned)


def test_repeated_id_starts_new_segment_in_runs() -> None:
    ids = np.array([0, 0, 1, 0, 0, 1])
    again = np.array([0, 0, 1, 2, 2, 3])
    for given in (ids, jnp.asarray(ids)):
        promised = Segments(given, runs=True)
        np.testing.assert_array_equal(promised.dense(6), Segments(again).dense(6))
        assert (np.asarray(Segments(given).dense(6)) != np.asarray(promised.dense(6))).any()


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("kernel", ["cudnn", "reference"])
def test_runs_beyond_at_most_are_fully_masked(nvidia, kernel: str) -> None:
    """The other runs do not change."""
    *qkv, _ = arrays(T, T, 4, "bfloat16")

    @jax.jit
    def both(ids, qkv):
        mask = Causal() & Segments(ids, runs=True, at_most=3)
        return run(*qkv, kernel, mask=mask)

    out, lse = both(IDS, qkv)
    late = np.stack([np.arange(T) >= 34, np.zeros(T, bool)])
    mask = Causal() & Segments(IDS)
    wanted, wanted_lse = jax.jit(lambda *x: run(*x, kernel, mask=mask))(*qkv)
    np.testing.assert_array_equal(out, np.where(late[..., None, None], 0, wanted))
    np.testing.assert_allclose(lse, np.where(late[:, None], -np.inf, wanted_lse), 1e-5)


# Documents that are no sequences of their own for cuDNN. A bias hides the pairs between them.
HIDDEN = {
    "ids that are traced": (Segments(jnp.asarray(IDS)), {}),
    "no number of runs": (Segments(jnp.asarray(IDS), runs=True), {}),
    "ids that come again": (Segments(np.arange(T) % 3), {}),
    "two kinds": (Segments(IDS) & Documents(LENGTHS), {}),
    "traced positions": (Documents(LENGTHS), {"q_positions": jnp.arange(T)}),
    "other keys": (Documents(LENGTHS), {"q_positions": 3}),
    "a bias": (Documents(LENGTHS), {"bias": jnp.ones((T, T), jnp.bfloat16)}),
    "ampere": (Documents(LENGTHS), {"capability": (8, 0)}),
    "wide heads": (Documents(LENGTHS), {"H": 136}),
    "groups, before JAX 0.12": (Documents(LENGTHS), {"K": 2, "groups": False}),
}


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("name", HIDDEN)
def test_bias_hides_other_documents(nvidia, monkeypatch, name: str) -> None:
    mask, call = HIDDEN[name]
    call = {"capability": (9, 0), "groups": True, "H": 64, "K": 4} | call
    gpu = call.pop("capability"), (9, 20, 0)
    monkeypatch.setattr(primitives, "gpu", lambda platform: gpu)
    monkeypatch.setattr(cudnn, "PACKED_GROUPS", call.pop("groups"))
    features, heads = (call.pop(x) for x in "HK")
    rng = np.random.default_rng(0)
    sizes = [(B, T, n, features) for n in (N, heads, heads)]
    qkv = [jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in sizes]
    leaves, tree = jax.tree.flatten(call | {"mask": Causal() & mask})

    def both(kernel: str):
        @jax.jit
        def attend(traced):
            given = [traced.get(n, x) for n, x in enumerate(leaves)]
            return run(*qkv, kernel, **jax.tree.unflatten(tree, given))

        return attend({n: x for n, x in enumerate(leaves) if isinstance(x, jax.Array)})

    biases = []

    def forward(q, k, v, bias, *args, **settings):
        biases.append(bias.shape)
        return cudnn_model.forward(q, k, v, bias, *args, **settings)

    monkeypatch.setattr(primitives, "_dot_product_attention_fwd_impl", forward)
    jax.tree.map(close, both("cudnn"), both("reference"))
    assert {shape[-2:] for shape in biases} == {(T, T)}


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("given", ["traced", "known"])
def test_layer_may_restart_rotary_in_each_document(nvidia, given: str) -> None:
    """The layer's `positions` reach only rotary. Masks follow the order of tokens."""
    known = np.repeat(np.arange(4), LENGTHS[0]), np.concatenate([*map(np.arange, LENGTHS[0])])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, 32)), jnp.bfloat16)
    layer = MultiHeadAttention(4, rotary=Rotary(), dtype=jnp.bfloat16)
    variables = random_like(jax.eval_shape(layer.init, jax.random.key(0), x))

    def call(kernel: str, ids, positions):
        mask = Causal() & Segments(ids, runs=True, at_most=4)
        return layer.copy(kernel=kernel).apply(variables, x, mask=mask, positions=positions)

    def both(kernel: str):
        if given == "known":
            return jax.jit(lambda: call(kernel, *known))()
        return jax.jit(functools.partial(call, kernel))(*map(jnp.asarray, known))

    close(found := both("cudnn"), both("reference"))
    np.testing.assert_array_equal(both("auto"), found)  # `auto` makes the same call.


def test_one_known_run_per_row_skips_ragged_layout(hopper) -> None:
    """JAX would not recognize it as ragged."""
    *qkv, _ = arrays(T, T, 4, "bfloat16")
    text = lowered(lambda *x: run(*x, mask=Causal() & Segments(np.zeros(T, int)))[0], *qkv)
    assert {*segments(text)} == {"1"}


def segments(text: str) -> list[str]:
    return re.findall(r"max_seg_per_batch\\22: (\d+)", text)


def test_packed_documents_lower_to_ragged_calls(hopper) -> None:
    """One forward and one backward call, and no scores."""
    *qkv, _ = arrays(T, T, 4, "bfloat16")

    def loss(lengths, *qkv):
        return run(*qkv, mask=Causal() & Documents(lengths))[0].sum(dtype=jnp.float32)

    text = lowered(jax.grad(loss, (1, 2, 3)), jnp.array([[30, 10], [40, 0]]), *qkv)
    calls = re.findall(r"__cudnn\$(\w+)", text)
    assert calls == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    # Two documents, the tokens after them, and the tokens of runs beyond these.
    assert {*segments(text)} == {"4"}
    assert not re.search(rf"{T}x{T}x|stablehlo\.(while|case|if)\b", text)


@pytest.mark.sampled(0.08)
@GROUPS
def test_jax_converts_offsets_as_cudnn_counts_them() -> None:
    """In numbers from the start of all rows, with the heads of each array."""
    q, k = (jnp.zeros((2, 10, n, 8), jnp.bfloat16) for n in (4, 2))
    dims = Dims((2,), 10, 10, 4, 2, 8, 8)
    ids = Documents(np.array([[3, 7], [10, 0]])).bind(dims).resolve(whole(dims)).q.array
    runs = Runs(jnp.asarray(ids).reshape(2, 10), 3, rest=False)
    lengths, offsets = runs.lengths(jnp.array([10, 10])), runs.offsets()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = fused._fix_seqlen_offsets(lengths, lengths, offsets, offsets, q, k)
    tokens = np.array([0, 3, 10, 10, 20, 20])
    for x, heads in zip(found[2:], (4, 2), strict=True):
        np.testing.assert_array_equal(np.ravel(x)[:6], tokens * heads * 8)
    assert all(np.ravel(x).tolist() == [3, 7, 0, 10, 0, 0] for x in found[:2])
