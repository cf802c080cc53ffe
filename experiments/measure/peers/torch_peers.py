"""PyTorch's attention, eager, with one thread per core."""

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.measure.machine import cores
from experiments.measure.peers.cases import Case
from experiments.measure.timing import RefusalError, Work


def core(case: Case) -> Work:
    """Build `scaled_dot_product_attention` on contiguous [B, N, T, H], its best layout."""
    inputs = _tensors(case, *case.inputs())
    attend = _sdpa(case)
    return _work(case, lambda: attend(*inputs), inputs)


def flex(case: Case) -> Work:
    """Build `flex_attention` with a block mask, compiled."""
    torch, device = _torch()
    if device == "cpu":
        raise RefusalError("flex_attention is compiled for GPUs; this is a CPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs, blocks = _tensors(case, *case.inputs()), None
    if case.causal:
        blocks = create_block_mask(
            lambda b, n, i, j: i >= j, None, None, case.T, case.T, device=device
        )
    # One graph for these sizes: otherwise torch stops compiling after some cases.
    attend = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return _work(case, lambda: attend(*inputs, block_mask=blocks), inputs)


def linear_sdpa(case: Case) -> Work:
    """Build four linear layers around `scaled_dot_product_attention`."""
    torch, _ = _torch()
    (x,), params = _tensors(case, *case.inputs()), _parameters(case)
    linear, attend = torch.nn.functional.linear, _sdpa(case)

    def forward() -> Any:
        q, k, v = (linear(x, *p).view(case.B, case.T, case.N, -1).transpose(1, 2)
                   for p in params[:3])  # fmt: skip
        out = attend(q, k, v).transpose(1, 2)
        return linear(out.reshape(case.B, case.T, case.D), *params[3])

    return _work(case, forward, [x], [tensor for pair in params for tensor in pair])


def step(case: Case) -> Work:
    """Build steps of one token: four `Linear`, a static cache, and SDPA with a mask of its
    slots.
    """
    torch, device = _torch()
    B, S, N, D, at = case.B, case.T, case.N, case.D, case.T * 3 // 4
    options = {"device": device, "dtype": getattr(torch, case.dtype)}
    q, k, v, out = (torch.nn.Linear(D, D, **options) for _ in range(4))
    keys, values = (torch.zeros(B, N, S, D // N, **options) for _ in range(2))
    x, slots = torch.ones(B, 1, D, **options), torch.arange(S, device=device)
    attend, places = torch.nn.functional.scaled_dot_product_attention, slice(at, at + 1)

    def call() -> Any:
        with torch.no_grad():
            heads = [f(x).view(B, 1, N, -1).transpose(1, 2) for f in (q, k, v)]
            keys[:, :, places], values[:, :, places] = heads[1:]
            seen = attend(heads[0], keys, values, attn_mask=(slots <= at)[None, None, None])
            return out(seen.transpose(1, 2).reshape(B, 1, D))

    return Work(call, _wait(), tokens=B)


def release() -> None:
    """Release GPU memory that torch reserves without using, because JAX may need it next."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _torch() -> tuple[Any, str]:
    """Return the module, and the device that matches JAX's."""
    import torch

    if jax.default_backend() == "cpu":
        torch.set_num_threads(cores())
        return torch, "cpu"
    torch.set_float32_matmul_precision("high")  # JAX's default
    return torch, "cuda"


def _wait() -> Callable[[Any], None]:
    torch, device = _torch()
    return lambda _: torch.cuda.synchronize() if device == "cuda" else None


def _tensors(case: Case, *arrays: np.ndarray) -> list[Any]:
    """Return arrays as tensors, those with heads as [B, N, T, H]."""
    torch, device = _torch()
    tensors = (torch.from_numpy(x).to(device, getattr(torch, case.dtype)) for x in arrays)
    return [x.transpose(1, 2).contiguous() if x.ndim == 4 else x for x in tensors]


def _parameters(case: Case) -> list[Any]:
    """Return the weights [out, in] and biases of query, key, value and output."""
    return [_tensors(case, kernel.T.copy(), bias) for kernel, bias in case.projections()]


def _sdpa(case: Case) -> Callable[..., Any]:
    torch, _ = _torch()
    attend = torch.nn.functional.scaled_dot_product_attention
    return functools.partial(attend, is_causal=case.causal)


def _work(
    case: Case, forward: Callable[[], Any], inputs: list[Any], params: Sequence[Any] = ()
) -> Work:
    """Build forward without gradients, or forward and `autograd.grad` of all leaves."""
    torch, _ = _torch()
    cotangent, *_ = _tensors(case, *case.inputs())
    leaves = [*params, *inputs]
    for leaf in leaves:
        leaf.requires_grad_(case.backward)

    def call() -> Any:
        with torch.set_grad_enabled(case.backward):
            out = forward()
            grads = torch.autograd.grad(out, leaves, cotangent) if case.backward else ()
        return [x.transpose(1, 2) if x.ndim == 4 else x for x in (out, *grads)]

    return Work(call, _wait())
