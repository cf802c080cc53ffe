"""Detectors of kinds of heads. A kind is a mask: the keys j that such a head's query i attends to.

| pairs | query i, key j |
|---|---|
| `previous` | j = i − 1 |
| `first` | j = 0 < i |
| `duplicate` | j < i and token j = token i |
| `induction` | j ≤ i and token j − 1 = token i |

The score of a head with weights p is its mean weight on the pairs,

    mean over i of Σ_{j: (i, j) ∈ pairs} p_ij,

over queries that may attend to such a key.

Sources: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021 (previous); Xiao
et al., "Efficient Streaming Language Models with Attention Sinks", 2023 (first); Wang et al.,
"Interpretability in the Wild", 2022 (duplicate); Olsson et al., "In-context Learning and Induction
Heads", 2022 (induction, the prefix-matching score).
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import masks
from flax_mha.base import checks
from flax_mha.base.trees import Static, combine, is_array, partition
from flax_mha.kernels import observe
from flax_mha.kernels.call.bind import Options, bind_call
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.stored import dequantize
from flax_mha.taps.sown import named, sown_by, split
from flax_mha.taps.tap import Tap, at_softmax

_EARLIER = ~masks.Window(left=0)


def token_pairs(tokens: Any) -> dict[str, masks.Mask]:
    """Return the pairs `previous`, `first`, `duplicate` and `induction` of tokens, as masks.

    Args:
      tokens: int [*B, T].
    """
    tokens = jnp.asarray(checks.integers("tokens", tokens))
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
    """Return the mean weight of each head on pairs of tokens, which tells what kind it is.

    `detect(linen_model, variables, tokens)` and `detect(nnx_model, tokens)` run the model. Each
    layer of self-attention computes its weights once more, in memory linear in sequence length.

    Args:
      model: a linen or nnx module with attention layers of flax_mha, without cache.
      *args: the arguments of the call, first int tokens [*B, T] unless you give `pairs`.
      pairs: masks by name (default: `token_pairs(tokens)`).
      **kwargs: more arguments of the call.

    Returns:
      Scores [N] by path of the layer and name of the pairs, NaN if no query may attend to such a
      key. Layers under `nn.scan`, and several calls of a layer, have a leading axis.

    Raises:
      ValueError: if there is no layer, or weights are not one softmax, as with another normalizer,
        an `attention_fn` or an edit of weights.
    """
    inputs = args[isinstance(model, nn.Module) :]
    if pairs is None:
        if kwargs.get("order") is not None:
            raise ValueError("detect takes tokens in their order, got order=; give pairs= with it")
        pairs = token_pairs(*inputs[:1])
    root, *call = split(model, *args)
    call = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (call, kwargs)
    )
    bound = {name: masks.as_mask(mask) for name, mask in pairs.items()}
    arrays, static = partition((call, bound), is_array)
    # Later calls with the same shapes compile nothing.
    calls = _read(Static((root, static, nn.get_logical_axis_rules())), arrays)
    if not calls:
        raise ValueError(
            f"a model to detect heads in must call self-attention layers of flax_mha, got "
            f"{checks.describe(model)}; give the part of it that does"
        )
    return calls


@functools.partial(jax.jit, static_argnums=0)
def _read(call: Static, arrays: Any) -> dict[str, Any]:
    """Return the weights on pairs by path of the layer."""
    root, static, _ = call.tree
    (args, kwargs), pairs = combine(arrays, static)
    with at_softmax(functools.partial(_sow_pairs, pairs)):
        sown = sown_by(root, *args, **kwargs)
    pairs.clear()  # JAX's caches keep the function, which must keep no arrays.
    return named(sown, "attention_pairs")


def _sow_pairs(
    pairs: Mapping[str, masks.Mask], tap: Tap, q: jax.Array, source: Any, call: Mapping[str, Any]
) -> None:
    """Sow the mean weight [N] of the heads on each of the pairs, as `pairs` by name."""
    normalizer, attention = call["normalizer"], call.get("attention")
    if attention is not None or normalizer != SOFTMAX:
        raise ValueError(
            f"weights on pairs need a layer whose weights are one softmax of its scores, got "
            f"{normalizer=} and {attention=} at {tap.path('attention_pairs')}; read `weights` of "
            f"this layer instead"
        )
    qkv = (q, source.key, source.value)
    options = {name: x for name, x in call.items() if name in Options.__annotations__}
    options |= source.places(q, call["mask"], call["lengths"], call.get("order"))
    q, k, _, spec = bind_call(*qkv, **options)
    bound: dict[str, Any] = {
        name: bind_call(*qkv, **options | {"mask": masks.combine(options["mask"], x)})[3].mask
        for name, x in pairs.items()
    }
    tap.sow("pairs", observe.weigh_pairs(q, dequantize(k), spec, bound))
