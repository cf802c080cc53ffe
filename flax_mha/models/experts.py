"""A mixture of experts: a router sends each token to a few of many MLPs."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import Partial

from flax_mha import sharding
from flax_mha.base import checks, loops, numerics, shapes
from flax_mha.layer.linear import (
    default_bias_init,
    default_kernel_init,
    for_shape,
    projection,
)
from flax_mha.models import exchange
from flax_mha.models.feed_forward import MLP, Activation, activation
from flax_mha.sharding import products, rules
from flax_mha.sharding.shard_map import vary


def expert_by_expert(
    expert: Callable[..., jax.Array], x: jax.Array, ids: jax.Array, p: jax.Array, layers: Any,
    precision: PrecisionLike,
) -> jax.Array:  # fmt: skip
    """Compute one expert after another for all tokens, skipping experts without tokens.

    It is for CPUs, where `lax.ragged_dot` computes every expert for every token: a gradient of
    `sorted_by_expert` takes 4 times as long for 4 of 32 experts.

    Args:
      expert: a function of a linear layer's computation, tokens and layers, `Experts._expert`.
      x: [n, D], the tokens.
      ids: [n, top_k], their experts; the number of experts stands for other devices' experts.
      p: [n, top_k], the weights of these experts.
      layers: pairs of kernels [E, in, out] and biases [E, out] or None.
      precision: the precision of matmuls.
    """

    def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = jnp.matmul(x, kernel, precision=precision)
        return y if bias is None else numerics.plus(y, bias)

    @jax.checkpoint
    def add(y: jax.Array, x: jax.Array, p: jax.Array, is_used: jax.Array, layers: Any) -> jax.Array:
        # Clear tokens of other experts: if they overflow here, their gradient would be NaN.
        out = expert(dense, jnp.where(is_used.any(-1)[:, None], x, 0), layers)
        return y + out.astype(p.dtype) * jnp.sum(jnp.where(is_used, p, 0), -1)[:, None]

    def step(y: jax.Array, numbered: Any) -> tuple[jax.Array, None]:
        i, layers = numbered
        is_used = ids == i
        return loops.cond(is_used.any(), lambda: add(y, x, p, is_used, layers), lambda: y), None

    y = vary(jnp.zeros(x.shape, p.dtype), (x, ids, p, layers))
    return loops.scan(step, y, (jnp.arange(len(layers[0][0])), layers), (x, ids, p))[0]


def sorted_by_expert(
    expert: Callable[..., jax.Array], x: jax.Array, ids: jax.Array, p: jax.Array, layers: Any,
    precision: PrecisionLike,
) -> jax.Array:  # fmt: skip
    """Compute only each token's experts, by ragged matmuls over tokens sorted by expert.

    Arguments are as in `expert_by_expert`.
    """
    count, flat = len(layers[0][0]), ids.reshape(-1)
    order = jnp.argsort(flat)
    experts, sizes = flat[order], jnp.bincount(flat, length=count)
    is_local = (experts < count)[:, None]

    def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = lax.ragged_dot(x, kernel, sizes, precision)
        return y if bias is None else y + numerics.look_up(bias, jnp.minimum(experts, count - 1))

    # Clear the tokens of other devices' experts, where `ragged_dot` leaves arbitrary values.
    tokens = jnp.where(is_local, x[order // ids.shape[1]], 0)
    y = jnp.where(is_local, expert(dense, tokens, layers), 0)
    return exchange.weighted_sum(y, order, p)


# Other platforms have `sorted_by_expert`.
METHODS = {"cpu": expert_by_expert}

_TOKENS = ("batch", "length", None)
_NAMES = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}


class Experts(nn.Module):
    """A mixture of experts, which sums the outputs of a token's top_k experts e:

        Σ_e p_e · (act(x W_gate,e) ⊙ (x W_up,e + offset)) W_down,e

    Here p is the softmax of x W_router over all experts, divided by its sum over the token's. No
    token is dropped. DeepSeek-V3 chooses otherwise, and adds an MLP for all tokens:

        p = σ(x W_router),  p_e ← factor · p_e / Σ p of the token's experts     routing="sigmoid"
        e: the top_k of p + b, in the top_groups groups whose best two p + b have the largest sums
        out = Σ_e … + MLP(x)                                                shared

    If `intermediates` are collected, a call sows `router_logits` [*B, T, E] and the scalar
    `balance_loss` E Σ_e f_e P_e, for f_e expert e's share of all choices, and P_e its mean p,
    divided by the sum over all experts. Equal shares give 1. Padding counts.

    Attributes:
      hidden: the hidden features of an expert.
      num_experts: E, the number of experts.
      top_k: the experts of a token.
      activation: the gate's activation (see `MLP`).
      normalize: True to divide p by its sum over the token's experts.
      limit: the maximum of a gate, and of the absolute value of x W_up.
      offset: a number added to x W_up (gpt-oss: 1, with limit=7.0).
      use_bias: True if router and experts have biases.
      routing: "softmax" or "sigmoid".
      choice_bias: True for a parameter `choice_bias` b [E], which starts at 0 and gets no gradient;
        a training loop can raise it for experts with few tokens.
      groups: the number of groups that experts are in, in order.
      top_groups: the number of groups that a token's experts are in (default: all).
      factor: a factor of p.
      shared: the hidden features of the shared gated MLP; None for none.
      kernel_init, bias_init, dtype, param_dtype, precision, partitioned: as in `MLP`; p is float32
        or wider.

    Sources: Shazeer et al., "Outrageously Large Neural Networks", 2017; Fedus et al., "Switch
    Transformers", 2021, equation 4 without α (balance_loss); DeepSeek-AI, "DeepSeek-V3 Technical
    Report", 2024, section 2.1.2.
    """

    hidden: int
    num_experts: int
    top_k: int
    activation: str | Activation = "silu"
    normalize: bool = True
    limit: float | None = None
    offset: float = 0.0
    use_bias: bool = False
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    partitioned: bool = False
    routing: str = "softmax"
    choice_bias: bool = False
    groups: int = 1
    top_groups: int | None = None
    factor: float = 1.0
    shared: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Apply the experts to x [*B, T, D]. There is no dropout."""
        E, k, groups = self.num_experts, self.top_k, self.groups
        checks.positive(hidden=self.hidden, num_experts=E, top_k=k, groups=groups)
        checks.fields(self)
        most = E // groups * (self.top_groups or groups)
        if k > most:
            raise ValueError(
                f"top_k={k} must be at most {most}, the experts of the chosen groups; lower it"
            )
        shapes.check_features("x", x)
        logits = projection(self, "router", (E,), ("embed", None), self.use_bias)(x)
        bias = jnp.zeros(E)
        if self.choice_bias:
            init = sharding.named(nn.initializers.zeros, (None,), self.partitioned)
            bias = self.param("choice_bias", init, (E,), self.param_dtype)
        every: Any = 0
        if self.shared is not None:
            every = MLP(
                self.shared, self.activation, True, 0.0, self.use_bias, self.kernel_init,
                self.bias_init, self.dtype, self.param_dtype, self.precision, self.partitioned,
                name="shared",
            )(x, deterministic=deterministic)  # fmt: skip
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "router_logits", logits)
            loss = sharding.auto(self._balance_loss, (), logits, bias)
            self.sow("intermediates", "balance_loss", loss)
        D, M = x.shape[-1], self.hidden
        sizes = {"gate": (D, M), "up": (D, M), "down": (M, D)}
        leaves = ("kernel", "bias") if self.use_bias else ("kernel",)
        weights = [
            self._weights(f"{name}_{leaf}", sizes[name][i:], _NAMES[name][i:])
            for i, leaf in enumerate(leaves) for name in sizes
        ]  # fmt: skip
        x, *weights = promote_dtype(x, *weights, dtype=self.dtype)
        return sharding.auto(self._divided, _TOKENS, x, logits, bias, *weights) + every

    @nn.nowrap
    def _weights(self, name: str, shape: shapes.Shape, names: sharding.LogicalNames) -> jax.Array:
        init = for_shape(self.kernel_init if len(shape) > 1 else self.bias_init, len(shape) - 1)

        def by_expert(rng: jax.Array, shape: shapes.Shape, dtype: Dtype) -> Any:
            keys = jax.random.split(rng, shape[0])
            return jax.vmap(lambda key: init(key, shape[1:], dtype))(keys)

        boxed = sharding.named(by_expert, ("experts", *names), self.partitioned)
        return self.param(name, boxed, (self.num_experts, *shape), self.param_dtype)

    @nn.nowrap
    def _divided(self, x: jax.Array, logits: jax.Array, *arrays: jax.Array) -> jax.Array:
        """Return the experts' sum, where each device computes its tokens and experts."""
        spec = sharding.spec((self.num_experts, self.hidden), ("experts", "mlp"))
        experts, hidden = map(rules.unpack_entry, spec)
        of_tokens = {a for e in sharding.spec(x.shape, _TOKENS) for a in rules.unpack_entry(e)}
        shared = tuple(axis for axis in experts + hidden if axis in of_tokens)
        names: list[sharding.LogicalNames] = [("experts", *n) for n in _NAMES.values()]
        if self.use_bias:
            names += [(n[0], n[-1]) for n in names]
        specs = tuple(products.fsdp_axes(w, n) for w, n in zip(arrays[1:], names, strict=True))
        if not any(map(any, specs)):
            names = [*map(products.gathered, names)]
        all_names = [_TOKENS, _TOKENS, (None,), *names]
        # Without the parameters of this call, equal modules share a program.
        module = self.clone(parent=None)
        on_device = Partial(_on_shards, module, experts, hidden, shared, specs)
        return sharding.local(on_device, all_names, (x.shape, _TOKENS), x, logits, *arrays)

    @nn.nowrap
    def _on_device(
        self, experts: tuple[str, ...], hidden: tuple[str, ...], shared: tuple[str, ...],
        x: jax.Array, logits: jax.Array, bias: jax.Array, *weights: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """Return the sum of a device's experts, which these mesh axes shard.

        Along the axes `shared`, devices have other tokens too.
        """
        layers: list[Any] = [*itertools.zip_longest(weights[:3], weights[3:])]
        if self.use_bias:  # Only one term of the sum over `hidden` has the bias.
            layers[2] = (weights[2], jnp.where(lax.axis_index(hidden) == 0, weights[5], 0))
        count = len(weights[0])
        first = lax.axis_index(experts) * count
        method = METHODS.get(sharding.platform(), sorted_by_expert)

        def compute(x: jax.Array, ids: jax.Array, p: jax.Array) -> jax.Array:
            # Replace the experts of other devices by their number.
            is_local = (ids >= first) & (ids < first + count)
            ids = jnp.where(is_local, ids - first, count)
            return method(self._expert, x, ids, p, layers, self.precision)

        tokens = x.reshape(-1, x.shape[-1])
        p, ids = self._route(logits.reshape(-1, self.num_experts), bias)
        run = compute
        if shared:
            run = functools.partial(exchange.exchanged, compute, shared, experts, self.num_experts)
        parts = math.gcd(len(tokens), lax.axis_size((*{*experts, *shared},)))
        if parts == 1:
            y = run(tokens, ids, p)
        else:
            # One part of the tokens after another, as a device's buffers have rows for all tokens.
            split = [x.reshape(parts, -1, x.shape[-1]) for x in (tokens, ids, p)]
            again = jax.checkpoint(lambda part: run(*part), prevent_cse=False)
            y = lax.map(again, split).reshape(tokens.shape)
        y = lax.psum(y, tuple(axis for axis in experts + hidden if axis not in shared))
        return y.reshape(x.shape).astype(x.dtype)

    @nn.nowrap
    def _balance_loss(self, logits: jax.Array, bias: jax.Array) -> jax.Array:
        """Return E Σ_e f_e P_e over all tokens."""
        _, ids = self._route(logits, bias)
        p = self._probabilities(logits)
        p = p / jnp.sum(p, -1, keepdims=True)
        chosen = jax.nn.one_hot(ids, self.num_experts, dtype=p.dtype).mean(-2)
        tokens = range(p.ndim - 1)
        return self.num_experts * jnp.sum(chosen.mean(tokens) * p.mean(tokens))

    @nn.nowrap
    def _probabilities(self, logits: jax.Array) -> jax.Array:
        kinds = {"sigmoid": jax.nn.sigmoid, "softmax": jax.nn.softmax}
        wide = logits.astype(shapes.wide(logits.dtype))
        return checks.choice("routing", self.routing, kinds)(wide)

    @nn.nowrap
    def _route(self, logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the weights p [n, top_k] and the ids of each token's experts."""
        p = self._probabilities(logits)
        choice = lax.stop_gradient(p + shapes.lead(bias.astype(p.dtype), p.ndim))
        if self.top_groups is not None:
            by_group = choice.reshape(*choice.shape[:-1], self.groups, -1)
            best = jnp.sum(lax.top_k(by_group, 2)[0], -1)
            groups = lax.top_k(best, self.top_groups)[1]
            is_in = jax.nn.one_hot(groups, self.groups, dtype=bool).any(-2)
            choice = jnp.where(is_in[..., None], by_group, -jnp.inf).reshape(choice.shape)
        ids = lax.top_k(choice, self.top_k)[1]
        p = jnp.take_along_axis(p, ids, -1)
        if self.normalize:
            # All sigmoids may underflow to 0.
            p = p / (jnp.sum(p, -1, keepdims=True) + 1e-20)
        return p * self.factor, ids

    @nn.nowrap
    def _expert(self, dense: Callable[..., jax.Array], x: jax.Array, layers: Any) -> jax.Array:
        """Return the output of experts, with linear layers dense(x, kernel, bias)."""
        gate, up = dense(x, *layers[0]), dense(x, *layers[1])
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return dense(activation(self.activation)(gate) * (up + self.offset), *layers[2])


def _on_shards(
    module: Experts, experts: tuple[str, ...], hidden: tuple[str, ...], shared: tuple[str, ...],
    specs: Sequence[PartitionSpec], *arrays: jax.Array,
) -> jax.Array:  # fmt: skip
    """Gather the weights that FSDP shards, and return the sum of a device's experts."""
    compute = functools.partial(module._on_device, experts, hidden, shared)
    if not any(map(any, specs)):
        return compute(*arrays)

    # The backward pass gathers them again, so that no layer's whole weights stay in memory.
    @functools.partial(jax.checkpoint, policy=lambda step, *_, **__: step.name != "all_gather")
    def gather(x: jax.Array, logits: jax.Array, bias: jax.Array, *shards: jax.Array) -> jax.Array:
        return compute(x, logits, bias, *map(products.gather, specs, shards))

    return gather(*arrays)
