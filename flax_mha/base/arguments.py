"""Arguments and fields that do not exist: the new names of old ones, and which there are."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Described = TypeVar("Described", bound=Any)

# The description of one argument in a docstring: the name, and the text with its further lines.
_ENTRY = re.compile(r"^  \**(\w+): (.*(?:\n    .*)*)", re.MULTILINE)

# Names of 0.2, and how to write them now.
_RENAMED = {
    "cache_dtype": "cache=CacheConfig(dtype)",
    "cache_window": "cache=CacheConfig(slots=tokens)",
    "capture_heads": "capture=Capture(names, heads=indices)",
    "capture_queries": "capture=Capture(names, queries=indices)",
    "use_out_bias": 'use_bias=("out",), with the names of all projections that have a bias',
}


def check_renamed(owner: str, names: Iterable[str]) -> None:
    """Refuse names of earlier releases.

    Raises:
      TypeError: that says the new name.
    """
    for name in names:
        if name in _RENAMED:
            raise TypeError(f"{owner} no longer takes {name}; write {_RENAMED[name]}")


def check_known(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse arguments that a function does not have.

    Raises:
      TypeError: that says the new name of an old one, or which there are.
    """
    check_renamed(owner, names)
    for name in names:
        if name not in known:
            raise TypeError(f"{owner} takes no {name}; give one of {sorted(known)}")


def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def with_arguments_of(other: Callable[..., Any]) -> Callable[[Function], Function]:
    """Show the keyword-only arguments of another function, for `help`, in place of **arguments."""
    parameters = inspect.signature(other).parameters.values()
    return _with([p for p in parameters if p.kind is p.KEYWORD_ONLY])


def with_options(options: Any, defaults: Any) -> Callable[[Function], Function]:
    """Show the keys of a TypedDict, for `help`, in place of **options.

    Args:
      options: the TypedDict.
      defaults: an object with defaults as attributes; others are False for a bool, else None.
    """

    def parameter(name: str, kind: Any) -> inspect.Parameter:
        default = getattr(defaults, name, False if kind is bool else None)
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, keyword_only, default=default, annotation=kind)

    return _with([parameter(*key) for key in options.__annotations__.items()])


def _with(keywords: Iterable[inspect.Parameter]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        positional = sum(p.kind is not p.KEYWORD_ONLY for p in named)
        named[positional:positional] = keywords
        setattr(function, "__signature__", signature.replace(parameters=named))  # noqa: B010
        return function

    return decorate


class InitSignature:
    """The signature of a class as its `__init__` has it, where the metaclass hides that one."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")  # An instance is called otherwise.
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        _, *parameters = signature.parameters.values()
        return inspect.Signature(parameters)


def described_as(other: Any) -> Callable[[Described], Described]:
    """Take descriptions of arguments that a docstring lacks from that of another function or class.

    The section of arguments has them in the order of the signature.
    """

    def decorate(function: Described) -> Described:
        doc, names = inspect.getdoc(function) or "", inspect.signature(function).parameters
        entries = dict(_ENTRY.findall(inspect.getdoc(other) or "")) | dict(_ENTRY.findall(doc))
        before, title, section = re.split(r"(?m)^(Args:\n|Attributes:\n)", doc, maxsplit=1)
        _, end, after = section.partition("\n\n")
        described = "\n".join(f"  {name}: {entries[name]}" for name in names if name in entries)
        function.__doc__ = before + title + described + end + after
        return function

    return decorate
