"""Loaded models without some heads, against `transformers` with zeros in their output layers."""

import tempfile
from typing import Any

import jax
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
pytest.importorskip("transformers", reason="needs the extra families")

from flax_mha import interop  # noqa: E402
from flax_mha.analysis import prune  # noqa: E402
from tests.interop.families import CASES, make  # noqa: E402
from tests.support.oracle import error  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
# For each family: the paths of its layers by number, and the heads to remove by layer.
HEADS: dict[str, tuple[str, dict[int, tuple[int, ...]]]] = {
    "bert": ("encoder/layers_{}/attention", {0: (1,), 2: (0, 3)}),
    "gpt2": ("decoder/layers_{}/attention", {1: (0, 2)}),
    "llama": ("decoder/layers_{}/attention", {0: (1, 2), 1: (2, 3)}),
    "t5": ("encoder/layers_{}/attention", {0: (1, 2), 1: (1, 2)}),
}


def output_layer(family: str, model: Any, i: int) -> Any:
    """Return a torch layer's weight, with the heads' features last."""
    if family == "bert":
        return model.encoder.layer[i].attention.output.dense.weight
    if family == "gpt2":
        return model.transformer.h[i].attn.c_proj.weight.T
    if family == "llama":
        return model.model.layers[i].self_attn.o_proj.weight
    return model.encoder.block[i].layer[0].SelfAttention.o.weight


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("family", HEADS)
def test_a_loaded_model_loses_heads(family: str) -> None:
    case, (path, heads) = CASES[family], HEADS[family]
    theirs = make(case)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        model, variables = interop.load(folder)
    small, fewer = prune(model, variables, {path.format(i): x for i, x in heads.items()})
    with torch.no_grad():
        for i, removed in heads.items():
            weight = output_layer(family, theirs, i)
            for head in removed:
                weight.unflatten(-1, (4, -1))[:, head] = 0
        given = {name: torch.tensor(x) for name, x in case.given.items()}
        want = theirs(**given)[0].numpy()
    got = jax.jit(small.apply)(fewer, *case.ours)
    assert error(got, want) < 1e-5
    assert error(got, jax.jit(model.apply)(variables, *case.ours)) > 1e-3
