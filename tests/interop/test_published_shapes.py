"""Configs as published: every tensor of `transformers`, by name and shape, without its numbers."""

from typing import Any

import jax
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
hf = pytest.importorskip("transformers", reason="needs the extra families")

from transformers.core_model_loading import revert_weight_conversion  # noqa: E402

from flax_mha import interop  # noqa: E402
from flax_mha.interop.table import stored  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

CONFIGS: dict[str, Any] = {
    "answerdotai/ModernBERT-base": {
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 50281, "classifier_activation": "gelu",
        "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean",
        "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
        "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "gradient_checkpointing": False,
        "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0,
        "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05,
        "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
        "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": False,
        "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22,
        "pad_token_id": 50283, "position_embedding_type": "absolute", "reference_compile": True,
        "repad_logits_with_grad": False, "sep_token_id": 50282, "sparse_pred_ignore_index": -100,
        "sparse_prediction": False, "tie_word_embeddings": True, "torch_dtype": "float32",
        "vocab_size": 50368,
    },
    # Without its custom code and its quantization.
    "deepseek-ai/DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1,
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    },
    # The text model alone.
    "google/gemma-4-31B": {
        "architectures": ["Gemma4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_k_eq_v": True, "dtype": "bfloat16", "enable_moe_block": False,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376,
        "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "max_position_embeddings": 262144, "model_type": "gemma4_text", "num_attention_heads": 32,
        "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
        "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06, "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024, "tie_word_embeddings": True, "use_cache": True,
        "use_bidirectional_attention": "vision", "use_double_wide_mlp": False, "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_has_the_tensors_of_transformers(name: str) -> None:
    given = CONFIGS[name]
    config = hf.AutoConfig.for_model(**given)
    with torch.device("meta"):
        model = getattr(hf, given["architectures"][0])(config)
    theirs = {key: tuple(x.shape) for key, x in revert_weight_conversion(
        model, model.state_dict()
    ).items()}  # fmt: skip
    family = interop.family(given)
    variables = jax.eval_shape(family.module.init, jax.random.key(0), *family.example)
    ours = {key: x.shape for key, (x, _) in stored(family, variables).items()}
    matched, errors = family.match(dict.fromkeys(theirs))
    assert not [x for x in errors if not x.endswith("ties it to")]
    bare = {key.removeprefix(family.prefix): x for key, x in theirs.items()}
    # The table also has rows of parameters that this module lacks, such as an untied head.
    assert matched.keys() >= ours.keys()
    assert {key: bare.get(key, theirs.get(key)) for key in ours} == ours
