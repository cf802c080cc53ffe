"""Neutral settings, which change no output of a model.

A setting that a family neither reads nor lists here is an error, as it may change the outputs.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from flax_mha.interop.checked_config import Config, FileSettings, several

Result = TypeVar("Result")

# The value at which each setting is neutral, or `...` for any value.
Neutral: TypeAlias = dict[str, Any]


def names(text: str) -> dict[str, Any]:
    """Return settings that are neutral at any value."""
    return dict.fromkeys(text.split(), ...)


# Keys of files, tools and additional outputs.
BOOKKEEPING: Neutral = names("""
    _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset _from_model_config
    _flash_attn_2_enabled attn_implementation architectures model_type transformers_version
    transformers.js_config dtype torch_dtype finetuning_task problem_type task_specific_params
    tokenizer_class prefix id2label label2id num_labels unsloth_version unsloth_fixed
    quantization_config use_cache cache_implementation return_dict output_attentions
    output_hidden_states output_past torchscript use_bfloat16 tf_legacy_loss xla_device
    chunk_size_feed_forward is_encoder_decoder _num_labels _class_name _diffusers_version
""")
_TRAINING = """
    gradient_checkpointing initializer_range initializer_factor init_std activation_dropout
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout decoder_layerdrop
    drop_path_rate dropout dropout_rate embd_pdrop encoder_layerdrop hidden_dropout
    hidden_dropout_prob layerdrop qa_dropout resid_pdrop seq_classif_dropout tie_encoder_decoder
"""
# Arguments of `generate`, and special tokens.
_GENERATION = """
    bad_words_ids begin_suppress_tokens bos_token_id cls_token_id decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty forced_bos_token_id forced_decoder_ids forced_eos_token_id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores pad_token_id remove_invalid_values repetition_penalty
    return_dict_in_generate sep_token_id suppress_tokens temperature top_k top_p typical_p
"""
ALWAYS: Neutral = BOOKKEEPING | names(_TRAINING + _GENERATION) | {
    "add_cross_attention": False, "is_decoder": False, "pruned_heads": {},
}  # fmt: skip
_ENCODER: Neutral = {"is_causal": False} | names("tie_word_embeddings")
_SUMMARY = names("""
    summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels
    summary_type summary_use_proj
""")

# Poolers, heads that are left out, and initial values.
BERT: Neutral = _ENCODER | _SUMMARY | {"use_task_id": False} | names("""
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type sbert_ce_default_activation_function sentence_transformers
    sinusoidal_pos_embds task_type_vocab_size tie_weights_
""")  # fmt: skip
# A head for words, initial values, kernels, and unread keys of BERT.
MODERNBERT: Neutral = _ENCODER | names("""
    decoder_bias deterministic_flash_attn embedding_dropout initializer_cutoff_factor layer_norm_eps
    max_position_embeddings mlp_dropout position_embedding_type reference_compile
    repad_logits_with_grad sparse_pred_ignore_index sparse_prediction
""")  # fmt: skip
VIT: Neutral = _ENCODER | names("encoder_stride pooler_act pooler_output_size")
# Training, a backbone's features, and images of another size.
DINO: Neutral = _ENCODER | names("""
    apply_layernorm interpolate_antialias interpolate_offset out_features out_indices
    pos_embed_jitter pos_embed_rescale pos_embed_shift reshape_hidden_states stage_names
    use_mask_token
""")  # fmt: skip
TOWERS: Neutral = _ENCODER | names("""
    logit_scale_init_value max_position_embeddings pad_token_id projection_dim projection_size
""")  # fmt: skip
TIMM: Neutral = {"dynamic_img_size": False, "dynamic_img_pad": False} | names("""
    architecture attn_drop_rate device drop_rate fix_init label_descriptions label_names
    num_features patch_drop_rate pool_include_prefix pos_drop_rate pretrained_cfg proj_drop_rate
    weight_init
""")  # fmt: skip
VIT_PYTORCH: Neutral = names("emb_dropout")
# A limit of the length, and a mark of trained rotary frequencies.
DECODER: Neutral = {"is_causal": True} | names("finetuned max_position_embeddings")
# `pretraining_tp` is the number of slices in which matmuls are computed.
LLAMA: Neutral = (
    DECODER
    | {"use_sliding_window": False, "rope_interleaved": False}
    | names("is_llama_config max_sequence_length max_window_layers pretraining_tp")
)
# Qwen2's biases are fixed, and the file's tensors are checked for them.
QWEN: Neutral = DECODER | {"use_mrope": False} | names("attention_bias")
# `hidden_act` is the old key of `hidden_activation`.
GEMMA: Neutral = DECODER | {"use_bidirectional_attention": False} | names("hidden_act")
# Sizes of parts that are refused, and images' tokens.
GEMMA4: Neutral = DECODER | {"use_bidirectional_attention": "vision"} | names("""
    moe_intermediate_size num_experts top_k_experts use_double_wide_mlp vocab_size_per_layer_input
""")  # fmt: skip
# Losses, and second keys of gpt-oss for the same settings.
EXPERTS: Neutral = DECODER | names("""
    experts_per_token initial_context_length output_router_logits router_aux_loss_coef
    router_jitter_noise
""")  # fmt: skip
DEEPSEEK: Neutral = EXPERTS | names("""
    aux_loss_alpha ep_size head_dim pretraining_tp qk_head_dim seq_aux
""")  # fmt: skip
QWEN3_MOE: Neutral = EXPERTS | names("intermediate_size max_window_layers")
GPT2: Neutral = (
    DECODER | _SUMMARY | names("n_ctx n_special predict_special_tokens reorder_and_upcast_attn")
)
T5: Neutral = names("n_positions")
# Augmentation, classifier, time stamps, and a scale that is never applied.
WHISPER: Neutral = {"use_weighted_layer_sum": False} | names("""
    apply_spec_augment classifier_proj_size mask_feature_length mask_feature_min_masks
    mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob median_filter_width
    num_hidden_layers scale_embedding
""")  # fmt: skip


def checked(make: Callable[[Config], Result], known: Neutral) -> Callable[[Config], Result]:
    """Wrap a family's function to refuse settings that it does not read, unless neutral."""
    known = ALWAYS | known

    @functools.wraps(make)
    def read(config: Config) -> Result:
        settings = FileSettings(config)
        result = make(settings)
        if unread := settings.unread(lambda name, x: name in known and known[name] in (..., x)):
            raise ValueError(
                f"the config's settings must be known to this family, got {several(unread)}, which "
                f"may change the outputs; delete those that only describe files or training"
            )
        return result

    return read
