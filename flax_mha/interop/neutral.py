"""Neutral settings, which change no output of a model.

Others that a family does not read are errors.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from flax_mha.interop.checked_config import Config, FileSettings, several

# Each setting's neutral value, or `...` for any.
Neutral: TypeAlias = dict[str, Any]


def names(text: str) -> Neutral:
    """Return settings that are neutral at any value."""
    return dict.fromkeys(text.split(), ...)


# Keys of files, tools and additional outputs.
BOOKKEEPING = names("""
    _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset _from_model_config
    _flash_attn_2_enabled attn_implementation architectures model_type transformers_version
    transformers.js_config dtype torch_dtype finetuning_task problem_type task_specific_params
    tokenizer_class prefix id2label label2id num_labels unsloth_version unsloth_fixed
    quantization_config use_cache cache_implementation return_dict output_attentions
    output_hidden_states output_past torchscript use_bfloat16 tf_legacy_loss xla_device
    chunk_size_feed_forward is_encoder_decoder _num_labels _class_name _diffusers_version
    architecture device label_descriptions label_names num_features pretrained_cfg
    deterministic_flash_attn reference_compile repad_logits_with_grad is_llama_config finetuned
    pretraining_tp ep_size stage_names out_features out_indices
""")
# Of training; of generation, with limits of lengths; of other heads, features and sizes of images.
ALWAYS = BOOKKEEPING | names("""
    activation_dropout apply_spec_augment attention_dropout attention_probs_dropout_prob
    attn_drop_rate attn_pdrop aux_loss_alpha classifier_dropout decoder_layerdrop drop_path_rate
    drop_rate dropout dropout_rate emb_dropout embd_pdrop embedding_dropout encoder_layerdrop
    fix_init gradient_checkpointing hidden_dropout hidden_dropout_prob init_std
    initializer_cutoff_factor initializer_factor initializer_range layerdrop
    logit_scale_init_value mask_feature_length mask_feature_min_masks mask_feature_prob
    mask_time_length mask_time_min_masks mask_time_prob mlp_dropout output_router_logits
    patch_drop_rate pos_drop_rate pos_embed_jitter pos_embed_rescale pos_embed_shift
    proj_drop_rate qa_dropout resid_pdrop router_aux_loss_coef router_jitter_noise seq_aux
    seq_classif_dropout sparse_pred_ignore_index sparse_prediction tie_encoder_decoder
    use_mask_token weight_init

    bad_words_ids begin_suppress_tokens bos_token_id cls_token_id decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty forced_bos_token_id forced_decoder_ids forced_eos_token_id
    length_penalty max_length max_position_embeddings max_sequence_length min_length n_ctx
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores pad_token_id
    remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens
    temperature top_k top_p typical_p

    apply_layernorm classifier_proj_size decoder_bias directionality encoder_stride
    interpolate_antialias interpolate_offset median_filter_width n_special pool_include_prefix
    pooler_act pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_output_size
    pooler_size_per_head pooler_type predict_special_tokens projection_dim projection_size
    reorder_and_upcast_attn reshape_hidden_states sbert_ce_default_activation_function
    sentence_transformers sinusoidal_pos_embds summary_activation summary_first_dropout
    summary_last_dropout summary_proj_to_labels summary_type summary_use_proj
    task_type_vocab_size tie_weights_
""") | {"partial_rotary_factor": 1.0, "pruned_heads": {}} | dict.fromkeys((
    "add_cross_attention", "dynamic_img_pad", "dynamic_img_size", "is_decoder",
    "rope_interleaved", "use_bidirectional_attention", "use_mrope", "use_sliding_window",
    "scale_attn_by_inverse_layer_idx", "use_task_id", "use_weighted_layer_sum",
), False)  # fmt: skip
ENCODER: Neutral = {"is_causal": False} | names("tie_word_embeddings")
DECODER: Neutral = {"is_causal": True}
# Second keys of gpt-oss for the same settings.
EXPERTS = DECODER | names("experts_per_token initial_context_length")


def checked(make: Callable[[Config], Any], known: Neutral) -> Callable[[Config], Any]:
    """Wrap a family's function to refuse settings that it does not read, unless neutral."""
    known = ALWAYS | known

    @functools.wraps(make)
    def read(config: Config) -> Any:
        settings = FileSettings(config)
        result = make(settings)
        if unread := settings.unread(lambda name, x: name in known and known[name] in (..., x)):
            raise ValueError(
                f"the config's settings must be known to this family, got {several(unread)}, which "
                f"may change the outputs; delete those that only describe files or training"
            )
        return result

    return read
