"""Products of linear maps over a mesh whose devices divide positions between the layers.

As sequence parallelism does beside tensor parallelism: Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from flax_mha import sharding
from flax_mha.base.shapes import Shape
from flax_mha.sharding import LogicalNames, rules


def column_parallel(
    multiply: Callable[..., Any], x: jax.Array, projections: Sequence[Any],
    *kernels: jax.Array,
) -> Any:  # fmt: skip
    """Return multiply(x, *kernels) where the positions of x are divided, else None.

    Each device brings them together before the product, and sums its gradient over devices only
    for its own: one all-gather, and one reduce-scatter in the backward pass, of all projections.
    """
    if projections[0].rows != ("batch", "length") or x.ndim < 2:
        return None
    at, x_names = x.ndim - 2, ("batch", "norm_length", None)
    apart = _apart(x.shape, at)
    if not apart:
        return None

    def local(x: jax.Array, *kernels: jax.Array) -> Any:
        return multiply(jax.lax.all_gather(x, apart, axis=at, tiled=True), *kernels)

    pairs = list(zip(projections, kernels, strict=True))
    outs: Any = [((*x.shape[:-1], *w.shape[1:]), p.names_of_result) for p, w in pairs]
    names = [x_names, *(gathered(p.names) for p in projections)]
    return sharding.local(local, names, outs if len(outs) > 1 else outs[0], x, *kernels)


def row_parallel(
    multiply: Callable[..., Any], x: jax.Array, projection: Any, kernel: jax.Array
) -> jax.Array | None:
    """Return multiply(x, kernel) where the devices that sum it divide its positions, else None.

    Each device keeps the sums of its own: one reduce-scatter, and an all-gather backward.
    """
    inner, outer = projection.names[: projection.contracted], projection.names_of_result
    shape = (*x.shape[: -projection.contracted], *projection.features)
    names = [("batch", "length", *inner), gathered(projection.names)]
    over, at = sharding.spec(kernel.shape, names[1]), x.ndim - projection.contracted - 1
    if projection.rows[-1] != "norm_length":
        return None
    apart = _apart(shape, at)
    if not apart or apart != rules.each(over[0]):
        return None

    def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(multiply(x, kernel), apart, scatter_dimension=at, tiled=True)

    return sharding.local(local, names, (shape, outer), x, kernel)


def _apart(shape: Shape, at: int) -> tuple[str, ...]:
    """Return the mesh axes that divide positions between the layers but not inside them."""
    axes_of = []
    for name in ("length", "norm_length"):
        axes = sharding.spec(shape[: at + 1], (name,))
        axes_of.append(rules.each(axes[at]))
    everywhere, between = axes_of
    return between[len(everywhere) :] if between[: len(everywhere)] == everywhere else ()


def gathered(names: LogicalNames) -> LogicalNames:
    """Return a parameter's names as products take it: with the axis that FSDP divides whole."""
    together = "embed" if rules.has_rule("embed") else None
    return tuple(None if name == together else name for name in names)
