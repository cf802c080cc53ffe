"""Arguments: refused names, and signatures and docstrings that show all names."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

Described = TypeVar("Described", bound=Any)

_TITLE = r"(?m)^(Args:\n|Attributes:\n)"
# The description of one argument in a docstring with its further lines, and the name in it.
_ENTRY = re.compile(r"^(  \**(\w+): .*(?:\n    .*)*)", re.MULTILINE)

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


def check_known(owner: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse arguments that a function does not have."""
    check_given(owner, given)
    for name in given:
        if name not in known:
            raise TypeError(f"{owner} takes no {name}; give one of {sorted(known)}")


def check_refused(layer: Any, given: Mapping[str, Any]) -> None:
    """Refuse the arguments that a layer's call has no parameter for, but None for those of Flax."""
    if given := {name: x for name, x in given.items() if name not in _REMEDIES or x is not None}:
        known = names_of(type(layer).__call__) - {"self", "refused"}
        check_known(type(layer).__name__, given, known)


def hidden_field(cls: type, name: str) -> TypeError:
    """Return the error for a subclass of a layer that uses the name of a field for its own."""
    return TypeError(
        f"{cls.__name__}.{name} must be the field of this name of flax_mha's layer, got an "
        f"attribute of the subclass; rename it, or write `{name}: Any = …` for another default"
    )


def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def described_as(other: Any) -> Callable[[Described], Described]:
    """Add arguments' descriptions, or sections after them, that a docstring lacks, from another."""

    def decorate(function: Described) -> Described:
        doc, shown = inspect.getdoc(function) or "", function
        if isinstance(function, type):  # Of an nnx module, the signature is that of its metaclass.
            shown = function.__init__  # type: ignore[misc]
        names = inspect.signature(shown).parameters
        theirs = inspect.getdoc(other) or ""
        found = _ENTRY.findall(f"{theirs}\n{doc}")
        entries = {name: entry for entry, name in found}
        before, title, section = re.split(_TITLE, doc, maxsplit=1)
        after = section.partition("\n\n")[2] or re.split(_TITLE, theirs)[-1].partition("\n\n")[2]
        described = "\n".join(entries[name] for name in names if name in entries)
        function.__doc__ = f"{before}{title}{described}\n\n{after}"
        return function

    return decorate
