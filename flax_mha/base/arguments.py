"""Arguments and fields that do not exist: the new names of old ones, and which there are."""

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

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
    keywords = [p for p in inspect.signature(other).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        positional = sum(p.kind is not p.KEYWORD_ONLY for p in named)
        named[positional:positional] = keywords
        setattr(function, "__signature__", signature.replace(parameters=named))  # noqa: B010
        return function

    return decorate
