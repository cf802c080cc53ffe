"""Transformer blocks around the attention layer."""

from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer, PrecisionLike

from flax_mha import masks, shapes, sharding
from flax_mha.attention import MultiHeadAttention
from flax_mha.projections import Projection, default_bias_init, default_kernel_init

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": nn.gelu,
    "relu": nn.relu,
    "silu": nn.silu,
}
NORMS: dict[str, Callable[..., nn.Module]] = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
Choice = TypeVar("Choice")


class MLP(nn.Module):
    """act(x W_up) W_down; with `gated`, (act(x W_gate) ⊙ (x W_up)) W_down.

    Attributes:
      hidden: features between the two products.
      activation: "gelu", "relu" or "silu".
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
    activation: str = "gelu"
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
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Maps [*B, T, D] to [*B, T, D]."""
        shapes.check_positive(hidden=self.hidden)
        shapes.check_rate("dropout_rate", self.dropout_rate)
        act = choose("activation", self.activation, ACTIVATIONS)
        up = self._dense("up", self.hidden, ("embed", "mlp"))(x)
        if self.gated:
            h = act(self._dense("gate", self.hidden, ("embed", "mlp"))(x)) * up
        else:
            h = act(up)
        h = sharding.constrain(h, ("batch", "length", "mlp"))
        h = Dropout(self.dropout_rate)(h, deterministic=deterministic)
        rows = ("batch", "norm_length")
        return self._dense("down", x.shape[-1], ("mlp", "embed"), rows=rows)(h)

    def _dense(
        self, name: str, features: int, names: sharding.LogicalNames, **more: Any
    ) -> Projection:
        return Projection(
            (features,), names, kernel_init=self.kernel_init,
            bias_init=self.bias_init if self.use_bias else None, dtype=self.dtype,
            param_dtype=self.param_dtype, precision=self.precision, partitioned=self.partitioned,
            name=name, **more,
        )  # fmt: skip


class Dropout(nn.Module):
    """`nn.Dropout`, with its bits, on any mesh."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
        """Sets a share of x to 0, and scales the rest to keep the expectation."""
        if self.rate == 0 or deterministic:
            return x
        keep = jax.random.bernoulli(self.make_rng("dropout"), 1 - self.rate, x.shape)
        return jnp.where(sharding.like(keep, x), x / (1 - self.rate), 0)


class EncoderBlock(nn.Module):
    """Self-attention and an MLP, each with a norm and a residual.

        pre-norm:   x ← x + attention(norm(x));   x ← x + mlp(norm(x))
        post-norm:  x ← norm(x + attention(x));   x ← norm(x + mlp(x))

    Attributes:
      attention: the layer, with all its options. Dtypes, precision, initializers, biases and
        partitioning of the MLP and the norms are those of the layer.
      mlp_dim: hidden features of the MLP.
      norm: "layernorm" or "rmsnorm".
      pre_norm: where the norms stand, see above.
      activation: of the MLP: "gelu", "relu" or "silu".
      gated: whether the MLP is gated.
      dropout_rate: of the hidden features and of what is added to each residual (the weights'
        own is the layer's `dropout_rate`).
      remat: recompute the block in the backward pass instead of storing its insides.

    Sources: Vaswani et al., 2017 (post-norm); Xiong et al., "On Layer Normalization in the
    Transformer Architecture", 2020 (pre-norm).
    """

    attention: MultiHeadAttention
    mlp_dim: int
    norm: str = "layernorm"
    pre_norm: bool = True
    activation: str = "gelu"
    gated: bool = False
    dropout_rate: float = 0.0
    remat: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: masks.MaskLike | None = None,
        bias: jax.Array | None = None,
        positions: jax.Array | None = None,
        head_mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
        deterministic: bool = True,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Maps [*B, T, D] to [*B, T, D]; arguments as for `MultiHeadAttention`.

        A layer whose `deterministic` field is set keeps to that.
        """

        def run(block: "EncoderBlock", x: jax.Array) -> jax.Array:
            return block._run(
                x, deterministic, mask=mask, bias=bias, positions=positions,
                head_mask=head_mask, lengths=lengths, sow_weights=sow_weights,
            )  # fmt: skip

        return (nn.remat(run) if self.remat else run)(self, x)

    def _run(self, x: jax.Array, deterministic: bool, **call: Any) -> jax.Array:
        layer = self.attention
        check_module("attention", layer, MultiHeadAttention)
        mlp = MLP(
            self.mlp_dim, self.activation, self.gated, self.dropout_rate, layer.use_bias,
            layer.kernel_init, layer.bias_init, layer.dtype, layer.param_dtype, layer.precision,
            layer.partitioned, name="mlp",
        )  # fmt: skip
        layer_deterministic = deterministic if layer.deterministic is None else None
        branches: dict[str, Callable[[jax.Array], jax.Array]] = {
            "attention": lambda x: layer(x, deterministic=layer_deterministic, **call),
            "mlp": lambda x: mlp(x, deterministic=deterministic),
        }
        x = sharding.constrain(x, ("batch", "norm_length", None))
        for name, branch in branches.items():
            norm = make_norm(self.norm, f"{name}_norm", layer)
            dropout = Dropout(self.dropout_rate, name=f"{name}_dropout")
            y = branch(norm(x)) if self.pre_norm else branch(x)
            if y.shape != x.shape:
                raise ValueError(
                    f"{name} must keep the shape of its input {x.shape} for the residual, got "
                    f"{y.shape}; leave out_features unset and project_out on"
                )
            x = x + dropout(y, deterministic=deterministic)
            if not self.pre_norm:
                x = norm(x)
            x = sharding.constrain(x, ("batch", "norm_length", None))
        return x


def make_norm(kind: str, name: str, like: MultiHeadAttention) -> nn.Module:
    """A norm over features, in the dtypes of the attention layer."""
    norm = choose("norm", kind, NORMS)
    return norm(dtype=like.dtype, param_dtype=like.param_dtype, name=name)


def check_module(name: str, module: Any, kind: type[nn.Module]) -> None:
    """The field of that name must be a module of that kind, whose own fields are read."""
    if not isinstance(module, kind):
        raise TypeError(
            f"{name} must be a flax_mha.{kind.__name__}, got {type(module).__name__}; "
            f"build one with the options of yours"
        )


def choose(name: str, value: str, choices: dict[str, Choice]) -> Choice:
    """The choice of that name, or an error that lists them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {sorted(choices)}, got {value!r}")
    return choices[value]
