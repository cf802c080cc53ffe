"""Edits of loaded models against `transformers`, changed by forward hooks of torch."""

import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
pytest.importorskip("transformers", reason="needs the extra families")

from flax_mha import edits, interop  # noqa: E402
from flax_mha.edits import Edit  # noqa: E402
from tests.interop.families import CASES, make  # noqa: E402
from tests.support.oracle import error  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
RNG = np.random.default_rng(0)
BLOCK = "decoder/layers_1/"


def changed(edit: Edit, x: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Return keep·x + add in torch, for x reshaped to heads if a shape is given."""
    keep, add = (torch.tensor(np.asarray(y), dtype=x.dtype) for y in (edit.keep, edit.add))
    heads = x if shape is None else x.reshape(*x.shape[:-1], *shape)
    return (keep * heads + add).reshape(x.shape)


def hooks(family: str, model: Any, edit: Edit, N: int, K: int, H: int) -> dict[str, Callable]:
    """Return for each point a function that hooks the torch model."""
    gpt = family == "gpt2"
    layer = model.transformer.h[1] if gpt else model.model.layers[1]
    attention = layer.attn if gpt else layer.self_attn

    def on_input(module: Any, shape: Any = None) -> Callable:
        def hook(_: Any, inputs: Any) -> Any:
            return (changed(edit, inputs[0], shape), *inputs[1:])

        return lambda: module.register_forward_pre_hook(hook)

    def on_output(module: Any, shape: Any = None, part: int | None = None) -> Callable:
        def hook(_: Any, inputs: Any, out: Any) -> Any:
            x, *rest = out if isinstance(out, tuple) else (out,)
            if part is None:
                x = changed(edit, x, shape)
            else:
                parts = list(x.chunk(3, -1))
                parts[part] = changed(edit, parts[part], shape)
                x = torch.cat(parts, -1)
            return (x, *rest) if isinstance(out, tuple) else x

        return lambda: module.register_forward_hook(hook)

    found = {
        "resid_pre": on_input(layer), "resid_post": on_output(layer),
        "mlp_out": on_output(layer.mlp), "attention/attention_out": on_output(attention),
        "attention/attention_z": on_input(attention.c_proj if gpt else attention.o_proj, (N, H)),
    }  # fmt: skip
    if gpt:
        for part, name in enumerate("qkv"):
            found[f"attention/attention_{name}"] = on_output(attention.c_attn, (N, H), part)
        found["mlp/mlp_pre"] = on_output(layer.mlp.c_fc)
    else:
        found["attention/attention_v"] = on_output(attention.v_proj, (K, H))
        found["mlp/mlp_pre"] = on_output(layer.mlp.gate_proj)
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_edits_are_hooks_of_torch(family: str) -> None:
    theirs = make(CASES[family])
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        model, variables = interop.load(folder)
    ours, given = CASES[family].ours, CASES[family].given
    known = edits.names(model, variables, *ours)
    z, k = (known[f"{BLOCK}attention/attention_{name}"].shape for name in "zk")
    sizes = (z[-2], k[-2], z[-1])
    for name in hooks(family, theirs, Edit(), *sizes):
        shape = known[BLOCK + name].shape
        edit = Edit(*(RNG.normal(size=shape[1:]).astype(np.float32) for _ in range(2)))
        handle = hooks(family, theirs, edit, *sizes)[name]()
        with torch.no_grad():
            want = theirs(**{key: torch.tensor(x) for key, x in given.items()}).logits.numpy()
        handle.remove()
        attached = edits.attach(model, variables, {BLOCK + name: edit}, *ours)
        got = jax.jit(model.apply)(attached, *ours)
        assert error(got, want) < 1e-5, name
        assert error(got, model.apply(variables, *ours)) > 1e-3, name
