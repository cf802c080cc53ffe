"""cuDNN's attention primitives in JAX: forward, backward, under vmap, and supported GPUs.

JAX's own batching rule, before 0.11, supports no operand that the batch shares.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn.fused_attention_stablehlo import (
    AttentionLayout,
    MaskType,
    _dot_product_attention_bwd_impl,
    _dot_product_attention_bwd_p_wrapper,
    _dot_product_attention_fwd_impl,
    _dot_product_attention_fwd_p_wrapper,
    cuda_versions,
)

from flax_mha.kernels.call.spec import Platform
from flax_mha.kernels.chips import gpus

# A GPU's compute capability, (9, 0) for Hopper, and its version of cuDNN.
Gpu: TypeAlias = tuple[tuple[int, int], tuple[int, int, int]]


def gpu(platform: Platform) -> Gpu | str:
    """Return the GPU that a call will run on, present or not, or the reason against cuDNN."""
    capability = gpus.capability(platform.device)
    if isinstance(capability, str):
        return capability
    if platform.cudnn is not None:
        return capability, platform.cudnn
    if cuda_versions is None:
        return "cuDNN is not detected"
    version = cuda_versions.cudnn_get_version()
    return capability, (version // 10000, version // 100 % 100, version % 100)


class CudnnCall(NamedTuple):
    """The static part of a call.

    Attributes:
      scale: the factor of the scores.
      causal: True if query i sees only keys j ≤ i.
      left: the number of earlier keys that a query sees; None for all.
      divisible: True if XLA may shard the call.
      learned: True if the bias has a gradient.
      heads_first: True if heads come before tokens, as in a cache.
    """

    scale: float
    causal: bool
    left: int | None
    divisible: bool
    learned: bool = False
    heads_first: bool = False

    def settings(self, has_bias: bool) -> dict[str, Any]:
        """Return the parameters of both primitives.

        Lengths are always given. Without them, cuDNN's backward kernels for Hopper use a score of 0
        beyond the last key, and exp(0 − lse) is infinite for lse < −88.
        """
        mask = MaskType.PADDING_CAUSAL if self.causal else MaskType.PADDING
        layout = AttentionLayout.BNTH if self.heads_first else AttentionLayout.BTNH
        return {
            "scale": self.scale,
            "seed": 0,
            "dropout_rate": 0.0,
            "variadic_args": (has_bias, self.learned),
            "mask_type": mask,
            "layout": layout.value,
            "sliding_window_length": None if self.left is None else self.left + 1,
        }


def forward(call: CudnnCall, *args: Any) -> tuple[jax.Array, jax.Array]:
    """Return out [rows, T, N, F] and lse, float32 [rows, N, T], with vmapped axes first.

    The arguments are q [rows, T, N, F], k and v [rows, S, K, F], bias [rows|1, N|1, T, S] or None,
    the lengths of queries and keys, int32 [rows], at least 1, and None. For packed documents they
    are lengths [rows, runs] and offsets [rows, runs + 1], and the lse is [rows, runs, N, T].
    """

    def run(*args: Any) -> Any:
        settings = call.settings(args[3] is not None) | {"is_training": True}
        out, lse = _bind("fwd", call, _operands(args), settings)
        return out, lse if args[6] is None else lse.reshape(len(out), -1, *lse.shape[1:])

    return _by_rows(call, run)(*args)


def backward(call: CudnnCall, *args: Any) -> tuple[Any, ...]:
    """Return the gradients of q, k, v and bias, from the arguments of `forward`, lse, out, dout.

    With p = exp(scores − lse): d score = p·(dout·v − Σ dout·out). The gradient of a bias that
    is not `learned` is None.
    """

    def run(*args: Any) -> Any:
        operands = [*_operands(args[:7]), *args[7:]]
        if args[6] is not None:
            operands[10] = args[7].reshape(-1, *args[7].shape[2:])
        gradients = _bind("bwd", call, operands, call.settings(args[3] is not None))
        return tuple(gradients) if len(gradients) == 4 else (*gradients, None)

    return _by_rows(call, run)(*args)


def _by_rows(call: CudnnCall, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` with a rule for vmap, which merges a mapped axis into the rows of all arrays."""
    by_rows = jax.custom_batching.custom_vmap(run)

    @by_rows.def_vmap
    def _(size: int, batched: Any, *args: Any) -> Any:
        rows = args[0].shape[batched[0]]
        has_one_bias = args[3] is not None and args[3].shape[batched[3]] == 1

        def fold(n: int, x: Any) -> Any:
            if x is None or (n == 3 and has_one_bias and not (batched[3] or call.learned)):
                return x
            x = x if batched[n] else jnp.broadcast_to(x, (size, *x.shape))
            x = jnp.broadcast_to(x, (size, rows, *x.shape[2:]))
            return x.reshape(size * rows, *x.shape[2:])

        results = _by_rows(call, run)(*map(fold, itertools.count(), args))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        if has_one_bias and len(results) == 4 and call.learned:
            results = *results[:3], results[3].sum(1, keepdims=True)
        return results, jax.tree.map(lambda _: True, results)

    return by_rows


def _bind(phase: str, call: CudnnCall, operands: Sequence[Any], settings: dict[str, Any]) -> Any:
    """Call a cuDNN primitive directly, or in the form that XLA may shard between devices."""
    function: Any
    if phase == "fwd":
        function, divisible = _dot_product_attention_fwd_impl, _dot_product_attention_fwd_p_wrapper
    else:
        function, divisible = _dot_product_attention_bwd_impl, _dot_product_attention_bwd_p_wrapper
    if jax.__version_info__ >= (0, 11):
        # cuDNN has no functions of the scores together with a mask or lengths.
        settings = settings | {"score_mod": None}
        if not call.divisible:
            settings = settings | {"score_mod_args": ()}
    if call.divisible:
        function = divisible.bind
    if not call.heads_first:
        return function(*operands, **settings)

    def swap(arrays: Sequence[Any], which: Sequence[int]) -> list[Any]:
        return [jnp.swapaxes(x, 1, 2) if i in which else x for i, x in enumerate(arrays)]

    # q, k, v, and in the backward pass out and dout; of the results, out or the gradients.
    inputs, results = ((0, 1, 2), (0,)) if phase == "fwd" else ((0, 1, 2, 11, 12), (0, 1, 2))
    return swap(function(*swap(operands, inputs), **settings), results)


def _operands(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of `forward` in the primitives' order, with empty page tables."""
    q, k, v, bias, *lengths, offsets = args
    unused = jnp.zeros(0, q.dtype)
    if offsets is None:
        offsets = unused
    elif max(q.size, k.size) > np.iinfo(np.int32).max:
        raise ValueError(
            f"kernel='cudnn' counts numbers of packed documents in int32, got queries {q.shape} "
            f"and keys {k.shape} on a device; map over fewer rows, or shard them over a mesh"
        )
    return q, k, v, unused if bias is None else bias, *lengths, offsets, offsets, unused, unused
