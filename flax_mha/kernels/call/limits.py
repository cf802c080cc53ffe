"""Identities that raise an error for derivatives that a kernel does not have."""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# The limit of the derivatives of derivatives, for each `derivatives.Limit`.
_NEXT_LIMIT = {"first": "none", "reverse": "reverse", "inner": None, "forward": "forward"}


def _refuse(*_: Any, kernel: str, asked: str = "forward mode (jax.jvp)", **__: Any) -> Any:
    raise TypeError(
        f"kernel must be 'checkpointed' or 'reference' for {asked}, got {kernel!r}; "
        f"name one of these, or compute within flax_mha.kernels.any_derivative()"
    )


def _differentiate(primals: Any, tangents: Any, allowed: str, kernel: str) -> tuple[Any, Any]:
    """Return x under the next limit, and a tangent that raises an error in the other mode."""
    (x,), (tangent,) = primals, tangents
    if allowed == "none":
        _refuse(kernel=kernel, asked="derivatives of derivatives")
    next_limit = _NEXT_LIMIT[allowed]
    x = x if next_limit is None else limited.bind(x, allowed=next_limit, kernel=kernel)
    mode = forward if allowed == "forward" else transposed
    return x, tangent if isinstance(tangent, ad.Zero) else mode.bind(tangent, kernel=kernel)


def _refuse_reverse(*_: Any, kernel: str) -> Any:
    _refuse(kernel=kernel, asked="gradients of gradients where the mask is traced or irregular")


# The identity of x [...], with parameters `allowed` and `kernel`.
limited = Primitive("limited_derivatives")
ad.primitive_jvps[limited] = _differentiate

# Reverse mode only transposes this identity. The operations of forward mode raise.
transposed = Primitive("reverse_mode_only")
transposed.def_impl(_refuse)
transposed.def_abstract_eval(lambda x, **_: x)
ad.primitive_transposes[transposed] = lambda cotangent, *_, **__: [cotangent]
ad.primitive_jvps[transposed] = _refuse
batching.primitive_batchers[transposed] = _refuse
mlir.register_lowering(transposed, _refuse)

# Forward mode passes through this identity. Transposition, as in reverse mode, raises.
forward = Primitive("forward_mode_only")
ad.deflinear2(forward, _refuse_reverse)

for identity in (limited, forward):
    identity.def_impl(lambda x, **_: x)
    identity.def_abstract_eval(lambda x, **_: x)
    batching.defvectorized(identity)
    mlir.register_lowering(identity, lambda _, x, **__: [x])
