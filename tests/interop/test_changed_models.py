"""Edits and removed heads of loaded models, against hooks and zeros in `transformers`."""

from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
pytest.importorskip("transformers", reason="needs the extra families")

from flax_mha import edits  # noqa: E402
from flax_mha.analysis import prune  # noqa: E402
from flax_mha.edits import Edit  # noqa: E402
from tests.interop.families import CASES, make, pair, run  # noqa: E402
from tests.support.oracle import error  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BLOCK = "decoder/layers_1/"


def edited(edit: Edit, x: Any) -> Any:
    """Return keep·x + add in torch, for x reshaped to the heads of the edit."""
    keep, add = (torch.tensor(np.asarray(y), dtype=x.dtype) for y in (edit.keep, edit.add))
    return (keep * x.reshape(*x.shape[:2], *keep.shape[1:]) + add).reshape(x.shape)


def hook_inputs(module: Any, edit: Edit) -> Any:
    def hook(_: Any, inputs: Any) -> Any:
        return (edited(edit, inputs[0]), *inputs[1:])

    return module.register_forward_pre_hook(hook)


def hook_outputs(module: Any, edit: Edit, part: int | None = None) -> Any:
    """Edit a module's output, or one of three parts of it."""

    def hook(_: Any, inputs: Any, out: Any) -> Any:
        x, *more = out if isinstance(out, tuple) else (out,)
        parts = [x] if part is None else list(x.chunk(3, -1))
        parts[part or 0] = edited(edit, parts[part or 0])
        x = torch.cat(parts, -1)
        return (x, *more) if isinstance(out, tuple) else x

    return module.register_forward_hook(hook)


def places(family: str, model: Any) -> dict[str, tuple[Any, ...]]:
    """Return for each point the function that hooks it, the module, and the part of its output."""
    is_gpt = family == "gpt2"
    layer = model.transformer.h[1] if is_gpt else model.model.layers[1]
    attention = layer.attn if is_gpt else layer.self_attn
    shared = {
        "resid_pre": (hook_inputs, layer), "resid_post": (hook_outputs, layer),
        "mlp_out": (hook_outputs, layer.mlp), "attention/attention_out": (hook_outputs, attention),
    }  # fmt: skip
    if is_gpt:
        qkv = {
            f"attention/attention_{name}": (hook_outputs, attention.c_attn, part)
            for part, name in enumerate("qkv")
        }
        z = {"attention/attention_z": (hook_inputs, attention.c_proj)}
        return shared | qkv | z | {"mlp/mlp_pre": (hook_outputs, layer.mlp.c_fc)}
    return shared | {
        "attention/attention_v": (hook_outputs, attention.v_proj),
        "attention/attention_z": (hook_inputs, attention.o_proj),
        "mlp/mlp_pre": (hook_outputs, layer.mlp.gate_proj),
    }


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_edits_are_hooks_of_torch(family: str) -> None:
    """All points at once, and each changes the output."""
    _, model, variables = pair(family)
    theirs, case, rng = make(CASES[family]), CASES[family], np.random.default_rng(0)
    known = edits.names(model, variables, *case.ours)
    every, before = {}, run(theirs, case.given).logits.numpy()
    for name, (hook, *module) in places(family, theirs).items():
        shape = known[BLOCK + name].shape[1:]
        noise = rng.normal(size=(2, *shape)).astype(np.float32)
        every[BLOCK + name] = edit = Edit(1 + 0.3 * noise[0], noise[1])
        hook(module[0], edit, *module[1:])
        after = run(theirs, case.given).logits.numpy()
        assert error(after, before) > 1e-3, name
        before = after
    attached = edits.attach(model, variables, every, *case.ours)
    assert error(jax.jit(model.apply)(attached, *case.ours), after) < 1e-5


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


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("family", HEADS)
def test_a_loaded_model_loses_heads(family: str) -> None:
    _, model, variables = pair(family)
    theirs, case, (path, heads) = make(CASES[family]), CASES[family], HEADS[family]
    small, fewer = prune(model, variables, {path.format(i): x for i, x in heads.items()})
    whole = run(theirs, case.given)[0].numpy()
    with torch.no_grad():
        for i, removed in heads.items():
            weight = output_layer(family, theirs, i)
            for head in removed:
                weight.unflatten(-1, (4, -1))[:, head] = 0
    want = run(theirs, case.given)[0].numpy()
    assert error(whole, want) > 1e-3
    assert error(jax.jit(small.apply)(fewer, *case.ours), want) < 1e-5
