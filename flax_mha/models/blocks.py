"""Transformer blocks: attention layers and an MLP as branches, with norms and residuals."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, TypeAlias, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha import masks, sharding
from flax_mha.base import checks, numerics, shapes
from flax_mha.cache import Encoded, KeyValues
from flax_mha.layer import padding, settings
from flax_mha.layer.qk_norm import layer_norm
from flax_mha.linen import LayerOptions, MultiHeadAttention
from flax_mha.models import remat
from flax_mha.models.feed_forward import MLP, Activation, Dropout
from flax_mha.models.remat import Remat
from flax_mha.sharding import rules
from flax_mha.taps.tap import tap_of

NORMS: dict[str, Callable[..., nn.Module]] = {"layernorm": layer_norm, "rmsnorm": nn.RMSNorm}
Calls: TypeAlias = dict[str, Any]  # the arguments of each layer's call, by the name of its field
# Options of self-attention that cross-attention gets too.
_SHARED_OPTIONS = ("lengths", "dropout_rng", "sow_weights")
_AXES = ("batch", "norm_length", None)


class Block(nn.Module):
    """The base class of blocks: attention layers and an MLP, each a branch with a residual.

        pre_norm            x ← x + branch(norm(x))
        pre and branch_norm x ← x + norm′(branch(norm(x)))
        branch_norm only    x ← x + norm′(branch(x))
        neither             x ← norm(x + branch(x))

    Attributes:
      attention: the self-attention layer. The MLP and the norms share its fields, such as dtypes.
      mlp_dim: the MLP's hidden features; None if `mlp` is given.
      norm: "layernorm" (with PyTorch's exact variance), "rmsnorm", or a module to copy.
      pre_norm: True to normalize the input of each branch, or a tuple of branches:
        ("mlp",) in the first block of ModernBERT.
      activation: the MLP's activation, a name or a function (see `MLP`).
      gated: True for a gated MLP.
      dropout_rate: the dropout rate of the MLP's hidden features and of each branch's output.
      remat: the activations to store for the backward pass, which recomputes all others. False:
        every activation. True: only the block's input. A tuple of names such as ("z", "lse"), or a
        policy of `jax.checkpoint_policies`: these too. "offload:" before a name stores it in the
        host's memory. None: ("products", "q", "k", "v", "z", "lse") under a `scan` that does not
        decode, else False. Other names: `q`, `k`, `v`, as the kernel reads them; `out`, the output
        of a layer; `mlp_pre` and `mlp_hidden`, the hidden features before and after the activation;
        `mlp_out`; `products`, all matrix products.
      norm_epsilon: the epsilon of the norms (PyTorch's LayerNorm: 1e-5).
      mlp_bias: True if the MLP has biases (default: as self-attention's output projection).
      branch_norm: True to normalize the output of each branch (Gemma 2).
      parallel: True if all branches read the same x and one norm (GPT-J), "own_norms" with a norm
        each (GPT-NeoX). Needs `pre_norm`.
      layer_scale: the initial value of a learned scale [D] of each branch's output (DINOv2).
      mlp: a module in place of the MLP, such as `Experts`.
      output_scale: the initial value of a learned factor of the block's output (Gemma 4).

    Sources: Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020; Touvron
    et al., "Going deeper with Image Transformers", 2021 (layer scale).
    """

    attention: MultiHeadAttention
    mlp_dim: int | None = None
    norm: str | nn.Module = "layernorm"
    pre_norm: bool | Sequence[str] = True
    activation: str | Activation = "gelu"
    gated: bool = False
    dropout_rate: float = 0.0
    remat: Remat = None
    norm_epsilon: float = 1e-6
    mlp_bias: bool | None = None
    branch_norm: bool = False
    parallel: bool | Literal["own_norms"] = False
    layer_scale: float | None = None
    mlp: nn.Module | None = None
    output_scale: float | None = None

    @property
    def post_norm(self) -> bool:
        """True if norms follow the residual sums, so that a stack needs no final norm."""
        return not (self.pre_norm or self.branch_norm)

    @nn.nowrap
    def run(self, x: jax.Array, calls: Calls, return_kv: bool) -> Any:
        """Run the attention layers, each with its arguments in `calls`, and the MLP."""
        options = calls["attention"]
        shapes.check_features("x", x)
        x = padding.cleared(x, options.get("lengths"), options.get("order"))
        deterministic = options.pop("deterministic", None)
        checks.fields(self)
        if self.parallel not in (False, True, "own_norms") or (self.parallel and not self.pre_norm):
            raise ValueError(
                f"parallel must be False, or with pre_norm True or 'own_norms', got "
                f"{self.parallel!r}"
            )
        if checks.flag("return_kv", return_kv):
            options["return_kv"] = True

        def add_branches(block: Self, x: jax.Array) -> tuple[jax.Array, KeyValues | None]:
            return block._add_branches(x, deterministic, calls)

        with rules.undivided_tokens(getattr(self.attention, "decode", False)):
            x, kv = remat.apply(self.remat, add_branches)(self, x)
        return (x, kv) if return_kv else x

    @nn.nowrap
    def make_norm(self, name: str, parent: nn.Module | None = None) -> nn.Module:
        """Return a new norm over features, a child of `parent` or of this block."""
        return self.norm_module().copy(parent=self if parent is None else parent, name=name)

    @nn.nowrap
    def norm_module(self) -> nn.Module:
        """Return the norm that the block's norms copy. It has no parent."""
        if isinstance(self.norm, nn.Module):
            return self.norm
        norm, layer = checks.choice("norm", self.norm, NORMS), self.attention
        return norm(
            epsilon=checks.number("norm_epsilon", self.norm_epsilon), dtype=layer.dtype,
            param_dtype=layer.param_dtype, parent=None,
        )  # fmt: skip

    @nn.nowrap
    def _add_branches(
        self, x: jax.Array, deterministic: bool | None, calls: Calls
    ) -> tuple[jax.Array, KeyValues | None]:
        """Return x with all branches added, and the keys and values of self-attention or None."""
        for name in calls:
            settings.check_module(name, getattr(self, name), MultiHeadAttention)
        tap, kv, names = tap_of(self, self.attention.capture), None, [*calls, "mlp"]
        pre_norm: Any = self.pre_norm
        normed = {True: names, False: ()}.get(pre_norm, pre_norm)
        if not {*normed} <= {*names}:
            raise ValueError(
                f"pre_norm must be a bool, or a tuple of branches, of {names}, got {pre_norm!r}; "
                f"give pre_norm=True for a norm in each"
            )
        x = start = tap("resid_pre", sharding.constrain(x, _AXES))
        # Branches in parallel have one norm, unless each has its own.
        shared = self.make_norm("attention_norm")(x) if self.parallel is True else None
        for name in names:
            if name == "mlp" and not self.parallel:
                x = tap("resid_mid", x)
            y = shared
            if y is None:
                y = start if self.parallel else x
                y = self.make_norm(f"{name}_norm")(y) if name in normed else y
            if name == "mlp":
                y = tap("mlp_out", self._mlp()(y, deterministic=deterministic))
            else:
                layer = getattr(self, name)
                # The layer's field `deterministic`, if set, takes precedence.
                flag = deterministic if layer.deterministic is None else None
                y = layer(y, deterministic=flag, **calls[name])
                y, kv = y if calls[name].get("return_kv") else (y, kv)
            if y.shape != x.shape:
                raise ValueError(
                    f"{name} must keep the shape of its input {x.shape} for the residual, got "
                    f"{y.shape}; leave out_features unset and project_out on"
                )
            if self.branch_norm:
                y = self.make_norm(f"{name}_branch_norm")(y)
            if self.layer_scale is not None:
                y = self._scaled(f"{name}_scale", y, self.layer_scale, x.shape[-1:])
            dropout = Dropout(self.dropout_rate, name=f"{name}_dropout")
            x = x + dropout(y, deterministic=deterministic)
            x = self.make_norm(f"{name}_norm")(x) if self.post_norm else x
            x = x if self.parallel else sharding.constrain(x, _AXES)
        x = sharding.constrain(x, _AXES) if self.parallel else x
        if self.output_scale is not None:
            x = self._scaled("output_scale", x, self.output_scale, (1,))
        return tap.last("resid_post", x), kv

    @nn.nowrap
    def _scaled(self, name: str, x: jax.Array, start: float, shape: shapes.Shape) -> jax.Array:
        init = nn.initializers.constant(start)
        scale = self.param(name, init, shape, self.attention.param_dtype)
        return numerics.scaled(x, shapes.lead(scale, x.ndim))

    @nn.nowrap
    def _mlp(self) -> nn.Module:
        if self.mlp is not None:
            if self.mlp_dim is not None:
                raise ValueError(f"give one of mlp and mlp_dim, got mlp_dim={self.mlp_dim} too")
            return self.mlp
        layer, biased = self.attention, self.mlp_bias
        biased = settings.has_bias(layer.use_bias, "out") if biased is None else biased
        hidden: Any = self.mlp_dim
        return MLP(
            hidden, self.activation, self.gated, self.dropout_rate, biased, layer.kernel_init,
            layer.bias_init, layer.dtype, layer.param_dtype, layer.precision, layer.partitioned,
            layer.capture, name="mlp",
        )  # fmt: skip


class EncoderBlock(Block):
    """A block of self-attention and an MLP, with the fields of `Block`.

    x ← x + attention(norm(x));   x ← x + mlp(norm(x))
    """

    @nn.compact
    def __call__(
        self, x: jax.Array, *, return_kv: bool = False, **options: Unpack[LayerOptions]
    ) -> Any:
        """Apply the block.

        Args:
          x: [*B, T, D].
          return_kv: True to also return the attention layer's keys and values.
          **options: arguments of `MultiHeadAttention`. With dropout you must give `deterministic`.

        Returns:
          [*B, T, D], or a tuple of it and the keys and values.
        """
        return self.run(x, {"attention": options}, return_kv)


class DecoderBlock(Block):
    """A block of causal self-attention, cross-attention and an MLP, with the fields of `Block`.

        x ← x + attention(norm(x))                 causal
        x ← x + cross_attention(norm(x), memory)   if not None
        x ← x + mlp(norm(x))

    With `decode=True` in its layers, the block continues from the cached tokens. Pass the memory
    only to the call that creates the cache, which keeps its keys and values. A call without a cache
    makes an empty one, in `apply` as in `init`.

    Attributes:
      cross_attention: the layer that attends to the memory, an encoder's output.
    """

    cross_attention: MultiHeadAttention | None = None

    @nn.compact
    def __call__(
        self, x: jax.Array, memory: jax.Array | None = None, *,
        memory_lengths: jax.Array | None = None, return_kv: bool = False,
        **options: Unpack[LayerOptions],
    ) -> Any:  # fmt: skip
        """Apply the block.

        Args:
          x: [*B, T, D].
          memory: [*B, S, D'], the encoder's output for `cross_attention`.
          memory_lengths: int [*B], the number of real tokens in the memory (default: all).
          return_kv: True to also return self-attention's keys and values.
          **options: arguments of self-attention, whose mask becomes causal too. Cross-attention
            gets `lengths`, `dropout_rng` and `sow_weights`. With dropout you must give
            `deterministic`.

        Returns:
          [*B, T, D], or a tuple of it and the keys and values.
        """
        cross = self.cross_attention
        options["mask"] = masks.combine(masks.Causal(), options.get("mask"))
        if cross is None:
            if memory is not None or memory_lengths is not None:
                raise ValueError(
                    "memory and memory_lengths are for cross_attention, which is None; set it to "
                    "a MultiHeadAttention, or drop them"
                )
            return self.run(x, {"attention": options}, return_kv)
        if cross is self.attention:
            raise ValueError(
                "attention and cross_attention must be two modules, got one with shared "
                "parameters; give cross_attention=layer.copy()"
            )
        shared: dict[str, Any] = {n: x for n, x in options.items() if n in _SHARED_OPTIONS}
        if shared.get("dropout_rng") is not None:
            # Split the key, or both layers would drop the same weights.
            key = checks.key("dropout_rng", shared["dropout_rng"])
            options["dropout_rng"], shared["dropout_rng"] = jax.random.split(key)
        if memory_lengths is not None:
            shared["mask"] = masks.Lengths(memory_lengths)
            memory = padding.cleared(memory, memory_lengths)
            if memory is not None and getattr(cross.rotary, "reads_length", False):
                places = jnp.arange(memory.shape[-2])
                at = padding.cleared_positions(places, memory.shape[:-1], memory_lengths)
                shared["positions"] = (None, at)
        # Self-attention without a cache makes an empty one, and its tokens are not counted.
        follows = getattr(options.get("kv"), "q_positions", None) is not None
        has_cache = follows or self.variables.get("cache")
        decodes = getattr(self.attention, "decode", False)
        encoded = Encoded(memory, makes_room=bool(decodes and not has_cache))
        of_memory = {"kv": encoded, **shared}
        return self.run(x, {"attention": options, "cross_attention": of_memory}, return_kv)
