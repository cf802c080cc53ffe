"""Small random models of `transformers`, one for each family, and their inputs."""

import functools
import tempfile
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import transformers as hf

from flax_mha import interop
from tests.interop.odd_configs import LLAMA3

RNG = np.random.default_rng(0)
IDS = RNG.integers(3, 64, (2, 11))
IMAGES = RNG.normal(size=(2, 3, 16, 16)).astype(np.float32)
SOUND = RNG.normal(size=(2, 8, 32)).astype(np.float32)
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
TOWER = {name: TEXT[name] for name in list(TEXT)[1:5]} | {"image_size": 16, "patch_size": 4}
DINO = {name: x for name, x in TOWER.items() if name != "intermediate_size"}
DECODER = TEXT | {"num_key_value_heads": 2, "head_dim": 16}
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 8
}  # fmt: skip
SCALED_YARN = YARN | {"mscale": 1.4, "mscale_all_dim": 0.7}
EXPERTS = DECODER | {"num_local_experts": 8, "num_experts_per_tok": 3}
DEEPSEEK = TEXT | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "n_shared_experts": 2,
}  # fmt: skip
LOCAL = {
    "sliding_window": 3, "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA4 = TEXT | {
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": 3,
    "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
BOTH = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
}
MODERN = TEXT | {"num_hidden_layers": 4, "local_attention": 5, "cls_token_id": 1, "sep_token_id": 2}
WHISPER = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40, "num_mel_bins": 8, "max_source_positions": 16,
    "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_decoder_layers": 3, "num_heads": 4,
}  # fmt: skip


class Case(NamedTuple):
    """A model of `transformers`: its class and config, its inputs, and the inputs of ours."""

    model: Any
    config: Any
    given: dict[str, Any]
    ours: tuple[Any, ...]


def case(model: Any, given: dict[str, Any], **config: Any) -> Case:
    """Return a case of images and sound with their channels last for ours, in this order."""
    ours = (np.moveaxis(x, 1, -1) if x.dtype == np.float32 else x for x in given.values())
    return Case(model, model.config_class(**config), given, tuple(ours))


def text(model: Any, **config: Any) -> Case:
    return case(model, {"input_ids": IDS}, **config)


def towers(model: Any, **config: Any) -> Case:
    return case(model, {"pixel_values": IMAGES, "input_ids": IDS}, **config)


def image(model: Any, **config: Any) -> Case:
    return case(model, {"pixel_values": IMAGES}, **config)


def texts(model: Any, **config: Any) -> Case:
    return case(model, {"input_ids": IDS, "decoder_input_ids": IDS[:, :7]}, **config)


def sound(**config: Any) -> Case:
    given = {"input_features": SOUND, "decoder_input_ids": IDS}
    return case(hf.WhisperForConditionalGeneration, given, **WHISPER, **config)


both = {"text_config": TEXT, "vision_config": TOWER}
CASES = {
    "bert": text(hf.BertModel, **TEXT),
    "roberta": text(hf.RobertaModel, **TEXT),
    "modernbert": text(hf.ModernBertModel, **MODERN, norm_bias=True, mlp_bias=True),
    "modernbert classifies": text(
        hf.ModernBertForSequenceClassification,
        **MODERN,
        num_labels=3,
        classifier_pooling="mean",
    ),
    "distilbert": text(
        hf.DistilBertModel,
        vocab_size=64,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=64,
    ),
    "bert classifies": text(hf.BertForSequenceClassification, **TEXT, num_labels=3),
    "roberta classifies": text(hf.RobertaForSequenceClassification, **TEXT, num_labels=2),
    "distilbert classifies": text(
        hf.DistilBertForSequenceClassification,
        vocab_size=64,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        num_labels=5,
        max_position_embeddings=64,
    ),
    "vit classifies": image(hf.ViTForImageClassification, **TOWER, num_labels=7),
    "deit classifies": image(hf.DeiTForImageClassification, **TOWER, num_labels=2),
    "vit": image(hf.ViTModel, **TOWER),
    "deit": image(hf.DeiTModel, **TOWER),
    "dinov2": image(hf.Dinov2Model, **DINO),
    "dinov2 gated": image(hf.Dinov2Model, **DINO, use_swiglu_ffn=True, qkv_bias=False),
    "dinov2, registers": image(
        hf.Dinov2WithRegistersModel,
        **DINO,
        num_register_tokens=2,
        use_swiglu_ffn=True,
    ),
    "dinov2, registers, classifies": image(
        hf.Dinov2WithRegistersForImageClassification,
        **DINO,
        num_register_tokens=2,
        num_labels=3,
    ),
    "dinov3": image(hf.DINOv3ViTModel, **TOWER, num_register_tokens=2),
    "dinov3 gated": image(
        hf.DINOv3ViTModel,
        **TOWER,
        use_gated_mlp=True,
        hidden_act="silu",
        key_bias=True,
    ),
    "clip": towers(hf.CLIPModel, **both, projection_dim=16),
    "siglip": towers(hf.SiglipModel, **both),
    "gpt2": text(
        hf.GPT2LMHeadModel,
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt-neox": text(
        hf.GPTNeoXForCausalLM,
        **TEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    ),
    "gpt-neox in turn": text(
        hf.GPTNeoXForCausalLM,
        **TEXT,
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_fast",
    ),
    "t5": texts(hf.T5ForConditionalGeneration, **T5),
    "t5 1.1": texts(
        hf.T5ForConditionalGeneration,
        **T5,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    "mt5": texts(hf.MT5ForConditionalGeneration, **T5),
    "whisper": sound(),
    "llama": text(hf.LlamaForCausalLM, **DECODER, rope_parameters=LLAMA3),
    "mistral": text(hf.MistralForCausalLM, **DECODER, sliding_window=3),
    "qwen2": text(hf.Qwen2ForCausalLM, **TEXT, num_key_value_heads=2),
    "qwen3": text(hf.Qwen3ForCausalLM, **DECODER, tie_word_embeddings=True, rope_parameters=YARN),
    "olmo2": text(hf.Olmo2ForCausalLM, **TEXT, num_key_value_heads=2),
    "gemma2": text(hf.Gemma2ForCausalLM, **DECODER, sliding_window=3, query_pre_attn_scalar=24),
    "gemma3": text(hf.Gemma3ForCausalLM, **DECODER, **LOCAL, rope_parameters=BOTH),
    "gemma4": text(hf.Gemma4ForCausalLM, **GEMMA4, attention_k_eq_v=True),
    "gemma4, values": text(
        hf.Gemma4ForCausalLM,
        **GEMMA4,
        final_logit_softcapping=3.0,
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    # A limit that many features reach.
    "gpt-oss": text(
        hf.GptOssForCausalLM,
        **EXPERTS,
        sliding_window=3,
        swiglu_limit=0.5,
        rope_parameters=YARN | {"truncate": False},
    ),
    "deepseek-v3": text(hf.DeepseekV3ForCausalLM, **DEEPSEEK, rope_parameters=SCALED_YARN),
    "deepseek-v3, plain queries": text(
        hf.DeepseekV3ForCausalLM,
        **DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
        rope_interleave=False,
    ),
    "mixtral": text(hf.MixtralForCausalLM, **EXPERTS),
    "qwen3-moe": text(
        hf.Qwen3MoeForCausalLM,
        **DECODER,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
    ),
}


# Rows of 11 tokens are longer than these.
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.5, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0],
    "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip
# Model types and settings that share a table with one of the above.
ALIASES = {
    "xlm-roberta": text(hf.XLMRobertaModel, **TEXT),
    "camembert": text(hf.CamembertModel, **TEXT),
    "ernie": text(hf.ErnieModel, **TEXT),
    "data2vec-text": text(hf.Data2VecTextModel, **TEXT),
    "electra": text(hf.ElectraModel, **TEXT, embedding_size=32),
    "electra classifies": text(
        hf.ElectraForSequenceClassification,
        **TEXT,
        embedding_size=32,
        num_labels=3,
    ),
    "vit-msn": image(hf.ViTMSNModel, **TOWER),
    "dinov3 without biases": image(hf.DINOv3ViTModel, **TOWER, mlp_bias=False, use_gated_mlp=True),
    "clip's images": image(hf.CLIPVisionModel, **TOWER),
    "clip's texts": text(hf.CLIPTextModel, **TEXT),
    "clip's texts to their end": text(hf.CLIPTextModel, **TEXT | {"eos_token_id": int(IDS[1, 3])}),
    "siglip's images": image(hf.SiglipVisionModel, **TOWER),
    "siglip's texts": text(hf.SiglipTextModel, **TEXT),
    "whisper scaled": sound(scale_embedding=True),
    "ministral": text(
        hf.MinistralForCausalLM,
        **DECODER,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "smollm3": text(
        hf.SmolLM3ForCausalLM,
        **DECODER,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=3,
    ),
    "qwen2 late windows": text(
        hf.Qwen2ForCausalLM,
        **TEXT,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=1,
    ),
    "llama, mscale": text(hf.LlamaForCausalLM, **DECODER, rope_parameters=SCALED_YARN),
    "llama, dynamic": text(
        hf.LlamaForCausalLM,
        **DECODER | {"max_position_embeddings": 6},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    ),
    "llama, longrope": text(hf.LlamaForCausalLM, **DECODER, rope_parameters=LONGROPE),
    "llama, longrope of short rows": text(
        hf.LlamaForCausalLM,
        **DECODER,
        rope_parameters=LONGROPE | {"original_max_position_embeddings": 16, "factor": 4.0},
    ),
}


def make(case: Case) -> Any:
    """Build the model with all weights random, including biases and scales."""
    torch.manual_seed(0)
    case.config._attn_implementation = "eager"
    model = case.model(case.config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "logit" not in name:
                p.normal_(0, 0.2) if p.ndim > 1 else p.add_(0.1 * torch.randn_like(p))
        for name, x in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                x.add_(0.2 * torch.randn_like(x))
    return model


@functools.cache
def pair(name: str) -> tuple[Any, Any, Any]:
    return loaded(make((CASES | ALIASES)[name]))


def loaded(theirs: Any) -> tuple[Any, Any, Any]:
    """Return a model, and ours with its variables, loaded from a folder that it saved."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        module, variables = interop.load(folder)
        return theirs, module, jax.tree.map(np.array, variables)


def run(theirs: Any, inputs: dict[str, Any], **options: Any) -> Any:
    with torch.no_grad():
        return theirs(**{key: torch.tensor(x) for key, x in inputs.items()}, **options)
