"""Llama-like models in files of llama.cpp (GGUF), as configs and tensors of transformers.

Source: https://github.com/ggml-org/ggml, docs/gguf.md; the permutation of queries and keys is that
of llama.cpp's convert_hf_to_gguf.py.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# Architectures with the tensors of Llama, which transformers gives the same names.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_SETTINGS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta", "vocab_size": "vocab_size",
}  # fmt: skip
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TYPES = ("F32", "F16", "BF16", "Q8_0")


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the config and the tensors of a file, Q8_0 as float32.

    Raises:
      ValueError: if the architecture or a tensor's type is not supported, or the file is damaged.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        kind = reader.fields["general.architecture"].contents()
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(
            f"{path} must be a complete GGUF file, got: {error}; fetch it again"
        ) from None
    in_parts = "split.count" in reader.fields
    if kind not in _ARCHITECTURES or in_parts:
        raise ValueError(
            f"{path} must be one file with an architecture of {', '.join(_ARCHITECTURES)}, got "
            f"{kind!r}{' in parts' if in_parts else ''}; join parts by llama.cpp's "
            f"gguf-split, or take the folder with safetensors"
        )
    settings = {
        name.removeprefix(f"{kind}."): x.contents()
        for name, x in reader.fields.items()
        if name.startswith(f"{kind}.")
    }
    types = {x.tensor_type.name for x in reader.tensors}
    if other := sorted(types - {*_TYPES}):
        raise ValueError(
            f"{path} must have tensors of {', '.join(_TYPES)}, got {', '.join(other)}; take a file "
            f"with these types"
        )
    tensors = {}
    for entry in reader.tensors:
        x = entry.data
        if entry.tensor_type.name == "BF16":
            x = x.view(ml_dtypes.bfloat16)
        elif entry.tensor_type.name == "Q8_0":
            x = gguf.quants.dequantize(x, entry.tensor_type)
        *block, part, leaf = entry.name.split(".")
        if kind == "llama" and part in ("attn_q", "attn_k"):
            heads = settings["attention.head_count"]
            if part == "attn_k":
                heads = settings.get("attention.head_count_kv", heads)
            x = _by_halves(x, heads)
        start = f"model.layers.{block[-1]}." if block else ""
        tensors[f"{start}{_NAMES.get(part, part)}.{leaf}"] = x
    try:
        return _config(kind, settings, tensors), tensors
    except KeyError as error:
        raise ValueError(f"{path} must be a whole model, got none of {error}; take one") from None


def _by_halves(x: np.ndarray, heads: int) -> np.ndarray:
    """Return a query or key tensor whose rotary partners are in the two halves of a head.

    llama.cpp's are neighbors.
    """
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _config(kind: str, settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the `config.json`. Unknown settings keep their names, and are refused by them."""
    config = {_SETTINGS.get(name, f"{kind}.{name}"): x for name, x in settings.items()}
    head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for name in ("attention.value_length", "rope.dimension_count"):
        if config.get(f"{kind}.{name}") == head_dim:
            del config[f"{kind}.{name}"]
    scaling: dict[str, Any] = {}
    if config.get(f"{kind}.rope.scaling.type") == "linear":
        del config[f"{kind}.rope.scaling.type"]
        factor = config.pop(f"{kind}.rope.scaling.factor")
        scaling = {"rope_type": "linear", "factor": factor}
    factors = tensors.pop("rope_freqs.weight", None)
    if factors is not None:  # Llama 3's, of the base frequencies, at all lengths.
        both = factors.tolist()
        scaling = {
            "rope_type": "longrope", "short_factor": both, "long_factor": both,
            "attention_factor": 1.0,
        }  # fmt: skip
    return config | {
        "model_type": kind, "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "tie_word_embeddings": "lm_head.weight" not in tensors, "rope_scaling": scaling or None,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors, "hidden_act": "silu",
    }  # fmt: skip
