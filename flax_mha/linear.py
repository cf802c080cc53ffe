"""Linear maps from and to heads as functions of their weights, and several as one product."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.core import meta
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike

from flax_mha import inputs, mesh_axes, shapes, sharding
from flax_mha.shapes import Shape
from flax_mha.sharding import LogicalNames


class Linear(struct.PyTreeNode):
    """y = x·W + b over the last axes of x, with what is needed to compute it on any mesh.

    Attributes:
      kernel: W [*in, *features].
      bias: b [*features], or None.
      names: logical names of W's axes.
      contracted: how many of x's last axes are contracted.
      rows: logical names of the other axes of y.
      dtype: of the computation (default: promoted from x, W and b).
      precision: of the product, see `jax.lax.Precision`.
    """

    kernel: jax.Array
    bias: jax.Array | None
    names: LogicalNames = struct.field(pytree_node=False)
    contracted: int = struct.field(pytree_node=False, default=1)
    rows: LogicalNames = struct.field(pytree_node=False, default=("batch", "length"))
    dtype: Dtype | None = struct.field(pytree_node=False, default=None)
    precision: PrecisionLike = struct.field(pytree_node=False, default=None)

    @property
    def features(self) -> Shape:
        """The axes of y that replace those of x."""
        return self.kernel.shape[self.contracted :]

    @property
    def names_of_result(self) -> LogicalNames:
        """Logical names of y's last axes."""
        return self.rows + gathered(self.names[self.contracted :])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [*B, T, *in] to [*B, T, *features]."""
        x, kernel, bias = promote_dtype(x, self.kernel, self.bias, dtype=self.dtype)
        multiply = functools.partial(jnp.tensordot, axes=self.contracted, precision=self.precision)
        if jax.sharding.get_abstract_mesh().empty:
            return _plus(multiply(x, kernel), bias)

        def product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
            kernel = sharding.constrain(kernel, gathered(self.names))
            y = _columns(multiply, x, [self], kernel) if self.contracted == 1 else None
            y = _rows(multiply, x, self, kernel) if y is None else y
            y = multiply(x, kernel) if y is None else y
            return _plus(y, bias)

        return sharding.auto(product, self.names_of_result, x, kernel, bias)


def fused(x: jax.Array, projections: Sequence[Linear], groups: int) -> list[jax.Array]:
    """Several projections of one input as one product, so that its gradient is one sum too.

    The kernels [D, n, h] are joined along the features of each group of heads, to
    [D, K, Σ (n/K)·h], so that where heads are sharded every device joins its own.

    On a CPU without an ambient mesh they stay separate, which is faster there.

    Args:
      x: [*B, T, D].
      projections: each to features (n, h).
      groups: K, which divides every n.

    Returns:
      One [*B, T, n, h] for each projection.
    """
    # On such a CPU joining the kernels, and splitting what comes out, takes longer than it saves.
    apart = sharding.platform() == "cpu" and jax.sharding.get_abstract_mesh().empty
    if apart or len(projections) == 1:
        return [project(x) for project in projections]
    divided = [sharding.spec(p.kernel.shape, p.names)[1] for p in projections]
    if len(set(divided)) > 1:
        # Key/value heads that are not divided as query heads are can't be joined with those.
        alike = {axes: [i for i, a in enumerate(divided) if a == axes] for axes in divided}
        found: dict[int, jax.Array] = {}
        for part in alike.values():
            some = [projections[i] for i in part]
            fewest = math.gcd(*(p.features[0] for p in some))
            found |= zip(part, fused(x, some, fewest), strict=True)
        return [found[i] for i in range(len(projections))]
    kernels, biases = zip(*((p.kernel, p.bias) for p in projections), strict=True)
    first = projections[0]
    x, *promoted = promote_dtype(x, *kernels, *biases, dtype=first.dtype)

    sizes = [p.features[0] // groups for p in projections]

    def multiply(x: jax.Array, *kernels: jax.Array) -> list[jax.Array]:
        # Groups and heads as they are on this device.
        shards = list(zip(kernels, sizes, strict=True))
        joined = [w.reshape(w.shape[0], w.shape[1] // n, -1) for w, n in shards]
        kernel = jnp.concatenate(joined, axis=-1)
        y = jnp.einsum("...td,dkf->...tkf", x, kernel, precision=first.precision)
        ends = itertools.accumulate(w.shape[-1] for w in joined[:-1])
        parts = jnp.split(y, list(ends), axis=-1)
        return [y.reshape(*x.shape[:-1], *w.shape[1:]) for y, w in zip(parts, kernels, strict=True)]

    def product(x: jax.Array, *parameters: Any) -> list[jax.Array]:
        kernels, biases = parameters[: len(projections)], parameters[len(projections) :]
        constrained = [
            sharding.constrain(w, gathered(p.names))
            for w, p in zip(kernels, projections, strict=True)
        ]
        parts = _columns(multiply, x, projections, *constrained)
        if parts is None:
            parts = multiply(x, *constrained)
        return [_plus(y, bias) for y, bias in zip(parts, biases, strict=True)]

    return sharding.auto(product, [p.names_of_result for p in projections], x, *promoted)


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + shapes.lead(bias, y.ndim)


def _columns(
    multiply: Callable[..., Any], x: jax.Array, projections: Sequence[Linear],
    *kernels: jax.Array,
) -> Any:  # fmt: skip
    """multiply(x, *kernels) from features, if the positions of x are divided; else None.

    Each device brings them together before the product, and sums its gradient over devices only
    for its own: one all-gather, and one reduce-scatter in the backward pass, of all projections.
    """
    if projections[0].rows != ("batch", "length") or x.ndim < 2:
        return None
    at, given = x.ndim - 2, ("batch", "norm_length", None)
    apart = _apart(x.shape, at)
    if not apart:
        return None

    def local(x: jax.Array, *kernels: jax.Array) -> Any:
        return multiply(jax.lax.all_gather(x, apart, axis=at, tiled=True), *kernels)

    pairs = list(zip(projections, kernels, strict=True))
    outs: Any = [((*x.shape[:-1], *w.shape[1:]), p.names_of_result) for p, w in pairs]
    names = [given, *(gathered(p.names) for p in projections)]
    return sharding.local(local, names, outs if len(outs) > 1 else outs[0], x, *kernels)


def _rows(
    multiply: Callable[..., Any], x: jax.Array, projection: Linear, kernel: jax.Array
) -> jax.Array | None:
    """multiply(x, kernel), if it is summed over the devices that divide its positions; else None.

    Each device keeps the sums of its own: one reduce-scatter, and an all-gather backward.
    """
    inner, outer = projection.names[: projection.contracted], projection.names_of_result
    shape = (*x.shape[: -projection.contracted], *projection.features)
    names = [("batch", "length", *inner), gathered(projection.names)]
    over, at = sharding.spec(kernel.shape, names[1]), x.ndim - projection.contracted - 1
    if projection.rows[-1] != "norm_length":
        return None
    apart = _apart(shape, at)
    if not apart or apart != mesh_axes.each(over[0]):
        return None

    def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(multiply(x, kernel), apart, scatter_dimension=at, tiled=True)

    return sharding.local(local, names, (shape, outer), x, kernel)


def _apart(shape: Shape, at: int) -> tuple[str, ...]:
    """The mesh axes that divide positions between the layers, beyond those that do everywhere."""
    found = []
    for name in ("length", "norm_length"):
        axes = sharding.spec(shape[: at + 1], (name,))
        found.append(mesh_axes.each(axes[at]))
    everywhere, between = found
    return between[len(everywhere) :] if between[: len(everywhere)] == everywhere else ()


def gathered(names: LogicalNames) -> LogicalNames:
    """The names of a parameter as products take it: what FSDP has spread is brought together."""
    together = "embed" if mesh_axes.has_rule("embed") else None
    return tuple(None if name == together else name for name in names)


def for_shape(init: Initializer, contracted: int) -> Initializer:
    """Calls init with the shape [in, out] (or [out]), from which it reads its fan-in and -out."""

    def initialize(rng: jax.Array, shape: Shape, dtype: Dtype) -> Any:
        ins, outs = shape[:contracted], shape[contracted:]
        flat = (math.prod(ins), math.prod(outs)) if ins else (math.prod(outs),)
        value = init(rng, flat, dtype)
        if isinstance(value, meta.AxisMetadata):
            return value.replace_boxed(_array(value).reshape(shape))
        if jnp.shape(inputs.array("what an initializer gives", value)) != flat:
            raise ValueError(
                f"an initializer must give an array of the shape it is asked for, {flat}, got "
                f"{inputs.came(value)}; make it of its second argument"
            )
        return jnp.reshape(value, shape)

    return initialize


def _array(box: meta.AxisMetadata) -> jax.Array:
    # A constraint by names of the final shape would not fit the flat one.
    return box.unbox(apply_constraint=False) if isinstance(box, nn.Partitioned) else box.unbox()
