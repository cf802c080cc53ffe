"""The operations of one device of a compiled program.

Only matmuls count, two operations for each multiplication and addition: `dot`, `convolution` (the
TPU compiler's form of matmuls), calls of GPU libraries, and matmuls inside Pallas kernels. XLA's
own count (`cost_analysis`) has each loop's body once, and no Pallas kernel.
"""

import math
import re
from typing import Any

from jax.extend import core

from experiments.common.counts.hlo import Instruction, Module, arrays


def flops(module: Module) -> int:
    """Return the operations of a program's matmuls, except inside Pallas kernels."""
    return sum(
        run.times * _product(module, run.computation, run.instruction) for run in module.runs()
    )


def pallas_flops(jaxpr: Any) -> int:
    """Return the operations of matmuls in a traced program's Pallas kernels, on one device.

    The whole body counts for each step of a kernel's grid: blocks that a mask skips count if they
    are steps of the grid.
    """
    return _walk(jaxpr, 1, inside=False)


def _walk(jaxpr: Any, times: int, inside: bool) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general" and inside:
            ((contracted, _), _), left = params["dimension_numbers"], eqn.invars[0].aval
            size = math.prod(left.shape[axis] for axis in contracted)
            total += 2 * times * size * eqn.outvars[0].aval.size
        elif name == "cond":
            total += max(_walk(b.jaxpr, times, inside) for b in params["branches"])
        else:
            is_kernel, turns = name == "pallas_call", 1
            if is_kernel:  # Bounds of the grid that are arrays are unknown here.
                grid = params["grid_mapping"].grid
                turns = math.prod(size for size in grid if isinstance(size, int))
            elif name == "scan":
                turns = params["length"]
            for inner in core.jaxprs_in_params(params):
                total += _walk(inner, times * turns, inside or is_kernel)
    return total


def _product(module: Module, computation: str, x: Instruction) -> int:
    if x.opcode == "convolution":
        return _convolution(module, computation, x)
    if "__cudnn$fmha" in x.rest:
        return _attention(module, computation, x)
    contracted = re.search(
        r'lhs_contracting_dim(?:ension)?s\\?"?[=:][{\[]\\?"?([\d",\\]*)[}\]]', x.rest
    )
    if contracted is None or x.opcode not in ("dot", "custom-call"):
        return 0
    (left, *_) = arrays(module.type_of(computation, x.operands[0]))
    (out, *_) = arrays(x.type)  # the rest is scratch memory
    axes = re.findall(r"\d+", contracted[1])
    return 2 * out.size * math.prod(left.shape[int(axis)] for axis in axes)


def _attention(module: Module, computation: str, x: Instruction) -> int:
    """Count cuDNN's attention: two matmuls of all scores forward, five backward, for any mask."""
    scores = re.search(
        r'intermediate_tensor_shape\\?":\{\\?"dimensions\\?":\[([\d",\\]+)\]', x.rest
    )
    if scores is None:
        raise ValueError(f"attention of cuDNN without the shape of its scores: {x.rest[:200]}")
    count = math.prod(int(n) for n in re.findall(r"\d+", scores[1]))
    (q,) = arrays(module.type_of(computation, x.operands[0]))
    return 2 * (5 if "Backward" in x.rest else 2) * count * q.shape[-1]


def _convolution(module: Module, computation: str, x: Instruction) -> int:
    """Count multiplications that meet no padding, and as many additions.

    Matmuls with batch axes are convolutions over these axes, where most positions are padding.
    """
    left, kernel = (arrays(module.type_of(computation, name))[0] for name in x.operands[:2])
    (out,) = arrays(x.type)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.rest)
    if labels is None:
        raise ValueError(f"a convolution without dim_labels: {x.rest[:200]}")
    of_left, of_kernel, of_out = labels.groups()
    total = 2 * out.shape[of_out.index("b")] * out.shape[of_out.index("f")]
    total *= kernel.shape[of_kernel.index("i")]
    window = re.search(r"window=\{([^}]*)\}", x.rest)
    pairs = [word.split("=") for word in window[1].split()] if window else []
    for axis in sorted(set(of_out) - set("bf")):
        total *= _meetings(
            left.shape[of_left.index(axis)], kernel.shape[of_kernel.index(axis)],
            out.shape[of_out.index(axis)],
            {name: value.split("x")[int(axis)] for name, value in pairs},
        )  # fmt: skip
    return total


def _meetings(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Count the pairs of result and kernel indices along an axis that meet an element."""
    low = int(window.get("pad", "0_0").split("_")[0])
    stride, dilation, spread = (
        int(window.get(name, "1")) for name in ("stride", "rhs_dilate", "lhs_dilate")
    )
    return sum(
        0 <= place < (size - 1) * spread + 1 and place % spread == 0
        for o in range(out)
        for place in range(o * stride - low, o * stride - low + kernel * dilation, dilation)
    )
