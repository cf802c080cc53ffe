"""What transformer blocks share: residuals, norms and an MLP around attention layers."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import flax.linen as nn
import jax

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.cache.sources import Shared
from flax_mha.layer import settings
from flax_mha.linen import MultiHeadAttention
from flax_mha.models.feed_forward import MLP, Activation, Dropout
from flax_mha.sharding import rules

NORMS: dict[str, Callable[..., nn.Module]] = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
Calls: TypeAlias = dict[str, Any]  # by the name of a field, arguments of its call


class Block(nn.Module):
    """What the blocks share: branches (attention layers, then an MLP), each with a residual.

        pre_norm            x ← x + branch(norm(x))
        pre and branch_norm x ← x + norm′(branch(norm(x)))
        branch_norm alone   x ← x + norm′(branch(x))
        neither             x ← norm(x + branch(x))

    With `parallel` all branches take the same x, and what they give is summed.

    Attributes:
      attention: the layer of self-attention, with all its options. Dtypes, precision, initializers,
        biases and partitioning of the MLP are those of the layer, and so are the dtypes of the
        norms, which keep a scale, and a LayerNorm its bias, whatever `use_bias` says.
      mlp_dim: hidden features of the MLP; None where `mlp` is given.
      norm: "layernorm", "rmsnorm", or a module of which each norm is a copy, such as
        `nn.LayerNorm(use_bias=False)`.
      pre_norm: whether a branch is given its input normed (see above).
      activation: of the MLP, see there: "gelu", "gelu_exact", "silu", …, or a function.
      gated: whether the MLP is gated.
      dropout_rate: of the hidden features and of what is added to each residual (the weights'
        own is the layer's `dropout_rate`).
      remat: recompute the block in the backward pass instead of storing its insides.
      norm_epsilon: what a norm of ours adds to the variance (PyTorch's LayerNorm, and many
        checkpoints: 1e-5).
      mlp_bias: whether the MLP has biases (default: as the output projection of self-attention).
      branch_norm: whether what a branch gives is normed (Gemma 2; without `pre_norm`, OLMo 2).
      parallel: whether the branches stand side by side, given x by one norm (GPT-J, ViT-22B), or,
        by "own_norms", each by its own (GPT-NeoX).
      layer_scale: the initial value of a learned scale [D] of what each branch gives (CaiT,
        DINOv2); None for no scale.
      mlp: a module in place of the MLP, called as it is, such as `Experts`.

    Sources: Vaswani et al., 2017 (post-norm); Xiong et al., "On Layer Normalization in the
    Transformer Architecture", 2020 (pre-norm); Touvron et al., "Going deeper with Image
    Transformers", 2021 (layer scale).
    """

    attention: MultiHeadAttention
    mlp_dim: int | None = None
    norm: str | nn.Module = "layernorm"
    pre_norm: bool = True
    activation: str | Activation = "gelu"
    gated: bool = False
    dropout_rate: float = 0.0
    remat: bool = False
    norm_epsilon: float = 1e-6
    mlp_bias: bool | None = None
    branch_norm: bool = False
    parallel: bool | Literal["own_norms"] = False
    layer_scale: float | None = None
    mlp: nn.Module | None = None

    @property
    def post_norm(self) -> bool:
        """Whether the norms stand after the sums: then a stack needs none at its end."""
        return not (self.pre_norm or self.branch_norm)

    @nn.nowrap
    def run(self, x: jax.Array, deterministic: bool | None, calls: Calls, return_kv: bool) -> Any:
        """Runs the attention layers, each with its arguments in `calls`, and the MLP."""
        checks.fields(self)
        shapes.check_features("x", x)
        own_norms = self.parallel == "own_norms" and self.pre_norm
        if not (own_norms or isinstance(self.parallel, bool)):
            raise ValueError(
                f"parallel must be True or False, or where pre_norm is on 'own_norms', got "
                f"{checks.describe(self.parallel)}"
            )
        if checks.flag("return_kv", return_kv):
            calls["attention"]["return_kv"] = True

        def branches(block: "Block", x: jax.Array) -> tuple[jax.Array, Shared | None]:
            return block._branches(x, deterministic, calls)

        with rules.undivided_tokens(getattr(self.attention, "decode", False)):
            x, kv = (nn.remat(branches) if self.remat else branches)(self, x)
        return (x, kv) if return_kv else x

    @nn.nowrap
    def make_norm(self, name: str, parent: nn.Module | None = None) -> nn.Module:
        """A norm over features, in the dtypes of the attention layer."""
        parent = self if parent is None else parent
        if isinstance(self.norm, nn.Module):
            return self.norm.copy(parent=parent, name=name)
        if not isinstance(self.norm, str):
            raise TypeError(
                f"norm must be one of {[*NORMS]} or a module, got "
                f"{checks.describe(self.norm)}; give "
                f"nn.LayerNorm(), say, with its parentheses"
            )
        norm = checks.choice("norm", self.norm, NORMS)
        if checks.number("norm_epsilon", self.norm_epsilon) < 0:
            raise ValueError(f"norm_epsilon must be at least 0, got {self.norm_epsilon}")
        like = self.attention
        return norm(
            epsilon=self.norm_epsilon, dtype=like.dtype, param_dtype=like.param_dtype, name=name,
            parent=parent,
        )  # fmt: skip

    @nn.nowrap
    def _branches(
        self, x: jax.Array, deterministic: bool | None, calls: Calls
    ) -> tuple[jax.Array, Shared | None]:
        kv, branches = None, dict[str, Callable[[jax.Array], Any]]()
        for name, call in calls.items():
            layer = getattr(self, name)
            settings.check_module(name, layer, MultiHeadAttention)
            # A layer whose own field is set keeps to that.
            own = deterministic if layer.deterministic is None else None
            branches[name] = functools.partial(layer, deterministic=own, **call)
        branches["mlp"] = functools.partial(self._mlp(), deterministic=deterministic)
        x = sharding.constrain(x, ("batch", "norm_length", None))
        each = [[row] for row in branches.items()]
        for together in [[*branches.items()]] if self.parallel else each:
            first, given, before = f"{together[0][0]}_norm", x, x
            for name, branch in together:
                norm = f"{name}_norm"
                if self.pre_norm and (norm == first or self.parallel == "own_norms"):
                    given = self.make_norm(norm)(before)
                y = branch(given)
                if calls.get(name, {}).get("return_kv"):
                    y, kv = y
                x = x + self._added(name, y, x.shape, deterministic)
            if self.post_norm:
                x = self.make_norm(first)(x)
            x = sharding.constrain(x, ("batch", "norm_length", None))
        return x, kv

    @nn.nowrap
    def _mlp(self) -> nn.Module:
        if isinstance(self.mlp, nn.Module) and self.mlp_dim is None:
            return self.mlp
        if self.mlp is not None:
            raise ValueError(
                f"mlp must be a module, and mlp_dim is not for it, got "
                f"{checks.describe(self.mlp)} and "
                f"mlp_dim={self.mlp_dim}; give one of the two"
            )
        like, biased = self.attention, self.mlp_bias
        biased = settings.has_bias(like.use_bias, "out") if biased is None else biased
        hidden = checks.integer("mlp_dim", self.mlp_dim, 1)
        return MLP(
            hidden, self.activation, self.gated, self.dropout_rate, biased, like.kernel_init,
            like.bias_init, like.dtype, like.param_dtype, like.precision, like.partitioned,
            name="mlp",
        )  # fmt: skip

    @nn.nowrap
    def _added(
        self, name: str, y: jax.Array, shape: shapes.Shape, deterministic: bool | None
    ) -> jax.Array:
        """What is added to the residual, of what a branch gives."""
        if y.shape != shape:
            raise ValueError(
                f"{name} must keep the shape of its input {shape} for the residual, got "
                f"{y.shape}; leave out_features unset and project_out on"
            )
        if self.branch_norm:
            y = self.make_norm(f"{name}_branch_norm")(y)
        if self.layer_scale is not None:
            init = nn.initializers.constant(checks.number("layer_scale", self.layer_scale))
            scale = self.param(f"{name}_scale", init, shape[-1:], self.attention.param_dtype)
            y = y * shapes.lead(scale.astype(y.dtype), y.ndim)
        return Dropout(self.dropout_rate, name=f"{name}_dropout")(y, deterministic=deterministic)
