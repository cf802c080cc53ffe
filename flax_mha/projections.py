"""Linear maps as linen modules: their parameters."""

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import Scope
from flax.typing import Dtype, Initializer, PrecisionLike

from flax_mha import sharding
from flax_mha.linear import Linear, answer, for_shape
from flax_mha.shapes import Shape
from flax_mha.sharding import LogicalNames

default_kernel_init = nn.linear.default_kernel_init
default_bias_init = nn.initializers.zeros_init()


class Projection(nn.Module):
    """A `Linear` with parameters of its own: Flax's `DenseGeneral`, with named axes.

    Attributes:
      features: the axes of y that replace those of x.
      names: logical names of W's axes, the contracted ones first.
      contracted: how many of x's last axes are contracted.
      rows: logical names of the other axes of y.
      kernel_init: initializer of W, called with the shape [in, out].
      bias_init: initializer of b; None for no bias.
      dtype: of the computation (default: promoted from x and the parameters).
      param_dtype: of the parameters.
      precision: of the product, see `jax.lax.Precision`.
      partitioned: box the parameters with their names.
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

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [*B, T, *in] to [*B, T, *features]."""
        return answer(self, x, lambda: self.weights(x.shape[-self.contracted :]))

    @nn.nowrap
    def weights(self, inputs: Shape) -> Linear:
        """Return W [*inputs, *features] and b [*features], without the product.

        It is no call to those who listen to the module's calls, as interceptors do.
        """
        # Made by the scope, which needs no method of the module to be running.
        scope = cast(Scope, self.scope).rewound()
        kernel_init = for_shape(self.kernel_init, len(inputs))
        kernel = scope.param(
            "kernel", sharding.named(kernel_init, self.names, self.partitioned),
            (*inputs, *self.features), self.param_dtype,
        )  # fmt: skip
        bias = None
        if self.bias_init is not None:
            names = self.names[len(inputs) :]
            bias_init = sharding.named(for_shape(self.bias_init, 0), names, self.partitioned)
            bias = scope.param("bias", bias_init, self.features, self.param_dtype)
        return Linear(
            kernel, bias, self.names, self.contracted, self.rows, self.dtype, self.precision, self
        )


def projection(
    like: nn.Module, name: str, features: Shape, names: LogicalNames, biased: bool, **fields: Any
) -> Projection:
    """A `Projection` whose other fields are those of a module, or as given."""
    same = ("kernel_init", "bias_init", "dtype", "param_dtype", "precision", "partitioned")
    fields = {field: getattr(like, field) for field in same} | fields
    if not biased:
        fields["bias_init"] = None
    return Projection(features, names, name=name, **fields)
