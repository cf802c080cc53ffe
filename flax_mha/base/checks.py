"""Checks of argument values. Each returns the value in its final form, or raises an error.

The name of the argument comes first. A `remedy` ends the error. Arrays of numbers must be arrays,
but positions, lengths, ids and tokens can also be lists and Python numbers. They become int32 of
NumPy, so that they are static and values beyond int32 are found.
"""

import contextlib
import dataclasses
import difflib
import inspect
import math
import typing
import warnings
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Choice = TypeVar("Choice")
Integers: TypeAlias = jax.Array | np.ndarray

_INT32 = np.iinfo(np.int32)
# Packages that are not the user's code.
_LIBRARIES = ("flax_mha", "flax", "jax")


def array(name: str, x: Any) -> Any:
    """Check that x is an array of numbers."""
    _with_values(name, x)
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        raise TypeError(
            f"{name} must be an array, got {type(x).__name__}; convert it with jnp.asarray"
        )
    if getattr(x.dtype, "kind", "") in "USOMm":
        raise TypeError(f"{name} must be an array of numbers, got {x.dtype}; encode it as numbers")
    return x


def _with_values(name: str, x: Any) -> None:
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name} must be an array, got a jax.ShapeDtypeStruct of {describe(x)}, which has no "
            f"values; call the function under jax.eval_shape"
        )


def floating(name: str, x: Any) -> Any:
    """Check that x is a floating-point array."""
    real(name, array(name, x).dtype)
    return x


def real(name: str, dtype: Any) -> None:
    """Check that a dtype is floating point, not complex, with at least 16 bits."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} must be real, got {dtype}: the softmax of complex scores is not defined; "
            f"give real and imaginary parts as separate features"
        )
    if dtype == jnp.bool_:
        raise TypeError(f"{name} must be floating point, got bool; a mask goes into mask=")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{name} must be floating point, got {dtype}; "
            f"embed token ids (nn.Embed) or cast with .astype(jnp.float32)"
        )
    if jnp.finfo(dtype).bits < 16:
        raise TypeError(
            f"{name} must have at least 16 bits a number, got {dtype}: softmax and sums in it "
            f"would be noise; multiply it with its scale as x.astype(jnp.bfloat16) * scale"
        )


def integers(name: str, x: Any) -> Any:
    """Convert integers to int32, to a NumPy array if their values are static."""
    _with_values(name, x)
    if not isinstance(x, jax.Array | np.ndarray):
        leaves = jax.tree.leaves(x)
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            raise TypeError(
                f"{name} must be integers, got a {type(x).__name__} of arrays; "
                f"stack them with jnp.stack or jnp.asarray"
            )
        try:
            x = np.asarray(x)
            # An empty list is float64 in NumPy.
            x = x if x.size else x.astype(np.int32)
        except ValueError:
            raise TypeError(
                f"{name} must be integers, got {x!r}, which is ragged; pad it to one length"
            ) from None
        if x.dtype == object and leaves and all(isinstance(leaf, int) for leaf in leaves):
            # No integer dtype of NumPy holds them.
            _fit_int32(name, min(leaves), max(leaves))
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}; cast with .astype(int)")
    x = as_numpy(x)
    if x.dtype == np.int32:
        # Inside jit, a cast would trace a static array.
        return x
    if x.dtype in (np.int64, np.uint64, np.uint32) and x.size and is_concrete(x):
        values = np.asarray(x)
        _fit_int32(name, int(values.min()), int(values.max()))
    return x.astype(np.int32)


def _fit_int32(name: str, least: int, most: int) -> None:
    if least < _INT32.min or most > _INT32.max:
        wrong = most if most > _INT32.max else least
        raise ValueError(
            f"{name} must fit int32, got {wrong}, which would wrap; number them from 0"
        )


def integer(name: str, x: Any, least: int = 0, most: int = _INT32.max) -> int:
    """Check that x is a static integer in a range, and return it as an int."""
    static(name, x)
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name} must be an int, got {x!r} of {type(x).__name__}")
    if not least <= x <= most:
        raise ValueError(f"{name} must be in {least} … {most}, got {x}")
    return int(x)


def sizes(name: str, x: Any) -> tuple[int, ...]:
    """Check that x is a tuple of sizes, and return them as ints."""
    if not isinstance(x, tuple | list):
        raise TypeError(
            f"{name} must be a tuple of sizes, got {describe(x)}; give (2,) for one axis"
        )
    return tuple(integer(name, size) for size in x)


def is_concrete(x: Any) -> bool:
    """Tell if this host can read the values of x."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def within(name: str, x: Any, end: int | None, remedy: str) -> None:
    """Check that integers are at least 0 and below `end`, if their values are static."""
    if not x.size or not is_concrete(x):
        return
    # JAX would trace operations on static values too.
    values = np.asarray(x)
    least, most = int(values.min()), int(values.max())
    if least < 0 or (end is not None and most >= end):
        span = "at least 0" if end is None else f"in 0 … {end - 1}"
        raise ValueError(f"{name} must be {span}, got {least if least < 0 else most}; {remedy}")


def as_numpy(x: Any) -> Any:
    """Convert a replicated JAX array to NumPy if this host has its values.

    The values are then static even in the closure of a jitted function, so that kernels skip tiles
    and XLA folds no constants. Outside jit, this waits for the array. Sharded arrays stay as they
    are.
    """
    if isinstance(x, jax.Array) and is_concrete(x) and x.is_fully_replicated:
        return np.asarray(x)
    return x


def static(name: str, x: Any) -> Any:
    """Check that a setting, which the compiled program depends on, is not traced."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a constant, got a traced array {x.aval.str_short()}; "
            f"pass a Python value, or make the argument static (jax.jit's static_argnames)"
        )
    return x


def number(name: str, x: Any) -> float:
    """Check that x is a finite real number, and return it as a float."""
    static(name, x)
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {x!r} of {type(x).__name__}")
    if not math.isfinite(x):
        raise ValueError(f"{name} must be finite, got {x}")
    return float(x)


def positive(**sizes: Any) -> None:
    """Check that sizes are positive integers."""
    for name, size in sizes.items():
        static(name, size)
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {size!r} of {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
        if size > _INT32.max:
            raise ValueError(f"{name} must fit int32, got {size}; use a smaller size")


def optional(**sizes: Any) -> None:
    """Check that sizes are positive integers or None."""
    positive(**{name: size for name, size in sizes.items() if size is not None})


def rate(name: str, x: Any) -> None:
    """Check that a dropout rate is at least 0 and below 1."""
    if not 0.0 <= number(name, x) < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {x}; 0 turns dropout off")


def flag(name: str, x: Any) -> bool:
    """Check that x is True or False, and return it as a bool."""
    static(name, x)
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {x!r} of {type(x).__name__}")
    return bool(x)


def dtype(name: str, x: Any, narrow: tuple[str, ...] = ()) -> jnp.dtype:
    """Return x as a dtype, floating with at least 16 bits or one of `narrow`."""
    parsed = None
    # `jnp.dtype` would take an array.
    if isinstance(x, str | type | np.dtype) or not hasattr(x, "dtype"):
        with contextlib.suppress(TypeError, ValueError):
            parsed = jnp.dtype(x)
    if x is None or parsed is None:
        raise TypeError(
            f"{name} must be a dtype, got {x!r}; give one such as jnp.float32 or 'bfloat16'"
        )
    # JAX does not promote floats of fewer bits.
    is_wide = jnp.issubdtype(parsed, jnp.floating) and jnp.finfo(parsed).bits >= 16
    if not is_wide and parsed.name not in narrow:
        rule = " or ".join(("a floating dtype with at least 16 bits a number", *narrow))
        raise TypeError(f"{name} must be {rule}, got {parsed}; give jnp.bfloat16, for example")
    return parsed


def precision(name: str, x: Any) -> None:
    """Check that x is a matmul precision that JAX knows."""
    try:
        jax.eval_shape(
            lambda a: jax.lax.dot(a, a, precision=x), jax.ShapeDtypeStruct((1, 1), jnp.float32)
        )
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be a jax.lax.Precision or its name, got {x!r}; give 'highest', for "
            f"example, or None for the default"
        ) from None


def fields(module: Any) -> None:
    """Check the fields of a module that its names and annotations describe."""
    for field in dataclasses.fields(module):
        name, x = field.name, getattr(module, field.name)
        # Flax's default dtype is None whatever the annotation says, which may be a string.
        unknown = isinstance(field.type, str) or name.endswith("dtype")
        if x is None and (unknown or type(None) in typing.get_args(field.type)):
            continue
        if field.type is bool or field.type == bool | None:
            flag(name, x)
        elif name.endswith("dtype"):
            dtype(name, x)
        elif name.endswith("_init"):
            remedy = "give one of flax.linen.initializers"
            function(name, x, "(key, shape, dtype) -> array", remedy, 3)
        elif name == "precision":
            precision(name, x)
        elif name.endswith("rate"):
            rate(name, x)


def unhandled(module: Any, handled: Collection[str]) -> dict[str, Any]:
    """Return the fields of a module that differ from their defaults and are not in `handled`."""
    fields = {field.name: field.default for field in dataclasses.fields(module)}
    values = {
        name: (getattr(module, name), default)
        for name, default in fields.items()
        if name not in ("parent", "name", *handled)
    }
    return {
        name: value for name, (value, default) in values.items()
        if value is not default and (type(value) is not type(default) or value != default)
    }  # fmt: skip


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
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype == np.uint32:
        with contextlib.suppress(TypeError, ValueError):
            wrapped = jax.eval_shape(jax.random.wrap_key_data, jax.ShapeDtypeStruct(shape, dtype))
            dtype, shape = wrapped.dtype, wrapped.shape
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or shape != ():
        raise TypeError(
            f"{name} must be one JAX key, got {describe(x)}; give jax.random.key(0), for example"
        )
    return x


def function(name: str, x: Any, signature: str, remedy: str, count: int | None = None) -> None:
    """Check that x is a function, not a class, of `count` arguments (default: any number)."""
    if not callable(x) or isinstance(x, type):
        raise TypeError(f"{name} must be a function {signature}, got {x!r}; {remedy}")
    try:
        actual = inspect.signature(x)
    except ValueError:
        return  # Some built-in functions have no signature.
    try:
        actual.bind(*range(count or 0))
    except TypeError:
        if count is not None:
            raise TypeError(
                f"{name} must be a function {signature}, of {count} arguments, got one of "
                f"{actual}; {remedy}"
            ) from None


def arguments(name: str, args: Any) -> tuple[Any, ...]:
    """Check that the other arguments of a user's function are a tuple of arrays or numbers."""
    if not isinstance(args, tuple | list):
        raise TypeError(f"{name} must be a tuple, got {type(args).__name__}; give (x,) for one x")

    def argument(x: Any) -> Any:
        if isinstance(x, float):
            return jnp.asarray(x)  # Gradients are arrays.
        if isinstance(x, int) or (hasattr(x, "dtype") and hasattr(x, "shape")):
            return x
        raise TypeError(
            f"{name} must be arrays or numbers, got {x!r} of {type(x).__name__}; keep other "
            f"values in the function"
        )

    return tuple(jax.tree.map(argument, tuple(args)))


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
