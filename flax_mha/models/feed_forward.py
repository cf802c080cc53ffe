"""The feed-forward branch of a block, and dropout."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer, PrecisionLike
from jax.ad_checkpoint import checkpoint_name

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.kernels import Capture
from flax_mha.layer.linear import default_bias_init, default_kernel_init, projection
from flax_mha.sharding import products
from flax_mha.taps.tap import tap_of

Activation: TypeAlias = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Activation] = {
    "gelu": nn.gelu, "gelu_exact": functools.partial(nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x), "relu": nn.relu, "silu": nn.silu,
}  # fmt: skip


class MLP(nn.Module):
    """An MLP, act(x W_up) W_down, or gated, (act(x W_gate) ⊙ (x W_up)) W_down.

    Attributes:
      hidden: the number of hidden features.
      activation: "gelu" (by tanh, JAX's default), "gelu_exact" (by erf, PyTorch's default),
        "quick_gelu" (x·σ(1.702·x)), "relu", "silu", or a function.
      gated: True to multiply by an activated gate (GEGLU, SwiGLU).
      dropout_rate: the dropout rate of the hidden features.
      use_bias: True if the projections have biases.
      kernel_init: the initializer of the kernels.
      bias_init: the initializer of the biases.
      dtype: the dtype of the computation (default: promoted from inputs and parameters).
      param_dtype: the dtype of the parameters.
      precision: the precision of matmuls (see `jax.lax.Precision`).
      partitioned: True to box the parameters with their logical axis names.
      capture: the tensors to sow; the MLP has "mlp_pre", the features before the activation.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020 (gated).
    """

    hidden: int
    activation: str | Activation = "gelu"
    gated: bool = False
    dropout_rate: float = 0.0
    use_bias: bool = True
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    partitioned: bool = False
    capture: Capture | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Apply the MLP to x [*B, T, D], with dropout unless `deterministic`."""
        checks.positive(hidden=self.hidden)
        checks.fields(self)
        shapes.check_features("x", x)
        act = activation(self.activation)
        dense = functools.partial(projection, self, biased=self.use_bias)
        hidden = ((self.hidden,), ("embed", "mlp"))
        (x,) = products.joined(x) if self.gated else (x,)
        up = dense("up", *hidden)(x)
        pre = dense("gate", *hidden)(x) if self.gated else up
        pre = tap_of(self, self.capture).last("mlp_pre", pre)
        h = act(pre) * checkpoint_name(up, "mlp_pre") if self.gated else act(pre)
        h = checkpoint_name(sharding.constrain(h, ("batch", "length", "mlp")), "mlp_hidden")
        h = Dropout(self.dropout_rate)(h, deterministic=deterministic)
        rows = ("batch", "norm_length")
        return dense("down", x.shape[-1:], ("mlp", "embed"), rows=rows)(h)


def activation(act: str | Activation) -> Activation:
    """Return an activation function, given its name or the function itself."""
    return act if callable(act) else checks.choice("activation", act, ACTIVATIONS)


class Dropout(nn.Module):
    """A dropout layer with the bits of `nn.Dropout`, on any mesh."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool | None) -> jax.Array:
        """Drop a share of x unless deterministic, and scale the rest."""
        if self.rate and deterministic is None:
            raise ValueError(
                f"deterministic must be a bool with dropout_rate={self.rate}, got None; give "
                f"deterministic=False in training, True elsewhere"
            )
        if self.rate == 0 or checks.flag("deterministic", deterministic):
            return x
        keep = jax.random.bernoulli(self.make_rng("dropout"), 1 - self.rate, x.shape)
        # bfloat16 has no 0.999 to divide by.
        scaled = (x.astype(shapes.wide(x.dtype)) / (1 - self.rate)).astype(x.dtype)
        return jnp.where(sharding.like(keep, x), scaled, 0)
