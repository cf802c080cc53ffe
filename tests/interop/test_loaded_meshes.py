"""Folders loaded onto a mesh: the model's outputs, and the folder saved from it."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import generate, interop, sharding
from flax_mha.models import LanguageModel
from tests.interop.test_published_checkpoints import BERT
from tests.support.arrays import random_variables
from tests.support.meshes import FORWARD, changed, on
from tests.support.oracle import error

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 3
}  # fmt: skip
FSDP = changed(embed="data")
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "llama": (LLAMA, FSDP),
    "gpt-oss": (GPT_OSS, changed(experts="model", mlp=None, embed="data")),
    # Its table of two segments cannot be sharded over four devices.
    "bert": (
        BERT | {"hidden_size": 32, "num_attention_heads": 8}, changed(embed="data", vocab=None)
    ),
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 24, (4, 6))


def results(module: nn.Module, variables: Any) -> tuple[Any, Any]:
    """Return the output, and the tokens that a language model generates."""
    out = jax.jit(module.apply)(variables, TOKENS)
    if not isinstance(module, LanguageModel):
        return out, None
    return out, generate(module, variables, jnp.asarray(TOKENS), max_new_tokens=5).tokens


# One of them on both kinds of mesh, the others on one each.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "Auto"), ("llama", "Explicit"), ("gpt-oss", "Explicit"), ("bert", "Auto")],
)
def test_load_run_and_save_on_mesh(name: str, kind: str, tmp_path: Path) -> None:
    config, rules = CASES[name]
    family = interop.family(config)
    interop.save(config, random_variables(family.module, *family.example), tmp_path / "theirs")
    module, variables = interop.load(tmp_path / "theirs")
    expected, written = results(module, variables)
    with on(kind, rules) as mesh:
        places = sharding.of(module.init, jax.random.key(0), *family.example)
        _, spread = interop.load(tmp_path / "theirs", shardings=places)
        actual, tokens = jax.device_get(results(module, spread))
        interop.save(config, spread, tmp_path / "ours")
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(spread))
    assert held < sum(x.nbytes for x in jax.tree.leaves(variables)) / (mesh.size / 2)
    assert error(actual, expected) < FORWARD
    np.testing.assert_array_equal(tokens, written)
    file = "model.safetensors"
    assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
