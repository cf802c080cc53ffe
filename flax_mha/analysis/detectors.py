"""Detectors of heads by the pairs of tokens that take their weight.

A kind of head is a mask of pairs: a query i, and the keys j that such a head attends to.

| pairs | query i, key j | source |
|---|---|---|
| `previous` | j = i − 1 | Elhage et al., 2021 |
| `first` | j = 0 < i | Xiao et al., 2023 |
| `duplicate` | j < i and token j = token i | Wang et al., 2022 |
| `induction` | j ≤ i and token j − 1 = token i | Olsson et al., 2022 |

The score of a head is the mean of its weight on the pairs,

    mean over i of Σ_{j: (i, j) ∈ pairs} p_ij,   p_i = softmax of the head's scores,

over the queries that see at least one such key. For `induction` that is the prefix-matching score.

Sources: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021; Olsson et al.,
"In-context Learning and Induction Heads", 2022; Wang et al., "Interpretability in the Wild", 2022;
Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from flax_mha import masks
from flax_mha.base import checks, shapes
from flax_mha.base.trees import Static, combine, is_array, partition
from flax_mha.kernels import observe
from flax_mha.kernels.call.bind import Options, bind_call
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.stored import dequantize
from flax_mha.taps.contexts import looking
from flax_mha.taps.tap import Tap

_EARLIER = ~masks.Window(left=0)


def token_pairs(tokens: Any) -> dict[str, masks.Mask]:
    """Return the pairs `previous`, `first`, `duplicate` and `induction` of tokens, as masks.

    Args:
      tokens: int [*B, T].
    """
    tokens = jnp.asarray(shapes.check_tokens("tokens", tokens))
    before = jnp.roll(tokens, 1, -1).at[..., 0].set(-1)
    return {
        "previous": masks.Window(left=1) & _EARLIER,
        "first": masks.Keys(np.arange(tokens.shape[-1]) == 0) & _EARLIER,
        "duplicate": masks.Segments(tokens) & _EARLIER,
        # Without `Causal`, tokens after a later copy would count.
        "induction": masks.Segments(tokens, before) & masks.Causal(),
    }


def detect(
    model: Any, *args: Any, pairs: Mapping[str, masks.MaskLike] | None = None, **kwargs: Any
) -> dict[str, dict[str, jax.Array]]:
    """Return the mean weight of each head on pairs of tokens, such as those of an induction head.

    `detect(linen_model, variables, tokens)` and `detect(nnx_model, tokens)` run the model, and
    each self-attention layer computes its weights once more, some queries at a time, with its own
    scores, biases, masks and sinks. Memory grows with T. Layers that attend to a memory are left
    out.

    Args:
      model: a linen or nnx module with attention layers of flax_mha, without cache.
      *args: the arguments of the call; for linen, the variables first. The first input are the
        tokens, int [*B, T], unless `pairs` are given.
      pairs: masks by name (default: `token_pairs(tokens)`).
      **kwargs: more arguments of the call.

    Returns:
      The scores [N] by name of the pairs, by path of the layer. Layers under `nn.scan` have a
      leading axis, and so has a layer that is called several times. A score is NaN if no query
      sees such a key.

    Raises:
      ValueError: if no layer is found; if the weights of a layer are not one softmax, as with
        another normalizer, an `attention_fn` or an edit of weights; or if pairs do not fit.
    """
    is_nnx = isinstance(model, nnx.Module)
    inputs = args if is_nnx else args[1:]
    if pairs is None:
        if kwargs.get("order") is not None:
            raise ValueError("detect takes tokens in their order, got order=; give pairs= with it")
        pairs = token_pairs(*inputs[:1])
    root = model
    if is_nnx:
        root, state = nnx.split(model)
        args = (state, *args)
    bound = {name: masks.as_mask(mask) for name, mask in pairs.items()}
    inputs = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (args, kwargs)
    )
    arrays, static = partition((inputs, bound), is_array)
    found = _read(Static((root, static, nn.get_logical_axis_rules())), arrays)
    if not found:
        raise ValueError(
            f"a model to detect heads in must call self-attention layers of flax_mha, got "
            f"{checks.describe(model)}; give the part of it that does"
        )
    return {
        path: {
            name: jnp.stack([call[name] for call in calls]) if len(calls) > 1 else calls[0][name]
            for name in pairs
        }
        for path, calls in found.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def _read(call: Static, arrays: Any) -> dict[str, Any]:
    """Return the weights on pairs of each call of a layer, by path of the layer."""
    model, static, _ = call.tree
    (args, kwargs), pairs = combine(arrays, static)
    with looking(at_softmax=functools.partial(_sow_pairs, pairs)):
        if isinstance(model, nn.Module):
            _, state = model.apply(*args, mutable="intermediates", **kwargs)
            sown = state.get("intermediates", {})
        else:
            run = nnx.capture(lambda m: m(*args[1:], **kwargs), nnx.Intermediate)
            sown = nnx.to_pure_dict(run(nnx.merge(model, args[0]))[1])
    pairs.clear()  # JAX's caches keep the function, which must keep no arrays.
    flat = traverse_util.flatten_dict(sown)
    return {
        "/".join(map(str, path[:-1])): calls
        for path, calls in flat.items()
        if path[-1] == "attention_pairs"
    }


def _sow_pairs(
    pairs: Mapping[str, masks.Mask], tap: Tap, q: jax.Array, source: Any, call: Mapping[str, Any]
) -> None:
    """Sow the mean weight of each head on each of the pairs, as `pairs` by name, [N].

    The mean is over the queries that see such a key. It is NaN if there are none. A sink takes part
    in the softmax, and is in no pair.
    """
    normalizer, attention = call["normalizer"], call.get("attention")
    if attention is not None or normalizer != SOFTMAX:
        got = f"normalizer={normalizer!r}" if normalizer != SOFTMAX else checks.describe(attention)
        raise ValueError(
            f"weights on pairs need a layer whose weights are one softmax of its scores, got {got} "
            f"at {tap.path('attention_pairs')}; read `weights` of this layer instead"
        )
    qkv = (q, source.key, source.value)
    options = {name: x for name, x in call.items() if name in Options.__annotations__}
    options |= source.places(q, call["mask"], call["lengths"], call.get("order"))
    q, k, _, spec = bind_call(*qkv, **options)
    bound = {
        name: bind_call(*qkv, **options | {"mask": masks.combine(options["mask"], x)})[3].mask
        for name, x in pairs.items()
    }
    tap.sow("pairs", observe.weigh_pairs(q, dequantize(k), spec, bound))
