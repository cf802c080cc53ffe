"""PyTorch's attention, eager, with one thread per core."""

import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.measure.machine import cores
from experiments.measure.peers.cases import Case
from experiments.measure.peers.work import Outcome, norm
from experiments.measure.timing import RefusalError, Work


def core(case: Case) -> Work:
    """Build `scaled_dot_product_attention` on contiguous [B, N, T, H], its best layout."""
    torch, device = _torch()
    dtype = getattr(torch, case.dtype)
    q, k, v, cotangent = (
        torch.from_numpy(x).to(device, dtype).transpose(1, 2).contiguous()
        for x in (*case.inputs(), case.cotangent())
    )
    mask = _mask(case, torch, device)
    return _work(
        case, torch, lambda: _sdpa(case, torch, q, k, v, mask), [q, k, v], [], cotangent,
        lambda x: x.transpose(1, 2),
    )  # fmt: skip


def flex(case: Case) -> Work:
    """Build `flex_attention` with a block mask, compiled."""
    torch, device = _torch()
    if device == "cpu":
        raise RefusalError("flex_attention is compiled for GPUs; this is a CPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, cotangent = (
        torch.from_numpy(x).to(device, getattr(torch, case.dtype)).transpose(1, 2).contiguous()
        for x in (*case.inputs(), case.cotangent())
    )
    rule, blocks = _rule(case, torch, device), None
    if rule is not None:
        blocks = create_block_mask(rule, None, None, case.T, case.T, device=device)
    # One graph for these sizes: otherwise torch stops compiling after some cases.
    attend = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    gqa = q.shape[1] != k.shape[1]
    return _work(
        case, torch, lambda: attend(q, k, v, block_mask=blocks, enable_gqa=gqa), [q, k, v], [],
        cotangent, lambda x: x.transpose(1, 2),
    )  # fmt: skip


def linear_sdpa(case: Case) -> Work:
    """Build four `Linear` around `scaled_dot_product_attention`."""
    torch, device = _torch()
    dtype = getattr(torch, case.dtype)
    names = ("query", "key", "value", "out")
    layers = [torch.nn.Linear(case.D, case.D, device=device, dtype=dtype) for _ in names]
    given = case.parameters()
    with torch.no_grad():
        for layer, name in zip(layers, names, strict=True):
            layer.weight.copy_(_weight(torch, given[name]["kernel"], case.D))
            layer.bias.copy_(torch.from_numpy(given[name]["bias"].reshape(-1)))
    x, cotangent = _layer_arrays(case, torch, device)
    mask = _mask(case, torch, device)

    def forward() -> Any:
        q, k, v = (f(x).view(case.B, case.T, case.N, -1).transpose(1, 2) for f in layers[:3])
        out = _sdpa(case, torch, q, k, v, mask)
        return layers[3](out.transpose(1, 2).reshape(case.B, case.T, case.D))

    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return _work(case, torch, forward, [x], parameters, cotangent)


def multihead_attention(case: Case) -> Work:
    """Build `nn.MultiheadAttention` without returned weights."""
    torch, device = _torch()
    dtype = getattr(torch, case.dtype)
    # Use training mode in forward passes too: without dropout the numbers are the same, and eval()
    # takes a path that was 2 to 5 times slower on CPU and holds all scores.
    layer = torch.nn.MultiheadAttention(
        case.D, case.N, batch_first=True, device=device, dtype=dtype
    )
    given = case.parameters()
    three = [given[name] for name in ("query", "key", "value")]
    with torch.no_grad():
        layer.in_proj_weight.copy_(
            torch.cat([_weight(torch, each["kernel"], case.D) for each in three])
        )
        layer.in_proj_bias.copy_(torch.cat([torch.from_numpy(p["bias"].ravel()) for p in three]))
        layer.out_proj.weight.copy_(_weight(torch, given["out"]["kernel"], case.D))
        layer.out_proj.bias.copy_(torch.from_numpy(given["out"]["bias"]))
    x, cotangent = _layer_arrays(case, torch, device)
    mask = _mask(case, torch, device)
    if case.causal and mask is None:  # it needs the mask beside the hint
        mask = torch.ones(case.T, case.T, dtype=torch.bool, device=device).tril()
    hidden = None if mask is None else ~mask  # True where a query may not see

    def forward() -> Any:
        return layer(
            x, x, x, need_weights=False, attn_mask=hidden,
            is_causal=case.causal and not (case.window or case.documents),
        )[0]  # fmt: skip

    return _work(case, torch, forward, [x], list(layer.parameters()), cotangent)


def decoding(size: Any, filled: int) -> Work:
    """Build steps of one token: four `Linear`, a static cache, and SDPA with a mask of its
    slots.
    """
    torch, device = _torch()
    B, S, N, D = size[:4]
    dtype = getattr(torch, size.dtype)
    q, k, v, out = (torch.nn.Linear(D, D, device=device, dtype=dtype) for _ in range(4))
    keys, values = (torch.zeros(B, N, S, D // N, device=device, dtype=dtype) for _ in range(2))
    x, slots = torch.ones(B, 1, D, device=device, dtype=dtype), torch.arange(S, device=device)
    state = {"at": filled}

    def call() -> Any:
        at = state["at"]
        state["at"] = at + 1 if at + 1 < S else filled
        with torch.no_grad():
            heads = [f(x).view(B, 1, N, -1).transpose(1, 2) for f in (q, k, v)]
            keys[:, :, at : at + 1], values[:, :, at : at + 1] = heads[1:]
            attend = torch.nn.functional.scaled_dot_product_attention
            seen = attend(heads[0], keys, values, attn_mask=(slots <= at)[None, None, None])
            return out(seen.transpose(1, 2).reshape(B, 1, D))

    def wait(_: Any) -> None:
        if x.is_cuda:
            torch.cuda.synchronize()

    return Work(call, wait, lambda result: Outcome(_float32(result), (), 0.0))


def release() -> None:
    """Release GPU memory that torch reserves without using, because JAX may need it next."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _torch() -> tuple[Any, str]:
    """Return the module, and the device that matches JAX's."""
    if importlib.util.find_spec("torch") is None:
        raise RefusalError("torch is not installed")
    import torch

    if jax.default_backend() == "cpu":
        torch.set_num_threads(cores())
        return torch, "cpu"
    if not torch.cuda.is_available():
        raise RefusalError(f"torch has no GPU, and JAX runs on {jax.default_backend()}")
    # JAX's default.
    torch.set_float32_matmul_precision("high")
    return torch, "cuda"


def _weight(torch: Any, kernel: np.ndarray, D: int) -> Any:
    """Convert a kernel [in, out] with any number of axes to torch's [out, in]."""
    return torch.from_numpy(kernel.reshape(D, D).T.copy())


def _layer_arrays(case: Case, torch: Any, device: str) -> tuple[Any, Any]:
    arrays = (*case.inputs(), case.cotangent())
    x, cotangent = (torch.from_numpy(x).to(device, getattr(torch, case.dtype)) for x in arrays)
    return x, cotangent


def _mask(case: Case, torch: Any, device: str) -> Any:
    """Return a window and documents as bool [T, T], or None if `is_causal` is enough."""
    if not (case.window or case.documents):
        return None
    ones = torch.ones(case.T, case.T, dtype=torch.bool, device=device)
    reach = (case.window or case.T) - 1
    seen = ones.tril(0 if case.causal else reach).triu(-reach)
    if case.documents:
        lengths = torch.from_numpy(case.lengths()).to(device)
        document = torch.repeat_interleave(lengths)
        seen &= document[:, None] == document[None]
    return seen


def _rule(case: Case, torch: Any, device: str) -> Callable[..., Any] | None:
    """Return the mask as an index rule for flex_attention without tables, or None for no mask."""
    if not (case.causal or case.window or case.documents):
        return None
    reach = (case.window or case.T) - 1
    ahead = 0 if case.causal else reach
    document = torch.repeat_interleave(torch.from_numpy(case.lengths()).to(device))

    def rule(b: Any, n: Any, i: Any, j: Any) -> Any:
        near = (i - j <= reach) & (j - i <= ahead)
        return near & (document[i] == document[j]) if case.documents else near

    return rule


def _sdpa(case: Case, torch: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    causal = case.causal and mask is None
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _work(
    case: Case,
    torch: Any,
    forward: Callable[[], Any],
    inputs: Sequence[Any],
    parameters: Sequence[Any],
    cotangent: Any,
    layout: Callable[[Any], Any] = lambda x: x,
) -> Work:
    """Build forward without gradients, or forward and `autograd.grad` of all leaves."""
    leaves = [*inputs, *parameters]
    for leaf in leaves:
        leaf.requires_grad_(case.backward)

    def call() -> Any:
        if not case.backward:
            with torch.no_grad():
                return forward(), ()
        out = forward()
        return out, torch.autograd.grad(out, leaves, cotangent)

    def wait(_: Any) -> None:
        if cotangent.is_cuda:
            torch.cuda.synchronize()

    def outcome(result: Any) -> Outcome:
        out, grads = result
        flat = [_float32(grad) for grad in grads[len(inputs) :]]
        ours = tuple(_float32(layout(grad)) for grad in grads[: len(inputs)])
        return Outcome(_float32(layout(out)), ours, norm(flat))

    def growth(function: Callable[[], Any]) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return int(torch.cuda.max_memory_allocated() - before)

    return Work(call, wait, outcome, growth=growth if cotangent.is_cuda else None)


def _float32(x: Any) -> np.ndarray:
    array: np.ndarray = x.detach().float().cpu().numpy()
    return array
