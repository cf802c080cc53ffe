"""Linear maps, on any mesh, and their parameters in linen."""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict, meta
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike
from jax.tree_util import Partial

from flax_mha import sharding
from flax_mha.base import numerics, shapes, symbols
from flax_mha.base.shapes import Shape
from flax_mha.kernels.chips.tpus import SHORT, SHORTEST
from flax_mha.sharding import LogicalNames, products

default_kernel_init = nn.linear.default_kernel_init
default_bias_init = nn.initializers.zeros_init()

# By the numbers of contracted axes and of axes that replace them. Letters of heads come before
# letters of features: einsum sorts contracted letters, and would copy the kernel otherwise.
_SUMS = {(1, 1): "...d,df->...f", (1, 2): "...td,dnh->...tnh", (2, 1): "...tnv,nvd->...td"}


class Linear(NamedTuple):
    """A linear map y = x·W + b over the last axes of x, on any mesh.

    Attributes:
      kernel: the kernel W [*in, *features].
      bias: the bias b [*features], or None.
      names: the logical names of W's axes.
      contracted: the number of contracted axes, the last ones of x.
      rows: the logical names of the other axes of y.
      dtype: the dtype of the computation (default: promoted from x, W and b).
      precision: the precision of the product, a `jax.lax.Precision`.
      module: the submodule with these parameters, or None. Flax's tools see its calls.
    """

    kernel: jax.Array
    bias: jax.Array | None
    names: LogicalNames
    contracted: int = 1
    rows: LogicalNames = ("batch", "length")
    dtype: Dtype | None = None
    precision: PrecisionLike = None
    module: Any = None

    @property
    def names_of_result(self) -> LogicalNames:
        """The logical names of y's last axes."""
        return self.rows + products.gathered(self.names[self.contracted :])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x·W + b [*B, T, *features], by a call of the submodule if there is one."""
        return self.product(x) if self.module is None else self.module(x)

    def product(self, x: jax.Array) -> jax.Array:
        """Return x·W + b."""
        x, kernel, _ = promote_dtype(x, self.kernel, self.bias, dtype=self.dtype)
        flat = _has_flat_heads(x.shape[: -self.contracted])
        multiply = Partial(_multiply, self.contracted, self.precision, flat)
        if jax.sharding.get_abstract_mesh().empty:
            return _plus(multiply(x, kernel), self.bias, flat)
        between_layers = self.rows[-1] == "norm_length"
        parallel = products.row_parallel if between_layers else products.column_parallel

        def product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
            form = self.names, self.rows, self.contracted
            # Cast here, so that the backward pass keeps the kernel itself.
            kernel = kernel.astype(x.dtype)
            return _plus(products.product(parallel, multiply, *form, x, kernel), bias, flat)

        weights = self.kernel, self.bias
        return sharding.auto(product, self.names_of_result, x, *weights, linear=True)

    def shares(self, x: jax.Array) -> jax.Array:
        """Return each head's share [*B, T, N, D] of the product with x [*B, T, N, Hv]."""

        def share(x: jax.Array, kernel: jax.Array) -> jax.Array:
            x, kernel = promote_dtype(x, kernel, dtype=self.dtype)
            return jnp.einsum("...tnv,nvd->...tnd", x, kernel, precision=self.precision)

        return sharding.auto(share, ("batch", "length", "heads", None), x, self.kernel)

    def join(self, shares: jax.Array, dtype: Dtype) -> jax.Array:
        """Return the sum of the heads' shares, with the bias, in a dtype."""

        def add(shares: jax.Array, bias: jax.Array | None) -> jax.Array:
            total = shares.sum(-2, dtype=shapes.wide(shares.dtype))
            return _plus(total, bias, flat=False).astype(dtype)

        return sharding.auto(add, self.names_of_result, shares, self.bias)


def _has_flat_heads(rows: Shape) -> bool:
    """Tell whether to write heads side by side, as the TPU kernel for short inputs reads them."""
    length = rows[-1] if rows else 1
    is_short = symbols.at_most(length, SHORT) and not symbols.at_most(length, SHORTEST - 1)
    return is_short and sharding.platform() == "tpu"


def _multiply(
    contracted: int, precision: PrecisionLike, flat: bool, x: jax.Array, kernel: jax.Array
) -> jax.Array:
    """Return x·W. With `flat`, heads and their features are one axis of the product."""
    rows, features = x.shape[:-contracted], kernel.shape[contracted:]
    sums = _SUMS[contracted, len(features)]
    if flat:
        x, sums = x.reshape(*rows, -1), _SUMS[1, 1]
        kernel = kernel.reshape(x.shape[-1], -1)
    elif sums == _SUMS[1, 1] and x.dtype.itemsize < 4 and sharding.platform() == "cpu":
        # With more axes of x, JAX 0.12 on CPUs would sum the gradient of the kernel in bfloat16.
        x = x.reshape(-1, x.shape[-1])
    return numerics.einsum(sums, x, kernel, precision=precision).reshape(*rows, *features)


def _plus(y: jax.Array, bias: jax.Array | None, flat: bool) -> jax.Array:
    if bias is None:
        return y
    if flat:
        one_axis = y.reshape(*y.shape[: y.ndim - bias.ndim], -1)
        return numerics.plus(one_axis, bias.reshape(-1)).reshape(y.shape)
    return numerics.plus(y, bias)


class Projection(nn.Module):
    """A `Linear` as a module: Flax's `DenseGeneral`, with named axes.

    `Linear` describes the other fields.

    Attributes:
      kernel_init: the initializer of W, called with the shape [in, out].
      bias_init: the initializer of b, or None for no bias.
      param_dtype: the dtype of the parameters.
      partitioned: True to box the parameters with their logical names.
    """

    features: Shape
    names: LogicalNames
    contracted: int = 1
    rows: LogicalNames = ("batch", "length")
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer | None = default_bias_init
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    partitioned: bool = False

    @nn.nowrap
    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Flax freezes all; qwix notes the einsum of a LoRA in one of its own."""
        if name.endswith("_lora_einsum_str"):
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [*B, T, *in] to [*B, T, *features]."""
        return self.weights(x.shape[-self.contracted :]).product(x)

    @nn.nowrap
    def weights(self, inputs: Shape) -> Linear:
        """Return W [*inputs, *features] and b [*features]. Interceptors see no call."""

        def param(name: str, init: Initializer, inputs: Shape, names: LogicalNames) -> Any:
            shape = (*inputs, *self.features)
            init = sharding.named(for_shape(init, len(inputs)), names, self.partitioned)
            return make_parameter(self, name, init, shape, self.param_dtype)

        kernel, bias = param("kernel", self.kernel_init, inputs, self.names), None
        if self.bias_init is not None:
            bias = param("bias", self.bias_init, (), self.names[len(inputs) :])
        return Linear(
            kernel, bias, self.names, self.contracted, self.rows, self.dtype, self.precision, self
        )


def make_parameter(
    module: nn.Module, name: str, init: Initializer, shape: Shape, dtype: Dtype
) -> Any:  # fmt: skip
    """Return a parameter of a linen module, outside of its methods too."""
    scope: Any = module.scope
    scope = scope.rewound()
    if not scope.has_variable("params", name):
        return scope.param(name, init, shape, dtype)
    # `param` would trace the initializer in each call, to check the shape.
    value = meta.unbox(scope.get_variable("params", name))
    if value is None or isinstance(value, dict | FrozenDict):
        raise TypeError(
            f"the parameter {'/'.join((*scope.path, name))} must be an array, got "
            f"{'None' if value is None else f'a dict with {[*value]}'}; save nn.meta.unbox("
            f"variables) to a checkpoint, without None"
        )
    return value


def projection(
    like: nn.Module, name: str, features: Shape, names: LogicalNames, biased: bool, **fields: Any
) -> Projection:
    """Return a `Projection`. Fields that are not passed are those of the module `like`."""
    same = ("kernel_init", "bias_init", "dtype", "param_dtype", "precision", "partitioned")
    fields = {field: getattr(like, field) for field in same} | fields
    if not biased:
        fields["bias_init"] = None
    return Projection(features, names, name=name, **fields)


def for_shape(init: Initializer, contracted: int) -> Initializer:
    """Return an initializer that calls init with the shape [in, out], whose fans it reads."""

    def initialize(rng: jax.Array, shape: Shape, dtype: Dtype) -> Any:
        ins, outs = shape[:contracted], shape[contracted:]
        flat = (math.prod(ins), math.prod(outs)) if ins else (math.prod(outs),)
        value = init(rng, flat, dtype)
        if isinstance(value, nn.Partitioned):
            # A sharding constraint for the final shape would not fit the flat one.
            return value.replace_boxed(value.unbox(apply_constraint=False).reshape(shape))
        return jnp.reshape(value, shape)

    return initialize
