"""A check that a program is lowered only for the platform that its kernels were chosen for."""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# The identity of x, for JAX's name of a platform.
only_on = Primitive("only_on")
only_on.def_impl(lambda x, platform: x)
only_on.def_abstract_eval(lambda x, platform: x)
ad.deflinear2(only_on, lambda cotangent, x, platform: [only_on.bind(cotangent, platform=platform)])
batching.defvectorized(only_on)


def _lower(context: Any, x: Any, *, platform: str) -> list[Any]:
    found = [*context.module_context.platforms]
    if any({"cuda": "gpu"}.get(name, name) != platform for name in found):
        raise ValueError(
            f"a program with attention on {platform} must be lowered only for it, got {found}; "
            f"export one program for each platform, each within "
            f"flax_mha.kernels.use(platform=flax_mha.Platform(…))"
        )
    return [x]


mlir.register_lowering(only_on, _lower)
