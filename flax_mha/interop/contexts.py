"""Linen models whose methods run within a context."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import flax.linen as nn

Model = TypeVar("Model", bound=nn.Module)


def within(model: Model, context: Callable[..., AbstractContextManager[Any]], *args: Any) -> Model:
    """Return a model whose methods run within `context(cls, *args)`.

    Args:
      model: a linen module.
      context: a function of the model's new class `cls`, a subclass with the same fields, that
        returns a context manager. Models pickle if it is at module level.
      *args: more arguments. Equal models and arguments give equal models.
    """
    cls: Any = type(model)
    try:
        subclass = _equal_class(cls, context, *args)
    except TypeError:  # Arguments such as a mask with arrays have no hash.
        subclass = _class_within(cls, context, *args)
    return cast(Model, subclass(**_values(model)))


def _values(model: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(model) if field.init]
    return {name: getattr(model, name) for name in names if name != "parent"}


def _class_within(cls: Any, context: Callable[..., AbstractContextManager[Any]], *args: Any) -> Any:
    """Return a subclass of a model's class whose methods run within a context."""

    def run_within(method: Callable[..., Any]) -> Callable[..., Any]:
        @nn.nowrap
        @functools.wraps(method)
        def run(*inputs: Any, **kwargs: Any) -> Any:
            with context(subclass, *args):
                return method(*inputs, **kwargs)

        return run

    def reduce(model: Any) -> Any:
        # Pickle finds no such class by its name.
        return within, (cls(**_values(model)), context, *args)

    # Functions that are defaults of fields aren't methods.
    fields = {field.name for field in dataclasses.fields(cls)}
    public = {x for x in dir(cls) if x == "__call__" or not hasattr(nn.Module, x)} - fields
    methods = [x for x in sorted(public) if inspect.isfunction(inspect.getattr_static(cls, x))]
    # These two may call a function that is no method: apply(…, method=function).
    methods += ["apply", "init_with_output"]
    entries = {name: getattr(cls, name) for name in ("__module__", "__eq__", "__hash__")}
    entries["__reduce__"] = nn.nowrap(reduce)
    entries |= {name: run_within(getattr(cls, name)) for name in methods}
    subclass = type(cls.__name__, (cls,), entries)
    return subclass


_equal_class = functools.cache(_class_within)
