"""The feed-forward half of a block, and dropout."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer, PrecisionLike

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.layer.linear import default_bias_init, default_kernel_init, projection

Activation: TypeAlias = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Activation] = {
    "gelu": nn.gelu,
    "gelu_exact": functools.partial(nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "relu": nn.relu,
    "silu": nn.silu,
}


class MLP(nn.Module):
    """act(x W_up) W_down; with `gated`, (act(x W_gate) ⊙ (x W_up)) W_down.

    Attributes:
      hidden: features between the two products.
      activation: "gelu", JAX's, by tanh; "gelu_exact", by erf, as PyTorch's and so that of most
        checkpoints; "quick_gelu", x·σ(1.702·x), of CLIP; "relu", "silu"; or a function.
      gated: one more product, whose activation scales the first (GEGLU, SwiGLU).
      dropout_rate: of the hidden features.
      use_bias: whether the products have biases.
      kernel_init: initializer of the kernels.
      bias_init: initializer of the biases.
      dtype: of the computation (default: promoted from inputs and parameters).
      param_dtype: of the parameters.
      precision: of the products, see `jax.lax.Precision`.
      partitioned: box the parameters with their logical axis names.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, for the gated form.
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

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Map [*B, T, D] to [*B, T, D]; deterministic must be given if something is dropped."""
        checks.positive(hidden=self.hidden)
        checks.fields(self)
        shapes.check_features("x", x)
        act = activation(self.activation)
        dense = functools.partial(projection, self, biased=self.use_bias)
        hidden, names = (self.hidden,), ("embed", "mlp")
        up = dense("up", hidden, names)(x)
        h = act(dense("gate", hidden, names)(x)) * up if self.gated else act(up)
        h = sharding.constrain(h, ("batch", "length", "mlp"))
        h = Dropout(self.dropout_rate)(h, deterministic=deterministic)
        rows = ("batch", "norm_length")
        return dense("down", x.shape[-1:], ("mlp", "embed"), rows=rows)(h)


def activation(act: str | Activation) -> Activation:
    """Return the function of that name, or the function itself."""
    if isinstance(act, str) or not callable(act):
        return checks.choice("activation", act, ACTIVATIONS)
    checks.function("activation", act, "x -> y", f"or give one of {sorted(ACTIVATIONS)}", 1)
    return act


class Dropout(nn.Module):
    """`nn.Dropout`, with its bits, on any mesh."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool | None) -> jax.Array:
        """Set a share of x to 0, and scales the rest to keep the expectation.

        Raises:
          ValueError: if there is something to drop, and deterministic does not say whether.
        """
        if self.rate and deterministic is None:
            raise ValueError(
                f"dropout_rate={self.rate} needs to know whether to drop, got deterministic=None; "
                f"give deterministic=False in training, True elsewhere"
            )
        if self.rate == 0 or checks.flag("deterministic", deterministic):
            return x
        keep = jax.random.bernoulli(self.make_rng("dropout"), 1 - self.rate, x.shape)
        return jnp.where(sharding.like(keep, x), x / (1 - self.rate), 0)
