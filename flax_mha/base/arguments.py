"""Names of arguments that are refused."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

# Arguments of Flax's layers and of transformers that must be None, by their remedies.
_NONE_ALONE = {
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
_REMEDIES = {name: remedy for remedy, names in _NONE_ALONE.items() for name in names.split()}


def check_given(owner: str, given: Mapping[str, Any]) -> None:
    """Refuse values of arguments that Flax's layers alone have."""
    for name, value in given.items():
        if name in _REMEDIES and value is not None:
            got = type(value).__name__
            raise TypeError(f"{owner} takes {name}=None alone, got {got}; {_REMEDIES[name]}")


def check_refused(layer: Any, given: Mapping[str, Any]) -> None:
    """Refuse the arguments that a layer's call has no parameter for, but None for those of Flax."""
    owner = type(layer).__name__
    check_given(owner, given)
    for name in given:
        if name not in _REMEDIES:
            known = names_of(type(layer).__call__) - {"self", "refused"}
            raise TypeError(f"{owner} takes no {name}; give one of {sorted(known)}")


def hidden_field(cls: type, name: str) -> TypeError:
    """Return the error for a subclass of a layer that uses the name of a field for its own."""
    return TypeError(
        f"{cls.__name__}.{name} must be the field of this name of flax_mha's layer, got an "
        f"attribute of the subclass; rename it, or write `{name}: Any = …` for another default"
    )


def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)
