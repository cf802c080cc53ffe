"""Arguments of Flax and transformers that this package refuses, with their remedies."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

# Arguments that must be None, by their remedies.
_ONLY_NONE = {
    "keep Flax's layer, with attention_fn=flax_mha.attention_fn": (
        "qkv_dot_general out_dot_general qkv_dot_general_cls out_dot_general_cls"
    ),
    "keep Flax's function where an einsum is to be replaced": (
        "einsum_dot_general qk_attn_weights_einsum attn_weights_value_einsum einsum"
    ),
    "give attention_fn": "qk_attn_weights_einsum_cls attn_weights_value_einsum_cls",
    "give dtype": "qkv_promote_dtype out_promote_dtype ln_promote_dtype",
    "set nn.logical_axis_rules": "out_sharding qkv_sharding",
    "give positions": "input_positions",
    "give inputs_k": "inputs_kv",
    "give lengths, or mask=masks.Keys(attention_mask != 0)": "attention_mask",
}
_REMEDIES = {name: remedy for remedy, names in _ONLY_NONE.items() for name in names.split()}


def check_given(owner: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that only Flax's layers have, unless they are None."""
    for name, value in arguments.items():
        if name in _REMEDIES and value is not None:
            got = type(value).__name__
            raise TypeError(f"{owner} takes only {name}=None, got {got}; {_REMEDIES[name]}")


def check_refused(layer: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the call of a layer has no parameter for, unless Flax's are None."""
    owner = type(layer).__name__
    check_given(owner, arguments)
    for name in arguments:
        if name not in _REMEDIES:
            known = names_of(type(layer).__call__) - {"self", "refused"}
            raise TypeError(f"{owner} takes no {name}; give one of {sorted(known)}")


def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters of a function."""
    return frozenset(inspect.signature(function).parameters)
