"""Checks of argument names: unknown arguments, and arguments of earlier releases."""

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# Arguments of 0.2, and their replacements.
_RENAMED = {
    "cache_dtype": "cache=CacheConfig(dtype)",
    "cache_window": "cache=CacheConfig(slots=tokens)",
    "capture_heads": "capture=Capture(names, heads=indices)",
    "capture_queries": "capture=Capture(names, queries=indices)",
    "use_out_bias": 'use_bias=("out",), with the names of all projections that have a bias',
}


def check_renamed(owner: str, names: Iterable[str]) -> None:
    """Raise a TypeError, which has the new name, for arguments of earlier releases of `owner`."""
    for name in names:
        if name in _RENAMED:
            raise TypeError(f"{owner} no longer takes {name}; write {_RENAMED[name]}")


def check_known(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise a TypeError for names of arguments that the function `owner` does not have."""
    check_renamed(owner, names)
    for name in names:
        if name not in known:
            raise TypeError(f"{owner} takes no {name}; give one of {sorted(known)}")


def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def with_arguments_of(other: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator that shows another function's keyword arguments instead of `**kwargs`.

    `help` and editors then list the arguments that the function passes on.
    """
    keywords = [p for p in inspect.signature(other).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        positional = sum(p.kind is not p.KEYWORD_ONLY for p in named)
        named[positional:positional] = keywords
        setattr(function, "__signature__", signature.replace(parameters=named))  # noqa: B010
        return function

    return decorate
