# Over 300 lines: many small functions, each a rule about one kind of argument.
"""What a caller gives, as what is meant by it, or an error that says why it can't be.

One rule for all that is public: numbers that attention computes with (queries, biases, tables) are
floating arrays, for only an array has a dtype to promote from. Whole numbers that say where and
which (positions, lengths, ids, tokens) may be lists and plain numbers too, and are int32 inside:
what is given as a list or in NumPy stays in NumPy, known before tracing, and a value beyond int32
is refused where it can be seen. Settings are constants: never traced arrays.
"""

import contextlib
import dataclasses
import inspect
import math
import typing
import warnings
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Choice = TypeVar("Choice")
Integers: TypeAlias = jax.Array | np.ndarray

_INT32 = np.iinfo(np.int32)
# Through whose code a call of ours may come.
_LIBRARIES = ("flax_mha", "flax", "jax")


def array(name: str, x: Any) -> Any:
    """An array: lists and numbers have no dtype to promote from."""
    _with_values(name, x)
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        raise TypeError(
            f"{name} must be an array, got {type(x).__name__}; convert it with jnp.asarray"
        )
    if getattr(x.dtype, "kind", "") in "USOMm":
        raise TypeError(f"{name} must be an array of numbers, got {x.dtype}; encode it as numbers")
    return x


def _with_values(name: str, x: Any) -> None:
    """An array has values; a `jax.ShapeDtypeStruct` only describes one."""
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name} must be an array, got a jax.ShapeDtypeStruct of {describe(x)}, which has no "
            f"values; call the function under jax.eval_shape"
        )


def floating(name: str, x: Any) -> Any:
    """A real floating-point array: attention is defined on those."""
    real(name, array(name, x).dtype)
    return x


def real(name: str, dtype: Any) -> None:
    """The dtype of an array of real numbers, of 16 bits at least."""
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
    """Whole numbers as int32: a NumPy array if they are known before tracing."""
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
            # An empty list has no numbers to take a dtype from.
            x = x if x.size else x.astype(np.int32)
        except ValueError:
            raise TypeError(
                f"{name} must be integers, got {x!r}, which is ragged; pad it to one length"
            ) from None
        if x.dtype == object and leaves and all(isinstance(leaf, int) for leaf in leaves):
            # Too large for any dtype of NumPy.
            _fit_int32(name, min(leaves), max(leaves))
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}; cast with .astype(int)")
    x = as_numpy(x)
    if x.dtype == np.int32:
        # Inside `jit` a cast would make a known array a traced one.
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
    """One whole number, a constant, in a range."""
    static(name, x)
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name} must be an int, got {x!r} of {type(x).__name__}")
    if not least <= x <= most:
        raise ValueError(f"{name} must be in {least} … {most}, got {x}")
    return int(x)


def sizes(name: str, x: Any) -> tuple[int, ...]:
    """The sizes of some axes."""
    if not isinstance(x, tuple | list):
        raise TypeError(
            f"{name} must be a tuple of sizes, got {describe(x)}; give (2,) for one axis"
        )
    return tuple(integer(name, size) for size in x)


def is_concrete(x: Any) -> bool:
    """Whether the values are there to be read, on this host."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def within(name: str, x: Any, end: int | None, remedy: str) -> None:
    """Where they are known, the integers are at least 0 and below the end, if there is one."""
    if not x.size or not is_concrete(x):
        return
    # In NumPy: while JAX traces, what it computes of known values is traced, too.
    values = np.asarray(x)
    least, most = int(values.min()), int(values.max())
    if least < 0 or (end is not None and most >= end):
        span = "at least 0" if end is None else f"in 0 … {end - 1}"
        raise ValueError(f"{name} must be {span}, got {least if least < 0 else most}; {remedy}")


def as_numpy(x: Any) -> Any:
    """An array of JAX as a NumPy array, if this host has all its values; anything else as it is.

    A constant in the closure of a jitted function would be staged otherwise: nothing would be known
    of it, and XLA would fold at compile time, slowly, what is computed of it. Outside jit this
    waits for the array; nothing there is worth more than knowing which tiles to skip. What is
    divided over a mesh stays where it is.
    """
    if isinstance(x, jax.Array) and is_concrete(x) and x.is_fully_replicated:
        return np.asarray(x)
    return x


def static(name: str, x: Any) -> Any:
    """A setting, which what is compiled depends on: no traced array."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a constant, got a traced array {x.aval.str_short()}; "
            f"give a Python value, or make the argument static (jax.jit's static_argnames)"
        )
    return x


def number(name: str, x: Any) -> float:
    """A finite number, real."""
    static(name, x)
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {x!r} of {type(x).__name__}")
    if not math.isfinite(x):
        raise ValueError(f"{name} must be finite, got {x}")
    return float(x)


def positive(**sizes: Any) -> None:
    """Sizes are positive whole numbers."""
    for name, size in sizes.items():
        static(name, size)
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {size!r} of {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
        if size > _INT32.max:
            raise ValueError(f"{name} must fit int32, got {size}; give a smaller one")


def optional(**sizes: Any) -> None:
    """As `positive`, but None stands for a default."""
    positive(**{name: size for name, size in sizes.items() if size is not None})


def rate(name: str, x: Any) -> None:
    """A dropout rate is a probability below 1: at 1 nothing would be left to rescale."""
    static(name, x)
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {x!r} of {type(x).__name__}")
    if not 0.0 <= x < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {x}; 0 turns dropout off")


def flag(name: str, x: Any) -> bool:
    """A switch: True or False."""
    static(name, x)
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {x!r} of {type(x).__name__}")
    return bool(x)


def dtype(name: str, x: Any, of: str = "a floating dtype") -> jnp.dtype:
    """A real floating dtype, or its name; int8 too where that is among what it is of."""
    parsed = None
    # An array has a dtype and is none.
    if isinstance(x, str | type | np.dtype) or not hasattr(x, "dtype"):
        with contextlib.suppress(TypeError, ValueError):
            parsed = jnp.dtype(x)
    if x is None or parsed is None:
        raise TypeError(
            f"{name} must be a dtype, got {x!r}; give one such as jnp.float32 or 'bfloat16'"
        )
    int8 = parsed == jnp.int8 and "int8" in of
    if not int8 and not jnp.issubdtype(parsed, jnp.floating):
        raise TypeError(f"{name} must be {of}, got {parsed}; give jnp.float32, say")
    if "int8" not in of and jnp.finfo(parsed).bits < 16:
        # In fewer bits numbers can be stored, but JAX promotes them to nothing.
        raise TypeError(
            f"{name} must have at least 16 bits a number, got {parsed}; give jnp.bfloat16, say"
        )
    return parsed


def precision(name: str, x: Any) -> None:
    """A precision of matrix products."""
    try:
        jax.eval_shape(
            lambda a: jax.lax.dot(a, a, precision=x), jax.ShapeDtypeStruct((1, 1), jnp.float32)
        )
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be a jax.lax.Precision or a name of one, got {x!r}; give 'highest', say, "
            f"or None for the default"
        ) from None


def fields(module: Any) -> None:
    """The settings of a module that say by name or type what they must be."""
    for field in dataclasses.fields(module):
        name, x = field.name, getattr(module, field.name)
        if x is None and _takes_none(field):
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


def _takes_none(field: dataclasses.Field[Any]) -> bool:
    # In Flax None stands for a default dtype, whatever the type says. Types of a user's own module
    # may be strings.
    unknown = isinstance(field.type, str) or field.name.endswith("dtype")
    return unknown or type(None) in typing.get_args(field.type)


def choice(name: str, value: Any, choices: dict[str, Choice]) -> Choice:
    """The choice of that name."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {sorted(choices)}, got {value!r}")
    return choices[value]


def key(name: str, x: Any) -> jax.Array:
    """One key for random numbers, of `jax.random.key` or of `jax.random.PRNGKey`."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype == np.uint32:
        with contextlib.suppress(TypeError, ValueError):
            wrapped = jax.eval_shape(jax.random.wrap_key_data, jax.ShapeDtypeStruct(shape, dtype))
            dtype, shape = wrapped.dtype, wrapped.shape
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or shape != ():
        raise TypeError(
            f"{name} must be one JAX key, got {describe(x)}; give jax.random.key(0), say"
        )
    return x


def function(name: str, x: Any, signature: str, remedy: str, count: int | None = None) -> None:
    """A function of so many arguments; a class would be built instead of called."""
    if not callable(x) or isinstance(x, type):
        raise TypeError(f"{name} must be a function {signature}, got {x!r}; {remedy}")
    try:
        actual = inspect.signature(x)
    except ValueError:
        return  # Some that are not written in Python don't tell.
    try:
        actual.bind(*range(count or 0))
    except TypeError:
        if count is not None:
            raise TypeError(
                f"{name} must be a function {signature}, of {count} arguments, got one of "
                f"{actual}; "
                f"{remedy}"
            ) from None


def arguments(name: str, args: Any) -> tuple[Any, ...]:
    """What a user's function is given beside its place: a tuple of arrays or numbers."""
    if not isinstance(args, tuple | list):
        raise TypeError(f"{name} must be a tuple, got {type(args).__name__}; give (x,) for one x")

    def argument(x: Any) -> Any:
        if isinstance(x, float):
            # A gradient has a shape.
            return jnp.asarray(x)
        if isinstance(x, int) or (hasattr(x, "dtype") and hasattr(x, "shape")):
            return x
        raise TypeError(
            f"{name} must be arrays or numbers, got {x!r} of {type(x).__name__}; keep what is "
            f"neither in the function"
        )

    return tuple(jax.tree.map(argument, tuple(args)))


def warn(message: str) -> None:
    """Warns where a caller's own code goes on into ours: once a place, as Python's default is."""
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def describe(x: Any) -> str:
    """A value as an error shows it: an array by its dtype and shape."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype} {tuple(x.shape)}"
    return "None" if x is None else f"{x!r} of {type(x).__name__}"
