"""A small config of every family."""

from typing import Any

from tests.interop.test_files import CONFIG
from tests.interop.test_published_checkpoints import (
    BERT,
    DISTILBERT,
    GPT2,
    LLAMA,
    ROBERTA,
    SIZES,
    T5,
    TEXT,
    VIT,
)

Config = dict[str, Any]

IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 3}
LAYERS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8,
        "beta_fast": 32, "beta_slow": 1.0, "truncate": False}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8}  # fmt: skip
LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
         "full_attention": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
TOKENS = {name: x for name, x in TEXT.items() if name != "type_vocab_size"}
TOWERS = {"text_config": TOKENS, "vision_config": SIZES | IMAGES, "projection_dim": 8}
GEMMA4 = {name: x for name, x in (CONFIG | LAYERS).items() if name not in (
    "hidden_act", "rope_theta",
)} | {
    "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False,
    "head_dim": 8, "num_key_value_heads": 2, "attention_bias": True,
}  # fmt: skip
CONFIGS: dict[str, Config] = {
    "bert": BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 3},
    "roberta": ROBERTA, "distilbert": DISTILBERT, "vit": VIT | {"qkv_bias": True},
    "deit": VIT | {"model_type": "deit", "architectures": ["DeiTForImageClassification"],
                   "id2label": {"0": "cat", "1": "dog"}},
    "dinov2": {name: x for name, x in SIZES.items() if name != "intermediate_size"} | IMAGES | {
        "model_type": "dinov2_with_registers", "num_register_tokens": 2, "mlp_ratio": 2,
        "layerscale_value": 1.0, "use_swiglu_ffn": False, "qkv_bias": True,
        "architectures": ["Dinov2WithRegistersForImageClassification"], "num_labels": 3,
    },
    "dinov3": SIZES | IMAGES | {
        "model_type": "dinov3_vit", "num_register_tokens": 2, "rope_theta": 100.0,
        "layerscale_value": 1.0, "use_gated_mlp": False, "key_bias": False,
    },
    "clip": TOWERS | {"model_type": "clip"}, "siglip": TOWERS | {"model_type": "siglip"},
    "modernbert": {name: x for name, x in TOKENS.items() if name != "hidden_act"} | {
        "model_type": "modernbert", "architectures": ["ModernBertForSequenceClassification"],
        "num_labels": 3, "hidden_activation": "gelu", "norm_eps": 1e-5, "norm_bias": True,
        "global_attn_every_n_layers": 2, "local_attention": 4, "global_rope_theta": 100.0,
        "local_rope_theta": 50.0, "classifier_pooling": "mean", "classifier_bias": True,
        "classifier_activation": "silu", "attention_bias": True, "mlp_bias": True,
    },
    "gpt2": GPT2 | {"n_inner": 24, "eos_token_id": 2},
    "gpt_neox": TOKENS | {
        "model_type": "gpt_neox", "layer_norm_eps": 1e-5, "rotary_pct": 0.5,
        "rotary_emb_base": 100.0, "use_parallel_residual": True, "attention_bias": True,
    },
    "t5": T5 | {"num_decoder_layers": 2, "relative_attention_max_distance": 20,
                "feed_forward_proj": "gated-gelu", "tie_word_embeddings": True},
    "mt5": T5 | {"model_type": "mt5", "feed_forward_proj": "gated-gelu",
                 "tie_word_embeddings": False},
    "whisper": {
        "model_type": "whisper", "vocab_size": 24, "d_model": 16, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "num_mel_bins": 8, "max_source_positions": 16,
        "max_target_positions": 16, "activation_function": "gelu",
    },
    "llama": LLAMA | {"rope_parameters": LLAMA3, "mlp_bias": False, "attention_bias": True},
    "qwen2": CONFIG | {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": CONFIG | LAYERS | {"rope_scaling": YARN, "quantization_config": {}},
    "olmo2": CONFIG | {"model_type": "olmo2", "attention_bias": False},
    "gemma2": CONFIG | {
        "model_type": "gemma2", "sliding_window": 4, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3": CONFIG | {
        "model_type": "gemma3_text", "sliding_window": 4, "sliding_window_pattern": 2,
        "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3, two rotations": CONFIG | LAYERS | {
        "model_type": "gemma3_text", "rope_parameters": LOCAL,
    },
    "gemma4": GEMMA4 | {
        "attention_k_eq_v": True, "global_head_dim": 16, "num_global_key_value_heads": 1,
        "final_logit_softcapping": 30.0, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "factor": 2.0,
                               "partial_rotary_factor": 0.5},
        },
    },
    "gemma4, heads by layer": GEMMA4 | {
        "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}},
    },
    "gpt_oss": CONFIG | EXPERTS | LAYERS | {"model_type": "gpt_oss", "swiglu_limit": 7.0},
    "deepseek_v3": {name: x for name, x in CONFIG.items() if name not in (
        "head_dim", "num_key_value_heads",
    )} | {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 6,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 4, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 20, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "rope_interleave": True, "num_nextn_predict_layers": 1,
        "rope_scaling": YARN | {"mscale": 1.4, "mscale_all_dim": 0.7}, "rope_theta": 100.0,
        "attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    "mixtral": CONFIG | EXPERTS | {"model_type": "mixtral"},
    "qwen3_moe": CONFIG | {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "norm_topk_prob": True,
    },
    "timm": {
        "model_type": "timm_vit", "img_size": 8, "patch_size": [4, 4], "embed_dim": 16, "depth": 2,
        "num_heads": 4, "mlp_ratio": 2.0, "reg_tokens": 1, "init_values": 0.1, "in_chans": 3,
        "num_classes": 3, "qkv_bias": True, "pre_norm": False, "act_layer": "gelu",
    },
    "vit_pytorch": {
        "model_type": "vit_pytorch", "image_size": [8, 8], "patch_size": 4, "dim": 16, "depth": 2,
        "heads": 4, "dim_head": 4, "mlp_dim": 24, "channels": 3, "num_classes": 3, "pool": "mean",
    },
}  # fmt: skip
