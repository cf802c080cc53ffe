"""Heads are removed from layers that are made in calls, of this library or swapped."""

import functools
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from flax_mha import analysis, edits, interop
from tests.analysis.watched_models import PATHS, InSetup, Made, Scanned
from tests.support import oracle

TOKENS = np.random.default_rng(0).integers(0, 9, (2, 5))
REMOVED = {
    Made: {"MultiHeadDotProductAttention_0": (1,), "second": (0, 2)},
    InSetup: {"layers_0": (0,), "layers_1": (1, 2, 3)},
    Scanned: {"layer": (1,)},
}


def without(removed: Any, heads: int) -> Any:
    """Return the edit of the heads' outputs with 0 for those that are removed."""
    keep = np.ones((heads, 1), np.float32)
    keep[[*removed]] = 0
    return edits.Edit(keep=keep)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["own", "swapped"])
@pytest.mark.parametrize("kind", REMOVED, ids=lambda kind: kind.__name__)
def test_layers_made_in_calls_lose_heads(kind: Any, way: str) -> None:
    """Outputs and gradients of the inputs' embedding are those of edits that hide the heads."""
    plain = kind(nn.MultiHeadDotProductAttention)
    model = kind() if way == "own" else interop.swap(plain)
    values = oracle.random_like(jax.eval_shape(plain.init, jax.random.key(0), TOKENS))
    flat = flatten_dict(values["params"], sep="/")
    counts = {path: flat[f"{path}/query/kernel"].shape[-2] for path in PATHS[kind]}
    hidden = {f"{path}/attention_z": without(x, counts[path]) for path, x in REMOVED[kind].items()}
    if kind is Scanned:
        hidden = {path: dict.fromkeys(range(2), edit) for path, edit in hidden.items()}
    edited = edits.attach(model, values, hidden, TOKENS)
    small, fewer = analysis.prune(model, values, REMOVED[kind], TOKENS)
    assert sum(x.size for x in jax.tree.leaves(fewer)) < sum(x.size for x in flat.values())
    wanted = jax.jit(model.apply)(edited, TOKENS)
    np.testing.assert_allclose(jax.jit(small.apply)(fewer, TOKENS), wanted, atol=1e-5)
    # A pruned model is one like any other.
    shapes = functools.partial(jax.tree.map, np.shape)
    assert shapes(jax.eval_shape(small.init, jax.random.key(0), TOKENS)) == shapes(fewer)
    np.testing.assert_allclose(jax.jit(model.apply)(edited, TOKENS), wanted, atol=1e-6)


def test_layers_made_in_calls_need_inputs() -> None:
    values = jax.eval_shape(InSetup().init, jax.random.key(0), TOKENS)
    with pytest.raises(ValueError, match=r"got 'layers_0'; .* its inputs too: prune"):
        analysis.prune(InSetup(), values, {"layers_0": (1,)})
    with pytest.raises(ValueError, match=r"got 'layer_0'; give 'layers_0' or 'layers_1' \(of 2"):
        analysis.prune(InSetup(), values, {"layer_0": (1,)}, TOKENS)
