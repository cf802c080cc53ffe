"""Identities that JAX differentiates only as far as a kernel's derivative rule goes."""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# What is left for derivatives of derivatives, see `derivatives.Limit`.
_LEFT = {"first": "none", "reverse": "reverse", "inner": None}


def _refuse(*_: Any, kernel: str, asked: str = "forward mode (jax.jvp)", **__: Any) -> Any:
    raise TypeError(
        f"kernel must be 'checkpointed' or 'reference' for {asked}, got {kernel!r}; "
        f"name one of these, or compute within flax_mha.kernels.any_derivative()"
    )


def _differentiate(primals: Any, tangents: Any, allowed: str, kernel: str) -> tuple[Any, Any]:
    """Return x under the next limit, and a tangent that refuses forward mode."""
    (x,), (tangent,) = primals, tangents
    if allowed == "none":
        _refuse(kernel=kernel, asked="derivatives of derivatives")
    left = _LEFT[allowed]
    x = x if left is None else limited.bind(x, allowed=left, kernel=kernel)
    if isinstance(tangent, ad.Zero):
        return x, tangent
    return x, transposed.bind(tangent, kernel=kernel)


# Binds x [...]; parameters `allowed` and `kernel`.
limited = Primitive("limited_derivatives")
limited.def_impl(lambda x, **_: x)
limited.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[limited] = _differentiate
batching.defvectorized(limited)
mlir.register_lowering(limited, lambda _, x, **__: [x])

# Reverse mode does no more with it than transpose it; all that forward mode does raises.
transposed = Primitive("reverse_mode_only")
transposed.def_impl(_refuse)
transposed.def_abstract_eval(lambda x, **_: x)
ad.primitive_transposes[transposed] = lambda cotangent, *_, **__: [cotangent]
ad.primitive_jvps[transposed] = _refuse
batching.primitive_batchers[transposed] = _refuse
mlir.register_lowering(transposed, _refuse)
