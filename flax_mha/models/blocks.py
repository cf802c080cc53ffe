# Over 300 lines: a third of them say what the fields and arguments mean.
"""Transformer blocks around the attention layer: branches, each with norms and a residual."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, Unpack, overload

import flax.linen as nn
import jax

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes
from flax_mha.cache.sources import Shared
from flax_mha.layer import padding, settings
from flax_mha.linen import LayerOptions, MultiHeadAttention
from flax_mha.models.feed_forward import MLP, Activation, Dropout
from flax_mha.sharding import rules

NORMS: dict[str, Callable[..., nn.Module]] = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
Calls: TypeAlias = dict[str, Any]  # by the name of a field, arguments of its call
# Of a block's options, those for its cross-attention too.
_OF_BOTH = ("lengths", "dropout_rng", "sow_weights")
_AXES = ("batch", "norm_length", None)


class Block(nn.Module):
    """The base of blocks: branches (attention layers, then an MLP), each with a residual.

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
        """True if the norms stand after the sums: then a stack needs none at its end."""
        return not (self.pre_norm or self.branch_norm)

    @nn.nowrap
    def run(self, x: jax.Array, calls: Calls, return_kv: bool) -> Any:
        """Run the attention layers, each with its arguments in `calls`, and the MLP."""
        options = calls["attention"]
        x = padding.cleared(x, options.get("lengths"), options.get("order"))
        deterministic = options.pop("deterministic", None)
        checks.fields(self)
        shapes.check_features("x", x)
        has_own_norms = self.parallel == "own_norms" and self.pre_norm
        if not (has_own_norms or isinstance(self.parallel, bool)):
            raise ValueError(
                f"parallel must be True or False, or where pre_norm is on 'own_norms', got "
                f"{checks.describe(self.parallel)}"
            )
        if checks.flag("return_kv", return_kv):
            options["return_kv"] = True

        def add_branches(block: "Block", x: jax.Array) -> tuple[jax.Array, Shared | None]:
            return block._add_branches(x, deterministic, calls)

        with rules.undivided_tokens(getattr(self.attention, "decode", False)):
            x, kv = (nn.remat(add_branches) if self.remat else add_branches)(self, x)
        return (x, kv) if return_kv else x

    @nn.nowrap
    def make_norm(self, name: str, parent: nn.Module | None = None) -> nn.Module:
        """Return a norm over features, in the dtypes of the attention layer."""
        parent = self if parent is None else parent
        if isinstance(self.norm, nn.Module):
            return self.norm.copy(parent=parent, name=name)
        if not isinstance(self.norm, str):
            raise TypeError(
                f"norm must be one of {[*NORMS]} or a module, got {checks.describe(self.norm)}; "
                f"give nn.LayerNorm(), say, with its parentheses"
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
    def _add_branches(
        self, x: jax.Array, deterministic: bool | None, calls: Calls
    ) -> tuple[jax.Array, Shared | None]:
        """Return x with all branches added, and the keys and values if `calls` ask for them."""
        for name in calls:
            settings.check_module(name, getattr(self, name), MultiHeadAttention)
        mlp, shape, kv = self._mlp(), x.shape, None

        def branch(name: str, x: jax.Array) -> jax.Array:
            nonlocal kv
            if name == "mlp":
                y = mlp(x, deterministic=deterministic)
            else:
                layer = getattr(self, name)
                # A layer whose own field is set keeps to that.
                flag = deterministic if layer.deterministic is None else None
                y = layer(x, deterministic=flag, **calls[name])
            if calls.get(name, {}).get("return_kv"):
                y, kv = y
            return self._scale(name, y, shape, deterministic)

        def norm(name: str, x: jax.Array) -> jax.Array:
            return self.make_norm(f"{name}_norm")(x)

        names = [*calls, "mlp"]
        x = sharding.constrain(x, _AXES)
        if not self.parallel:
            for name in names:
                x = x + branch(name, norm(name, x) if self.pre_norm else x)
                x = sharding.constrain(norm(name, x) if self.post_norm else x, _AXES)
            return x, kv
        if self.parallel == "own_norms":
            inputs = [norm(name, x) for name in names]
        else:
            inputs = [norm("attention", x) if self.pre_norm else x] * len(names)
        for name, branch_input in zip(names, inputs, strict=True):
            x = x + branch(name, branch_input)
        x = norm("attention", x) if self.post_norm else x
        return sharding.constrain(x, _AXES), kv

    @nn.nowrap
    def _mlp(self) -> nn.Module:
        if isinstance(self.mlp, nn.Module) and self.mlp_dim is None:
            return self.mlp
        if self.mlp is not None:
            raise ValueError(
                f"mlp must be a module, and mlp_dim is not for it, got "
                f"{checks.describe(self.mlp)} and mlp_dim={self.mlp_dim}; give one of the two"
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
    def _scale(
        self, name: str, y: jax.Array, shape: shapes.Shape, deterministic: bool | None
    ) -> jax.Array:
        """Return a branch's output normed, scaled and dropped, as it joins the residual."""
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


class EncoderBlock(Block):
    """Self-attention and an MLP, each with a norm and a residual: fields and equation of `Block`.

        x ← x + attention(norm(x));   x ← x + mlp(norm(x))

    Sources: see `Block`.
    """

    @overload
    def __call__(
        self, x: jax.Array, *, return_kv: Literal[False] = ..., **options: Unpack[LayerOptions]
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: jax.Array, *, return_kv: Literal[True], **options: Unpack[LayerOptions]
    ) -> tuple[jax.Array, Shared]: ...
    @nn.compact
    def __call__(
        self, x: jax.Array, *, return_kv: bool = False, **options: Unpack[LayerOptions]
    ) -> Any:
        """Map [*B, T, D] to [*B, T, D]; options are the arguments of `MultiHeadAttention`.

        `deterministic` must be given if something is dropped; a layer whose field of that name is
        set keeps to that. With `return_kv` the layer's keys and values are returned, too.
        """
        return self.run(x, {"attention": options}, return_kv)


class DecoderBlock(Block):
    """Causal self-attention, attention to a memory, and an MLP: fields and equation of `Block`.

        x ← x + attention(norm(x));                causally
        x ← x + cross_attention(norm(x), memory);  unless that is None
        x ← x + mlp(norm(x))

    Attributes:
      cross_attention: the layer that attends to the memory, such as an encoder's output (default:
        None, there is no memory).

    With `decode=True` in its layers the block goes on from the tokens so far: `MultiHeadAttention`
    says how. The memory is then given once, when the cache is made.
    """

    cross_attention: MultiHeadAttention | None = None

    @overload
    def __call__(
        self, x: jax.Array, memory: jax.Array | None = ..., *,
        memory_mask: masks.MaskLike | None = ..., memory_lengths: jax.Array | None = ...,
        return_kv: Literal[False] = ..., **options: Unpack[LayerOptions],
    ) -> jax.Array: ...  # fmt: skip
    @overload
    def __call__(
        self, x: jax.Array, memory: jax.Array | None = ..., *,
        memory_mask: masks.MaskLike | None = ..., memory_lengths: jax.Array | None = ...,
        return_kv: Literal[True], **options: Unpack[LayerOptions],
    ) -> tuple[jax.Array, Shared]: ...  # fmt: skip
    @nn.compact
    def __call__(
        self, x: jax.Array, memory: jax.Array | None = None, *,
        memory_mask: masks.MaskLike | None = None, memory_lengths: jax.Array | None = None,
        return_kv: bool = False, **options: Unpack[LayerOptions],
    ) -> Any:  # fmt: skip
        """Map [*B, T, D] to [*B, T, D].

        Args:
          x: [*B, T, D].
          memory: [*B, S, D'], what `cross_attention` attends to.
          memory_mask: which of the memory a token may see.
          memory_lengths: int [*B], how many of the memory's tokens are real (default: all). The
            others are not attended to, and reach neither outputs nor gradients.
          return_kv: also return the keys and values of self-attention.
          **options: arguments of the self-attention, see `MultiHeadAttention`; its mask joins
            causality. `lengths`, `dropout_rng` and `sow_weights` are for both layers.
            `deterministic` must be given if there is something to drop; a layer whose field of that
            name is set keeps to that.

        Returns:
          [*B, T, D]; or a tuple of it and the keys and values.

        Raises:
          ValueError: if there is a memory and no `cross_attention`, or the other way round; if
            both layers are one module.
        """
        cross = self.cross_attention
        if cross is not None:
            settings.check_module("cross_attention", cross, MultiHeadAttention)
        if cross is self.attention:
            raise ValueError(
                "attention and cross_attention must be two modules, got one that would share its "
                "parameters; give cross_attention=layer.copy()"
            )
        if cross is None and any(x is not None for x in (memory, memory_mask, memory_lengths)):
            raise ValueError(
                "memory, memory_mask and memory_lengths are for cross_attention, which is None; "
                "set it to a MultiHeadAttention, or drop them"
            )
        if cross is not None and memory is None and not cross.decode:
            raise ValueError(
                "cross_attention needs a memory to attend to, got None; give the encoder's output"
            )
        if memory_lengths is not None:
            memory_mask = masks.combine(memory_mask, masks.Lengths(memory_lengths))
            memory = None if memory is None else padding.cleared(memory, memory_lengths)
        of_both: dict[str, Any] = {name: x for name, x in options.items() if name in _OF_BOTH}
        options["mask"] = masks.combine(masks.Causal(), options.get("mask"))
        calls: Calls = {"attention": options}
        if cross is not None:
            if of_both.get("dropout_rng") is not None:
                # Two keys, or both layers would drop the same weights.
                key = checks.key("dropout_rng", of_both["dropout_rng"])
                options["dropout_rng"], of_both["dropout_rng"] = jax.random.split(key)
            calls["cross_attention"] = {"inputs_k": memory, "mask": memory_mask, **of_both}
        return self.run(x, calls, return_kv)
