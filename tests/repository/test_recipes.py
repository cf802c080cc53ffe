"""The pages of recipes run, and each system matches its definition."""

import contextlib
from collections import ChainMap
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import oracle, pages
from tests.support.oracle import error, float64

pytestmark = pytest.mark.slow

Scope = dict[str, Any]
PAGES = ("docs/recipes.md", "docs/scores.md", "docs/positions.md")
# Float32 rounds at 6e-8; the sums here have up to 512 terms.
OUTPUT = 5e-6


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Scope:
    """Return the variables that the code of the pages leaves."""
    # XLA compiles each threefry hash in seconds, and this generator in milliseconds.
    with jax.default_prng_impl("unsafe_rbg"), contextlib.chdir(tmp_path_factory.mktemp("pages")):
        return dict(ChainMap(*(pages.run(name) for name in PAGES)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def columns(kernel: Any) -> np.ndarray:
    """Return the layer's [D, N, H] as the plain matrix [D, N·H]."""
    return float64(kernel).reshape(len(kernel), -1)


def head_columns(head: int, heads: int, width: int) -> slice:
    return slice(head * width // heads, (head + 1) * width // heads)


def d2l(params: Any, queries: Any, keys: Any, valid_lens: np.ndarray) -> np.ndarray:
    """Compute section 11.5 of d2l.ai, row by row, head by head and query by query."""
    w_q, w_k, w_v = (columns(params[name]["kernel"]) for name in ("query", "key", "value"))
    w_o = float64(params["out"]["kernel"]).reshape(100, 100)
    B, T, _ = queries.shape
    valid_lens = np.broadcast_to(
        valid_lens[:, None] if valid_lens.ndim == 1 else valid_lens, (B, T)
    )
    concatenated = np.zeros((B, T, 100))
    for b in range(B):
        q, k, v = float64(queries[b]) @ w_q, float64(keys[b]) @ w_k, float64(keys[b]) @ w_v
        for h in range(5):
            part = head_columns(h, 5, 100)
            for t in range(T):
                scores = k[:, part] @ q[t, part] / np.sqrt(20)
                scores[valid_lens[b, t] :] = -1e6
                concatenated[b, t, part] = softmax(scores) @ v[:, part]
    return concatenated @ w_o


@pytest.mark.parametrize(
    ("output", "lens"), [("output", "valid_lens"), ("output_per_query", "per_query")]
)
def test_d2l_matches_its_definition(page: Scope, output: str, lens: str) -> None:
    params = page["params"]["params"]
    assert sorted(params) == ["key", "out", "query", "value"]
    assert all(set(leaves) == {"kernel"} for leaves in params.values())
    assert page[output].shape == (2, 4, 100)
    expected = d2l(params, page["queries"], page["keys"], np.asarray(page[lens]))
    assert error(page[output], expected) < OUTPUT


def vit(to_qkv: Any, out: Any, x: Any, heads: int) -> np.ndarray:
    """Compute chunk(to_qkv(x), 3), rearrange 'b n (h d) -> b h n d', softmax, back, to_out."""
    x = float64(x)
    q, k, v = np.split(x @ float64(to_qkv), 3, axis=-1)
    width = q.shape[-1]
    result = np.zeros_like(q)
    for h in range(heads):
        part = head_columns(h, heads, width)
        scores = q[..., part] @ k[..., part].swapaxes(1, 2) * (width // heads) ** -0.5
        result[..., part] = softmax(scores) @ v[..., part]
    if out is None:
        return result
    return result @ float64(out["kernel"]).reshape(width, -1) + float64(out["bias"])


def test_vit_matches_its_definition(page: Scope) -> None:
    x, params = page["image_tokens"], page["vit_params"]
    params = {**params, "out": oracle.random_like(params["out"])}  # with a nonzero bias
    assert set(params["query"]) == {"kernel"}
    actual = page["vit"].apply({"params": {"attention": params}}, x)
    assert error(actual, vit(page["to_qkv"], params["out"], x, 4)) < OUTPUT
    expected = vit(page["to_qkv"], page["vit_params"]["out"], x, 4)
    assert error(page["image_features"], expected) < OUTPUT


def test_vit_of_one_wide_head_has_no_projection(page: Scope) -> None:
    x = page["image_tokens"]
    to_qkv = np.random.default_rng(0).normal(size=(32, 96)).astype(np.float32) / 6
    params = page["split_to_qkv"](to_qkv, heads=1)
    module = page["ViTAttention"](heads=1, dim_head=32, dropout=0.5)
    shapes = jax.eval_shape(module.init, page["rng"], x)["params"]["attention"]
    assert shapes == jax.eval_shape(lambda: params)
    actual = module.apply({"params": {"attention": params}}, x)
    assert error(actual, vit(to_qkv, None, x, 1)) < OUTPUT


def test_vit_drops_after_its_projection(page: Scope) -> None:
    module = page["ViTAttention"](heads=4, dim_head=16, dropout=0.5)
    out = module.apply(
        {"params": {"attention": page["vit_params"]}}, page["image_tokens"], deterministic=False,
        rngs={"dropout": jax.random.key(0)},
    )  # fmt: skip
    assert 0.4 < np.mean(np.asarray(out) == 0) < 0.6


def by_heads(p: Any, x: np.ndarray) -> list[np.ndarray]:
    """Return queries, keys and values [B, N, T, H]."""
    return [oracle.project(p[name], x).swapaxes(1, 2) for name in ("query", "key", "value")]


def test_swin_matches_its_definition(page: Scope) -> None:
    """Pair by pair, on a window of 4 × 4."""
    p, x = float64(page["swin_params"]["params"]), float64(page["image_tokens"])
    q, k, v = by_heads(p["attention"], x)
    scores = q @ k.swapaxes(2, 3) / np.sqrt(8)
    assert p["table"].shape == (49, 4)
    table = p["table"].reshape(7, 7, 4)
    for i, j in np.ndindex(16, 16):
        (y, x_), (down, right) = divmod(i, 4), divmod(j, 4)
        scores[:, :, i, j] += table[y - down + 3, x_ - right + 3]
    out = oracle.project(p["attention"]["out"], (softmax(scores) @ v).swapaxes(1, 2), 2)
    assert error(page["swin_features"], out) < OUTPUT


@pytest.mark.parametrize("T", [16, 272])
def test_deberta_matches_equation_4(page: Scope, T: int) -> None:
    """At a length with one table of scores, and at one where kernels use tiles."""
    x = np.random.default_rng(0).normal(size=(2, T, 32)).astype(np.float32)
    p = oracle.random_like(page["deberta_params"]["params"])
    found = jax.jit(page["deberta"].apply)({"params": p}, x, page["distances"])
    p, relative = float64(p), float64(page["distances"])
    q, k, v = by_heads(p["attention"], float64(x))
    keys, queries = (
        np.einsum("rd,dnh->nrh", relative, p[name]["kernel"])
        for name in ("position_key", "position_query")
    )
    scores = q @ k.swapaxes(2, 3)
    distance = np.subtract.outer(np.arange(T), np.arange(T))
    delta = np.select([distance <= -5, distance >= 5], [0, 9], distance + 5)
    scores += oracle.einsum("bnih,nijh->bnij", q, keys[:, delta])
    scores += oracle.einsum("bnjh,nijh->bnij", k, queries[:, delta.T])
    weights = softmax(scores / np.sqrt(3 * 8))
    out = oracle.project(p["attention"]["out"], (weights @ v).swapaxes(1, 2), 2)
    assert error(found, out) < OUTPUT
    assert page["deberta_features"].shape == (2, 16, 32)


def test_chosen_blocks_match_their_definition(page: Scope) -> None:
    q, k = float64(page["long_queries"]), float64(page["long_keys"])
    allowed = np.zeros((2, 4, 20, 20), bool)
    for b, n, i in np.ndindex(2, 4, 20):
        own = i // 4
        means = k[b, : 4 * own, n // 2].reshape(own, 4, 8).mean(1)
        heads = (q[b, i, m] @ means.T / np.sqrt(8) for m in (n // 2 * 2, n // 2 * 2 + 1))
        weight = sum(softmax(scores) for scores in heads) if own else np.zeros(0)
        best = 1 + np.argsort(-weight[1:])[:1]
        for c in {0, own, *best.tolist()}:
            allowed[b, n, i, 4 * c : 4 * c + 4] = True
    out, _, _ = oracle.attention(q, k, k, allowed=allowed & np.tri(20, dtype=bool))
    assert error(page["selected_output"], out) < OUTPUT
    assert page["moba_output"].shape == (2, 20, 64)


def test_indexer_chooses_its_best_tokens(page: Scope) -> None:
    x = np.random.default_rng(1).normal(size=(2, 20, 64)).astype(np.float32)
    p = oracle.random_like(page["sparse_variables"]["params"])
    # Positive matmuls: among scores of 0 there would be no best.
    for name in ("index_query", "index_key"):
        p[name] = {"kernel": p[name]["kernel"] / 10, "bias": p[name]["bias"] / 10 + 0.5}
    sparse = page["sparse"]

    @jax.jit
    def both(p: Any) -> Any:
        out, found = sparse.apply({"params": p}, x, mutable=["losses"])
        return found["losses"]["indexer"][0], out

    (loss, out), slopes = jax.value_and_grad(both, has_aux=True)(p)
    q, k, w = (oracle.project(p[f"index_{name}"], x) for name in ("query", "key", "weight"))
    index = np.einsum("btn,btns->bts", w, np.maximum(np.einsum("btnh,bsh->btns", q, k), 0))
    chosen = np.zeros((2, 20, 20), bool)
    for b, i in np.ndindex(2, 20):
        chosen[b, i, [i, *np.argsort(-index[b, i, :i])[:5]]] = True
    expected, weights = oracle.multi_head(p, x, allowed=chosen[:, None])
    assert error(out, expected) < OUTPUT
    logits = np.where(chosen, index, -np.inf)
    gap = -(weights.mean(1)[chosen] * np.log(softmax(logits)[chosen])).sum() / 40
    np.testing.assert_allclose(loss, gap, rtol=1e-4)
    # Only the indexer has the loss and its gradient.
    for name, tree in slopes.items():
        moved = any(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(tree))
        assert moved == name.startswith("index_"), name


def test_model_options_change_the_output(page: Scope) -> None:
    """Each layer's output differs from the others'."""
    x, key = page["decoder_x"], jax.random.key(0)
    params = oracle.random_like(jax.eval_shape(page["qwen3_next"].init, key, x))
    plain = {name: p for name, p in params["params"].items() if name != "output_gate"}
    gated = jax.jit(page["qwen3_next"].apply)(params, x)
    assert np.abs(gated - jax.jit(page["qwen3"].apply)({"params": plain}, x)).max() > 1e-3
    assert "relative_bias" in jax.eval_shape(page["t5"].init, key, x)["params"]


def test_packed_images_have_the_features_that_they_have_alone(page: Scope) -> None:
    image, places, patches = page["image"], page["places"], page["patches"]
    for n, (rows, columns) in enumerate(page["sizes"]):
        own = image == n
        assert places[own].max(0).tolist() == [rows - 1, columns - 1]
        alone = page["images"].apply(page["image_params"], patches[:, own], positions=places[own])
        assert error(page["packed"][:, own], float64(alone)) < OUTPUT
