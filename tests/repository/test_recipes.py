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


@pytest.mark.parametrize(
    ("output", "lens"), [("output", "valid_lens"), ("output_per_query", "per_query")]
)
def test_d2l_matches_section_11_5(page: Scope, output: str, lens: str) -> None:
    keys = float64(page["keys"])
    lengths = np.asarray(page[lens]).reshape(2, 1, -1, 1)  # of each row, or of each query
    wanted, _ = oracle.multi_head(
        page["params"]["params"], float64(page["queries"]), keys,
        allowed=np.arange(keys.shape[1]) < lengths,
    )  # fmt: skip
    assert error(page[output], wanted) < OUTPUT


def test_vit_matches_its_definition(page: Scope) -> None:
    """chunk(to_qkv(x), 3), rearrange 'b n (h d) -> b h n d', attention, to_out."""
    x = page["image_tokens"]
    out = oracle.random_like(page["vit_params"]["out"])  # with a nonzero bias
    kernels = np.split(np.asarray(page["to_qkv"]), 3, axis=1)
    params: Any = {
        name: {"kernel": kernel.reshape(len(kernel), 4, -1)}
        for name, kernel in zip(("query", "key", "value"), kernels, strict=True)
    }
    wanted, _ = oracle.multi_head(params | {"out": out}, float64(x))
    params = {"attention": {**page["vit_params"], "out": out}}
    assert error(page["vit"].apply({"params": params}, x), wanted) < OUTPUT


def test_swin_matches_its_definition(page: Scope) -> None:
    """Pair by pair, on a window of 4 × 4."""
    params, bias = page["swin_params"]["params"], np.zeros((4, 16, 16))
    table = float64(params["table"]).reshape(7, 7, 4)
    for i, j in np.ndindex(16, 16):
        (y, x), (down, right) = divmod(i, 4), divmod(j, 4)
        bias[:, i, j] = table[y - down + 3, x - right + 3]
    tokens = float64(page["image_tokens"])
    wanted, _ = oracle.multi_head(params["attention"], tokens, bias=bias)
    assert error(page["swin_features"], wanted) < OUTPUT


@pytest.mark.parametrize("T", [16, 272])
def test_deberta_matches_equation_4(page: Scope, T: int) -> None:
    """At a length with one table of scores, and at one where kernels use tiles."""
    x = np.random.default_rng(0).normal(size=(2, T, 32)).astype(np.float32)
    params = oracle.random_like(page["deberta_params"]["params"])
    out = jax.jit(page["deberta"].apply)({"params": params}, x, page["distances"])
    p, relative = float64(params["attention"]), float64(page["distances"])
    q, k = (oracle.project(p[name], float64(x)) for name in ("query", "key"))
    keys, queries = (
        np.einsum("rd,dnh->nrh", relative, float64(params[name]["kernel"]))
        for name in ("position_key", "position_query")
    )
    distance = np.subtract.outer(np.arange(T), np.arange(T))
    delta = np.select([distance <= -5, distance >= 5], [0, 9], distance + 5)
    bias = oracle.einsum("binh,nijh->bnij", q, keys[:, delta])
    bias += oracle.einsum("bjnh,nijh->bnij", k, queries[:, delta.T])
    scale = 1 / np.sqrt(3 * 8)
    wanted, _ = oracle.multi_head(p, float64(x), bias=scale * bias, scale=scale)
    assert error(out, wanted) < OUTPUT


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
    wanted, _, _ = oracle.attention(q, k, k, allowed=allowed & np.tri(20, dtype=bool))
    assert error(page["selected_output"], wanted) < OUTPUT


def test_indexer_chooses_its_best_tokens(page: Scope) -> None:
    """Only the indexer has the loss and its gradient."""
    x = np.random.default_rng(1).normal(size=(2, 20, 64)).astype(np.float32)
    p = oracle.random_like(page["sparse_variables"]["params"])
    # Positive matmuls: among scores of 0 there would be no best.
    for name in ("index_query", "index_key"):
        p[name] = {"kernel": p[name]["kernel"] / 10, "bias": p[name]["bias"] / 10 + 0.5}

    @jax.jit
    def loss_and_output(p: Any) -> Any:
        out, sown = page["sparse"].apply({"params": p}, x, mutable=["losses"])
        return sown["losses"]["indexer"][0], out

    (loss, out), slopes = jax.value_and_grad(loss_and_output, has_aux=True)(p)
    q, k, w = (oracle.project(p[f"index_{name}"], x) for name in ("query", "key", "weight"))
    index = np.einsum("btn,btns->bts", w, np.maximum(np.einsum("btnh,bsh->btns", q, k), 0))
    chosen = np.zeros((2, 20, 20), bool)
    for b, i in np.ndindex(2, 20):
        chosen[b, i, [i, *np.argsort(-index[b, i, :i])[:5]]] = True
    wanted, weights = oracle.multi_head(p, x, allowed=chosen[:, None])
    assert error(out, wanted) < OUTPUT
    logits = np.where(chosen, index, -np.inf)
    gap = -(weights.mean(1)[chosen] * np.log(softmax(logits)[chosen])).sum() / 40
    np.testing.assert_allclose(loss, gap, rtol=1e-4)
    for name, tree in slopes.items():
        moved = any(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(tree))
        assert moved == name.startswith("index_"), name


def test_packed_images_have_the_features_that_they_have_alone(page: Scope) -> None:
    image, places, patches = page["image"], page["places"], page["patches"]
    for n, (rows, columns) in enumerate(page["sizes"]):
        own = image == n
        assert places[own].max(0).tolist() == [rows - 1, columns - 1]
        alone = page["images"].apply(page["image_params"], patches[:, own], positions=places[own])
        assert error(page["packed"][:, own], float64(alone)) < OUTPUT
