"""Files of llama.cpp, which the package gguf writes: the same numbers as the model's own."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import interop
from flax_mha.interop.table import to_tensors
from tests.support.arrays import random_variables
from tests.support.oracle import error

gguf = pytest.importorskip("gguf", reason="needs the extra files")
TOKENS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int32)
# Q8_0 has blocks of 32 features, and the file float32 numbers.
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8,
    "hidden_act": "silu", "rms_norm_eps": 2.0**-17, "rope_theta": 5e5,
    "max_position_embeddings": 64,    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.": "blk.", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
KEYS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim", "value_length": "head_dim", "rope_dimension_count": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps", "rope_freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}  # fmt: skip


def model_of(config: dict[str, Any]) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Return a module, random variables and their tensors."""
    family = interop.family(config)
    variables = random_variables(family.module, *family.example)
    return family.module, variables, to_tensors(family, variables)


def stored(x: np.ndarray, kind: str) -> np.ndarray:
    """Return an array as it is read back from a type of tensors."""
    if x.ndim < 2:
        return x
    kind = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)


def write(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], kind: str, **more: Any
) -> Path:
    """Write a file as llama.cpp's converter does, with matrices of one type."""
    architecture = config["model_type"]
    file = gguf.GGUFWriter(path, architecture)
    for name, key in KEYS.items():
        getattr(file, f"add_{name}")(config[key])
    file.add_token_list([f"w{i}" for i in range(config["vocab_size"])])
    for name, value in more.items():
        getattr(file, name)(*value) if isinstance(value, tuple) else getattr(file, name)(value)
    for name, x in tensors.items():
        for theirs, ours in NAMES.items():
            name = name.replace(f"{theirs}.", f"{ours}.").replace(theirs, ours)
        if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = config["num_attention_heads" if "q" in name else "num_key_value_heads"]
            # Partners in the two halves of a head become neighbors.
            parts = x.reshape(heads, 2, -1, *x.shape[1:])
            x = np.stack([parts[:, 0], parts[:, 1]], 2).reshape(x.shape)
        x = np.ascontiguousarray(x)
        raw = gguf.GGMLQuantizationType[kind if x.ndim == 2 else "F32"]
        file.add_tensor(name, gguf.quants.quantize(x, raw), raw_dtype=raw)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_files_hold_the_model(kind: str, tmp_path: Path) -> None:
    config = LLAMA | {"attention_bias": True}
    module, _, tensors = model_of(config)
    path = write(tmp_path / "a.gguf", config, tensors, kind)
    found, variables = interop.load(path)
    assert found == module
    dtypes = {"F16": "float16", "BF16": "bfloat16"}
    assert variables["params"]["embedding"]["table"]["embedding"].dtype == dtypes.get(
        kind, "float32"
    )
    want = interop.table.from_tensors(
        interop.family(config), {name: stored(x, kind) for name, x in tensors.items()}
    )
    jax.tree.map(np.testing.assert_array_equal, variables, want)


# transformers 5.24 reads no head_dim for Qwen3.
QWEN3 = LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 128}
MODELS = {
    "llama": LLAMA, "qwen3": QWEN3,
    "qwen2": {name: x for name, x in QWEN3.items() if name != "attention_bias"}
    | {"model_type": "qwen2", "head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_files_match_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra families")
    pytest.importorskip("accelerate", reason="needs the extra families")
    transformers = pytest.importorskip("transformers", reason="needs the extra families")
    module, variables, tensors = model_of(MODELS[name])
    write(tmp_path / "a.gguf", MODELS[name], tensors, "F32")
    found = interop.load(tmp_path / "a.gguf")
    assert found[0] == module
    jax.tree.map(np.testing.assert_array_equal, found[1], variables)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf").eval()
    with torch.no_grad():
        want = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert error(jax.jit(module.apply)(found[1], TOKENS), want) < 5e-6


def test_scaled_rotations_are_read(tmp_path: Path) -> None:
    """Linear ones from the metadata, Llama 3's from the tensor of factors."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 300,
    }  # fmt: skip
    # Meta's formula, by wavelengths in tokens.
    lengths = 2 * np.pi * LLAMA["rope_theta"] ** (np.arange(0, 8, 2) / 8)
    share = np.clip((300 / lengths - 1) / (4 - 1), 0, 1)
    factors = (1 / (share + (1 - share) / 8)).astype(np.float32)
    assert factors[0] == 1 < factors[1] < factors[2] == factors[3] == 8
    module, variables, tensors = model_of(LLAMA | {"rope_scaling": scaling})
    path = write(tmp_path / "a.gguf", LLAMA, tensors | {"rope_freqs.weight": factors}, "F32")
    found = interop.load(path)
    jax.tree.map(np.testing.assert_array_equal, found[1], variables)
    tokens = np.arange(40)[None]
    want = jax.jit(module.apply)(variables, tokens)
    assert error(jax.jit(found[0].apply)(variables, tokens), want) < 5e-6
    linear = LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    kind = gguf.RopeScalingType.LINEAR
    path = write(
        path, LLAMA, tensors, "F32", add_rope_scaling_type=kind, add_rope_scaling_factor=4.0
    )
    assert interop.load(path)[0] == interop.family(linear).module


def test_other_files_raise(tmp_path: Path) -> None:
    path, (_, _, tensors) = tmp_path / "a.gguf", model_of(LLAMA)

    def refused(told: str, kind: str = "F32", config: Any = LLAMA, **more: Any) -> None:
        write(path, config, tensors, kind, **more)
        with pytest.raises(ValueError, match=told):
            interop.load(path)

    refused("must have tensors of F32, F16, BF16, Q8_0, got Q4_0; take", "Q4_0")
    refused("architecture of llama, .* got 'gemma'", config=LLAMA | {"model_type": "gemma"})
    refused("one file .* got 'llama' in parts; join", add_uint16=("split.count", 2))
    refused(r"got llama\.expert_count=4", add_expert_count=4)
    yarn = gguf.RopeScalingType.YARN
    refused(r"got llama\.rope\.scaling\.type='yarn'", add_rope_scaling_type=yarn)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.extra.weight"] = np.ones((32, 32), np.float32)
    refused(r"surplus model\.layers\.0\.extra\.weight; missing model\.norm\.weight")
    del tensors["model.embed_tokens.weight"]
    refused("must be a whole model, got none of 'model.embed_tokens.weight'")
    path.write_bytes(path.read_bytes()[:-999])
    with pytest.raises(ValueError, match=r"a\.gguf must be a complete GGUF file, got"):
        interop.load(path)
    with pytest.raises(FileNotFoundError):
        interop.load(tmp_path / "none.gguf")
