"""Untrusted configs: the type and range of each setting are checked when it is read."""

import numbers
import reprlib
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

Config: TypeAlias = Mapping[str, Any]
Check: TypeAlias = Callable[[Any], bool]
Result = TypeVar("Result")

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
REMEDY = "take the config.json that was published with the weights"
# The most entries of a list in an error.
_MAX_LISTED = 100
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80
_SHOWN.maxlong = 40


def shown(x: Any) -> str:
    """Format a value as one short line of an error."""
    return _SHOWN.repr(x)[:100]


def several(xs: Sequence[str]) -> str:
    """Format the first strings of a list, and the number of the others, as one line."""
    line, more = "; ".join(xs[:_MAX_LISTED]), len(xs) - _MAX_LISTED
    return f"{line}; {more:,} more" if more > 0 else line


def _number(low: float, high: float = 1e30, kind: Any = numbers.Real) -> Check:
    """Return a check for a number in a range. A bool is no number."""
    return lambda x: isinstance(x, kind) and not isinstance(x, bool) and low <= x <= high


def _integer(low: int, high: int) -> tuple[str, Check]:
    return f"a whole number in {low:,} … {high:,}", _number(low, high, numbers.Integral)


def _list_of(check: Check, count: int | None = None) -> Check:
    return lambda x: isinstance(x, list | tuple) and count in (None, len(x)) and all(map(check, x))


def _or_list(rule: tuple[str, Check], count: int | None = None) -> tuple[str, Check]:
    words, check = rule
    many = _list_of(check, count)
    return f"{words}, or a list of {count or 'such numbers'}", lambda x: check(x) or many(x)


_FLAG = ("true or false", lambda x: x is None or isinstance(x, bool))
_TABLE = ("an object", lambda x: isinstance(x, Mapping))
_TEXT = ("a string", lambda x: isinstance(x, str) and x.isprintable())
# Sizes of images and sound are small, as a model's example has that size.
_LENGTH = _integer(1, 2**16)
_COUNT = _integer(0, 2**16)
_SPAN = _integer(0, 2**31 - 1)
_POSITIVE = ("a positive number", _number(1e-30))

# Valid values in words, their checks, and their settings.
_BY_RULE: dict[tuple[str, Check], str] = {
    _FLAG: (
        "attention_bias attention_k_eq_v classifier_bias do_sample enable_moe_block is_gated_act "
        "key_bias mlp_bias norm_bias norm_topk_prob pre_norm proj_bias qkv_bias query_bias "
        "rope_interleave scale_decoder_outputs tie_word_embeddings truncate use_gated_mlp "
        "scale_attn_by_inverse_layer_idx scale_attn_weights use_parallel_residual "
        "use_sliding_window use_swiglu_ffn value_bias vision_use_head"
    ),
    _TABLE: (
        "full_attention id2label per_layer_config quantization_config rope_parameters rope_scaling "
        "sliding_attention text_config text_config_dict vision_config vision_config_dict"
    ),
    _TEXT: (
        "act_layer activation activation_function classifier_activation classifier_pooling "
        "dense_act_fn feed_forward_proj hidden_act hidden_activation model_type pool quant_method "
        "rope_type scoring_func topk_method type"
    ),
    _integer(1, 512): (
        "decoder_layers depth encoder_layers n_layer n_layers num_decoder_layers "
        "num_hidden_layers num_layers"
    ),
    _integer(1, 2**16): (
        "decoder_attention_heads encoder_attention_heads heads n_head n_heads num_attention_heads "
        "num_global_key_value_heads num_experts num_experts_per_tok num_heads num_key_value_heads "
        "num_labels moe_layer_freq n_group n_routed_experts n_shared_experts num_local_experts "
        "topk_group relative_attention_num_buckets sliding_window_pattern _sliding_window_pattern "
        "decoder_sparse_step global_attn_every_n_layers no_rope_layer_interval"
    ),
    _integer(1, 2**24): (
        "channels d_ff d_kv d_model decoder_ffn_dim dim dim_head embed_dim embedding_size "
        "encoder_ffn_dim global_head_dim head_dim hidden_dim hidden_size in_chans "
        "intermediate_size kv_lora_rank max_target_positions mlp_dim moe_intermediate_size "
        "q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_embd n_inner n_positions "
        "num_channels num_mel_bins projection_dim type_vocab_size vocab_size"
    ),
    _LENGTH: "max_source_positions",
    _or_list(_LENGTH, 2): "image_size img_size patch_size",
    _COUNT: (
        "hidden_size_per_layer_input num_kv_shared_layers first_k_dense_replace max_window_layers "
        "num_beams num_classes num_nextn_predict_layers num_register_tokens reg_tokens"
    ),
    _SPAN: (
        "decoder_start_token_id local_attention max_position_embeddings "
        "original_max_position_embeddings pad_token_id relative_attention_max_distance "
        "sliding_window top_k"
    ),
    _or_list(_SPAN): "eos_token_id",
    ("a number in 0 … 1", _number(0, 1)): "layer_norm_eps layer_norm_epsilon norm_eps rms_norm_eps",
    ("a positive number up to 1", _number(1e-30, 1)): "partial_rotary_factor rotary_pct top_p",
    _POSITIVE: (
        "attention_factor attn_logit_softcapping beta_fast beta_slow factor "
        "final_logit_softcapping global_rope_theta high_freq_factor local_rope_theta "
        "low_freq_factor mlp_ratio mscale mscale_all_dim query_pre_attn_scalar "
        "rope_local_base_freq rope_theta routed_scaling_factor rotary_emb_base swiglu_limit "
        "temperature"
    ),
    ("a number", _number(-1e30)): "init_values layerscale_value",
    ("a list of strings", _list_of(_TEXT[1])): "architectures",
    ("a list of whole numbers", _list_of(_COUNT[1])): "mlp_only_layers no_rope_layers",
    ("a list of positive numbers", _list_of(_POSITIVE[1])): "long_factor short_factor",
    (f"a list of {' and '.join(LAYER_TYPES)}", _list_of(lambda x: x in LAYER_TYPES)): "layer_types",
}  # fmt: skip
RULES = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}


class FileSettings(ChainMap[str, Any]):
    """A config that checks a setting when it is read, and records which settings were read.

    A null setting counts as missing, and a null flag is False. The first of several configs counts.

    Attributes:
      at: the path to each config.
      seen: the paths of settings that were read, shared with objects in the config.
    """

    def __init__(self, config: Config, at: str = "", seen: set[str] | None = None) -> None:
        super().__init__(
            {n: x for n, x in config.items() if x is not None or RULES.get(n) in (None, _FLAG)}
        )
        self.at = [at]
        self.seen = set[str]() if seen is None else seen

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(f"{self.at[0]}{name}")
        paths = [f"{at}{name}" for at, part in zip(self.at, self.maps, strict=True) if name in part]
        self.seen.update(paths)
        value, rule = super().__getitem__(name), RULES.get(name)
        if rule is None:
            return value
        if not rule[1](value):
            raise ValueError(
                f"the config's {paths[0]} must be {rule[0]}, got {shown(value)}; {REMEDY}"
            )
        if rule is _TABLE:
            return FileSettings(value, f"{paths[0]}.", self.seen)
        return bool(value) if rule is _FLAG else value

    def unread(self, neutral: Callable[[str, Any], bool]) -> list[str]:
        """Return the settings that were not read, unless neutral(path, value), with values."""
        lines = []
        for name, x in self.maps[0].items():
            path = f"{self.at[0]}{name}"
            if x is None or neutral(path, x):
                continue
            if path not in self.seen:
                lines.append(f"{path}={shown(x)}")
            elif RULES.get(name) is _TABLE:
                lines += FileSettings(x, f"{path}.", self.seen).unread(neutral)
        return lines


def filled(config: Config, *others: Config, **defaults: Any) -> FileSettings:
    """Return a config, filled with settings of other configs and then with defaults."""
    configs = [x for x in (config, *others) if x] or [{}]
    given = [x if isinstance(x, FileSettings) else FileSettings(x) for x in configs]
    result = FileSettings(defaults, given[0].at[0], given[0].seen)
    # Don't read them: settings that no family reads need not be valid.
    result.maps = [part for x in given for part in x.maps] + result.maps
    result.at = [at for x in given for at in x.at] + result.at
    return result
