"""A check that `checkify` finds, and that is nothing elsewhere.

`checkify.check` is an effect of the program that has it: `jit` then leaves its fast path, and each
call goes through Python (on two CPU cores 0.7 ms of a decoding step of 4.4 ms); `nn.scan` refuses
it. This check is a primitive of its own, the identity, which only the interpreter of `checkify`
looks into. The interpreter's rules have no public name: where JAX has changed them, there is no
check, and an overflow shows as NaN and in `free` alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha import private

_MESSAGE = (
    "a cache of {slots} slots has overflowed: its longest row has {length} tokens, or lost some "
    "that are needed; make room for more at init, and ask `free` before a call"
)


def report(overflowed: jax.Array, length: jax.Array, slots: int) -> jax.Array:
    """The same `overflowed`; under `checkify` with user checks an error if it is true of any row.

    Args:
      overflowed: bool [*B].
      length: int32 [*B].
      slots: of each row.
    """
    if private.missing("checkify"):
        return overflowed
    return _reported().bind(overflowed, length, slots=slots)


@functools.cache
def _reported() -> Any:
    """The primitive, with its rules."""
    from jax._src import checkify as checkify_module
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    checkify: Any = checkify_module
    reported = Primitive("cache_overflow")

    @reported.def_impl
    def _(overflowed: jax.Array, length: jax.Array, *, slots: int) -> jax.Array:
        del length, slots
        return overflowed

    @reported.def_abstract_eval
    def _(overflowed: Any, length: Any, *, slots: int) -> Any:
        del length, slots
        return overflowed

    def of_batch(args: Any, dims: Any, *, slots: int) -> tuple[jax.Array, Any]:
        # What is checked does not depend on the order of axes, nor on whether both have them all.
        overflowed, length = args
        return report(overflowed, length, slots), dims[0]

    def discharge(*args: Any, slots: int) -> tuple[Any, jax.Array]:
        # From JAX 0.12 on a context comes first.
        *context, error, enabled, overflowed, length = args
        if checkify.FailedCheckError in enabled:
            values = {"slots": jnp.int32(slots), "length": length.max()}
            failed = checkify.FailedCheckError(checkify.get_traceback(), _MESSAGE, **values)
            error = checkify.assert_func(*context, error, overflowed.any(), failed)
        return error, overflowed

    mlir.register_lowering(reported, lambda _, overflowed, length, *, slots: [overflowed])
    batching.primitive_batchers[reported] = of_batch
    checkify.error_checks[reported] = discharge
    return reported
