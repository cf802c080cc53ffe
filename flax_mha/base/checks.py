"""Checks of argument values. Each returns the value in its final form, or raises an error.

Positions, lengths, ids and tokens can be lists and Python numbers. They become int32 of NumPy, so
that they are static.
"""

import dataclasses
import difflib
import inspect
import math
import warnings
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Choice = TypeVar("Choice")

# Packages that are not the user's code.
_LIBRARIES = ("flax_mha", "flax", "jax")


def array(name: str, x: Any) -> Any:
    """Check that x is an array."""
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        raise TypeError(
            f"{name} must be an array, got {type(x).__name__}; convert it with jnp.asarray"
        )
    return x


def floating(name: str, x: Any) -> Any:
    """Check that x is real floating point, with at least 16 bits."""
    dtype = array(name, x).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{name} must be floating point, got {dtype}; embed token ids (nn.Embed), give a mask "
            f"as mask=, or cast with .astype(jnp.float32)"
        )
    if jnp.finfo(dtype).bits < 16:
        raise TypeError(
            f"{name} must have at least 16 bits a number, got {dtype}: softmax and sums in it "
            f"would be noise; multiply it with its scale as x.astype(jnp.bfloat16) * scale"
        )
    return x


def integers(name: str, x: Any) -> Any:
    """Convert integers to int32, to a NumPy array if their values are static."""
    if not isinstance(x, jax.Array | np.ndarray):
        x = np.asarray(x)
        # An empty list is float64 in NumPy.
        x = x if x.size else x.astype(np.int32)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}; cast with .astype(int)")
    x = as_numpy(x)
    if x.dtype == np.int32:
        # Inside jit, a cast would trace a static array.
        return x
    within(name, x, 2**31, "they must fit int32, so number them from 0", -(2**31))
    return x.astype(np.int32)


def integer(name: str, x: Any, least: int = 0, most: int | None = None) -> int:
    """Check that x is a static integer in a range, and return it as an int."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name} must be an int, got {describe(x)}")
    if x < least or (most is not None and x > most):
        rule = f"at least {least}" if most is None else f"in {least} … {most}"
        raise ValueError(f"{name} must be {rule}, got {x}")
    return int(x)


def is_concrete(x: Any) -> bool:
    """Tell if this host can read the values of x."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def within(name: str, x: Any, end: int | None, remedy: str, least: int = 0) -> None:
    """Check that integers are at least `least` and below `end`, if their values are static."""
    if not x.size or not is_concrete(x):
        return
    # JAX would trace operations on static values too.
    values = np.asarray(x)
    wrong = values[(values < least) | (False if end is None else values >= end)]
    if wrong.size:
        span = f"at least {least}" if end is None else f"in {least} … {end - 1}"
        raise ValueError(f"{name} must be {span}, got {wrong[0]}; {remedy}")


def as_numpy(x: Any) -> Any:
    """Convert a replicated JAX array to NumPy if this host has its values.

    They are then static even in the closure of a jitted function, so that kernels skip tiles.
    """
    if isinstance(x, jax.Array) and is_concrete(x) and x.is_fully_replicated:
        return np.asarray(x)
    return x


def number(name: str, x: Any) -> float:
    """Check that x is a finite real number, and return it as a float."""
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {describe(x)}")
    if not math.isfinite(x):
        raise ValueError(f"{name} must be finite, got {x}")
    return float(x)


def positive(**sizes: Any) -> None:
    """Check that sizes are positive integers."""
    for name, size in sizes.items():
        integer(name, size, 1)


def optional(**sizes: Any) -> None:
    """Check that sizes are positive integers or None."""
    positive(**{name: size for name, size in sizes.items() if size is not None})


def rate(name: str, x: Any) -> None:
    """Check that a dropout rate is at least 0 and below 1."""
    if not 0.0 <= number(name, x) < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {x}; 0 turns dropout off")


def flag(name: str, x: Any) -> bool:
    """Check that x is True or False, and return it as a bool."""
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {describe(x)}")
    return bool(x)


def dtype(name: str, x: Any, narrow: tuple[str, ...] = ()) -> jnp.dtype:
    """Return x as a dtype, floating with at least 16 bits or one of `narrow`."""
    # NumPy reads None as float64.
    parsed = jnp.dtype(bool if x is None else x)
    # JAX does not promote floats of fewer bits.
    is_wide = jnp.issubdtype(parsed, jnp.floating) and jnp.finfo(parsed).bits >= 16
    if not is_wide and parsed.name not in narrow:
        rule = " or ".join(("a floating dtype with at least 16 bits a number", *narrow))
        raise TypeError(f"{name} must be {rule}, got {parsed}; give jnp.bfloat16, for example")
    return parsed


def fields(module: Any) -> None:
    """Check the fields of a module that are flags, dtypes and rates."""
    for field in dataclasses.fields(module):
        name, x = field.name, getattr(module, field.name)
        if x is None:
            continue
        if field.type in (bool, bool | None):
            flag(name, x)
        elif name.endswith("dtype"):
            dtype(name, x)
        elif name.endswith("rate"):
            rate(name, x)


def unhandled(module: Any, handled: Collection[str]) -> dict[str, Any]:
    """Return the fields of a module that differ from their defaults and are not in `handled`."""
    values = {}
    for field in dataclasses.fields(module):
        value, default = getattr(module, field.name), field.default
        is_default = value is default or (type(value) is type(default) and value == default)
        if not is_default and field.name not in ("parent", "name", *handled):
            values[field.name] = value
    return values


def choice(name: str, value: Any, choices: dict[str, Choice]) -> Choice:
    """Return the entry of `choices` for a name, or raise an error that lists the names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {sorted(choices)}, got {value!r}")
    return choices[value]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a remedy with the three names most like a wrong one."""
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return f"give {' or '.join(map(repr, close))} (of {len(known)})" if close else "there are none"


def key(name: str, x: Any) -> jax.Array:
    """Check that x is one key of `jax.random.key` or `jax.random.PRNGKey`."""
    dtype = getattr(x, "dtype", np.dtype(bool))
    rank = 0 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else 1
    if (rank == 1 and dtype != np.uint32) or x.ndim != rank:
        raise TypeError(
            f"{name} must be one JAX key, got {describe(x)}; give jax.random.key(0), for example"
        )
    return x


def arguments(args: Any) -> tuple[Any, ...]:
    """Return the arguments of a user's function, with floats as arrays, as their gradients are."""
    return tuple(jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, float) else x, tuple(args)))


def warn(message: str) -> None:
    """Warn at the line of the user's code that called this package."""
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def describe(x: Any) -> str:
    """Return a value as errors show it, an array by its dtype and shape."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype} {tuple(x.shape)}"
    return "None" if x is None else f"{x!r} of {type(x).__name__}"
