"""Published checkpoints: older names and configs, and heads that are left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import interop
from tests.interop.test_files import saved, variables
from tests.interop.written import write

Tensors = dict[str, Any]

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip
TEXT = SIZES | {
    "vocab_size": 24, "max_position_embeddings": 16, "type_vocab_size": 2, "pad_token_id": 0,
}  # fmt: skip
BERT = TEXT | {"model_type": "bert"}
ROBERTA = TEXT | {"model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1}
DISTILBERT = {
    "model_type": "distilbert", "vocab_size": 24, "dim": 16, "n_layers": 2, "n_heads": 4,
    "hidden_dim": 24, "activation": "gelu", "max_position_embeddings": 16,
}  # fmt: skip
VIT = SIZES | {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 3}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 4,
    "n_positions": 16, "n_ctx": 16, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 24,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 16,
}  # fmt: skip
# Like the first T5s, which state neither the activation nor the distances.
T5 = {
    "model_type": "t5", "vocab_size": 24, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2,
    "num_heads": 4, "relative_attention_num_buckets": 8, "layer_norm_epsilon": 1e-6,
    "n_positions": 512,
}  # fmt: skip
X = np.ones((2, 2), np.float32)


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {f"{prefix}.{name}": x for name, x in tensors.items()}


def of_tensorflow(tensors: Tensors) -> Tensors:
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        tensors = {each.replace(new, name): x for each, x in tensors.items()}
    assert any(name.endswith("gamma") for name in tensors)
    return prefixed("bert")(tensors)


def bare(tensors: Tensors) -> Tensors:
    """Remove the first part of the names, as in a model saved without its head."""
    return {name.partition(".")[2]: x for name, x in tensors.items()}


def and_copies(name: str, *copies: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: (
        tensors | {f"{copy}.weight": tensors[f"{name}.weight"] for copy in copies}
    )


# The config, a function that renames tensors, further tensors, and tensors of heads.
PUBLISHED: dict[str, tuple[Any, Any, tuple[str, ...], tuple[str, ...]]] = {
    "bert": (
        BERT, of_tensorflow, ("bert.embeddings.position_ids",),
        ("bert.pooler.dense.weight", "cls.predictions.transform.LayerNorm.gamma",
         "cls.seq_relationship.weight"),
    ),
    "roberta": (ROBERTA, prefixed("roberta"), (), ("lm_head.bias", "lm_head.dense.weight")),
    "distilbert": (
        DISTILBERT, prefixed("distilbert"), (), ("vocab_transform.weight", "vocab_projector.bias")
    ),
    "vit": (
        VIT, prefixed("vit"), (),
        ("vit.pooler.dense.bias", "classifier.weight", "vit.embeddings.mask_token"),
    ),
    "gpt2": (GPT2, bare, ("h.0.attn.bias", "h.1.attn.masked_bias"), ()),
    "gpt2 with its head": (
        GPT2, and_copies("transformer.wte", "lm_head"), ("transformer.h.0.attn.bias",), ()
    ),
    "llama without a head": (
        LLAMA | {"tie_word_embeddings": True}, bare,
        ("layers.1.self_attn.rotary_emb.inv_freq",), (),
    ),
    "t5": (
        T5, and_copies("shared", "lm_head", "encoder.embed_tokens"),
        ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",), (),
    ),
}  # fmt: skip


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoint_loads(name: str, tmp_path: Path) -> None:
    config, renamed, beside, heads = PUBLISHED[name]
    whole = renamed(saved(config, tmp_path)) | dict.fromkeys((*beside, *heads), X)
    write(tmp_path / "model.safetensors", whole)
    if heads:
        told = f"left out, as this .* has no place for them: {', '.join(sorted(heads))}$"
        with pytest.warns(UserWarning, match=told):
            _, actual = interop.load(tmp_path)
    else:
        _, actual = interop.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, actual, variables(config))


# It is there without the prefix too.
TWICE = "bert.embeddings.LayerNorm.weight"


@pytest.mark.parametrize("surplus", ["bert.encoder.more.weight", "encoder.layer.9.bias", TWICE])
def test_unknown_or_repeated_tensor_is_surplus(surplus: str, tmp_path: Path) -> None:
    tensors = saved(BERT, tmp_path)
    told = f"{TWICE} must equal {TWICE[5:]}" if surplus == TWICE else f"surplus {surplus}"
    other = tensors[TWICE[5:]] + 1 if surplus == TWICE else X
    write(tmp_path / "model.safetensors", tensors | {surplus: other})
    with pytest.raises(ValueError, match=told):
        interop.load(tmp_path)


@pytest.mark.parametrize(
    ("form", "gated", "activation"),
    [(None, False, "relu"), ("relu", False, "relu"), ("gated-gelu", True, "gelu"),
     ("gated-silu", True, "silu")],
)  # fmt: skip
def test_activation_of_old_t5_configs(form: str | None, gated: bool, activation: str) -> None:
    module = interop.family(T5 | ({} if form is None else {"feed_forward_proj": form})).module
    block = module.encoder.block
    assert (block.gated, block.activation) == (gated, activation)
    assert module.encoder.scores[0].max_distance == 128
