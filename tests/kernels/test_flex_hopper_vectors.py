"""Scores that see vectors in flax_mha's own kernel for Hopper, in Pallas' interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flax_mha.masks import Causal
from flax_mha.scores import Relative, Score, SoftCap, TransformerXL
from tests.kernels.test_flex_hopper import (
    arrays,
    close,
    explained,
    learned,
    needs_mosaic,
    pulled,
)


def gates(s: Any, row: Any, head: Any, i: Any, j: Any, q: Any, k: Any, w: Any, u: Any) -> Any:
    """Turn scores by a gate of the query, and add a number of the key and its position."""
    head, i, j = (x.astype(s.dtype) for x in (head, i, j))
    of_key = jnp.swapaxes(k @ u, -1, -2) * (1 + jnp.sin(j))
    return s * jax.nn.sigmoid(q @ w + head + i / 100) + of_key


def disentangled(s: Any, row: Any, head: Any, i: Any, j: Any, q: Any, k: Any, *tables: Any) -> Any:
    """Add content to position and position to content, as in DeBERTa."""

    def looked_up(x: Any, table: Any, distance: Any) -> Any:
        by_distance = jnp.einsum("...th,...rh->...tr", x, table[head[..., 0, 0]])
        return jnp.take_along_axis(by_distance, jnp.clip(distance + 3, 0, 5), -1)

    keys, queries = tables
    to_content = looked_up(k, queries, (j - i).swapaxes(-1, -2)).swapaxes(-1, -2)
    return s + looked_up(q, keys, i - j) + 0.5 * to_content


# Scores as functions of learned arrays, the arrays' shapes, and other arguments.
CALLS: dict[str, tuple[Any, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "few": (lambda x: (Relative(x["t"]), SoftCap(3.0)), {"t": (5, 8)}, {}),
    "many": (lambda x: (SoftCap(3.0), Relative(x["t"])), {"t": (19, 8)}, {"mask": Causal()}),
    "heads": (lambda x: (Relative(x["t"]),), {"t": (2, 5, 8)}, {"mask": Causal()}),
    "gates": (
        lambda x: (Score(gates, (x["w"], x["u"]), vectors=True), Relative(x["t"])),
        {"w": (8, 1), "u": (8, 1), "t": (3, 8)}, {"q_positions": 70, "mask": Causal()},
    ),
    "disentangled": (
        lambda x: (Score(disentangled, (x["keys"], x["queries"]), vectors=True),),
        {"keys": (2, 6, 8), "queries": (2, 6, 8)}, {"mask": Causal()},
    ),
}  # fmt: skip


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize(
    ("name", "lengths"),
    [*((name, (60, 140)) for name in CALLS), ("gates", (1, 40)), ("gates", (40, 1))],
)
def test_scores_of_vectors_match_reference_on_hopper(
    hopper_memory, name: str, lengths: tuple[int, int]
) -> None:
    """Out, lse and the gradients of q, k, v and the learned arrays."""
    scores, shapes, given = CALLS[name]
    args = lambda x: {"scores": scores(x), **given}, arrays(*lengths, 8, 8), learned(**shapes)
    close(pulled("flex", *args), pulled("reference", *args), 2**-6)


def product(s: Any, row: Any, head: Any, i: Any, j: Any, q: Any, k: Any) -> Any:
    """Add a product of vectors."""
    return s + jnp.einsum("...th,...sh->...ts", jnp.sin(q), k)


def differences(s: Any, row: Any, head: Any, i: Any, j: Any, q: Any, k: Any) -> Any:
    """Subtract a distance of vectors, of which the kernel would need all numbers."""
    return s - jnp.abs(q[..., :, None, :] - k[..., None, :, :]).sum(-1)


TRANSFORMER_XL = TransformerXL(jnp.ones((2, 64)), jnp.ones((2, 64)), jnp.ones((8, 2, 64)))


@needs_mosaic
@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (Relative(jnp.ones((3, 64))), None),
        (Relative(jnp.ones((2, 3, 64))), None),
        (Score(disentangled, (jnp.ones((2, 6, 64)), jnp.ones((2, 6, 64))), vectors=True), None),
        (Score(product, vectors=True), "has no matmuls in scores"),
        (TRANSFORMER_XL, "has no matmuls in scores"),
        (Relative(jnp.ones((301, 64))), "gather from 301 entries, of more than 256"),
        (Score(differences, vectors=True), "more than numbers"),
    ],
)
def test_flex_on_hopper_takes_scores_of_numbers(score: Any, reason: str | None) -> None:
    refused = explained("flex", scores=(score,)).refused
    assert ("flex" in refused) == (reason is not None)
    assert reason is None or reason in refused["flex"]
