"""Compile the kernels for Hopper, with no GPU, and print a table of registers and limits.

    python -m experiments.measure registers                 # an H200, bfloat16, no mask: minutes
    python -m experiments.measure registers --dtype=float16 --call=causal --heads=64,128

Each line is one kernel at one head size, of a call without a mask, with a causal one, or with `all`
of: segments, a soft cap, ALiBi, a bias and dropout. It has the registers that a consumer and the
producer may use, the bytes that spill, the shared memory, the rows that are loaded at a time and
the buffers for them. Beside it is the number of scores per nanosecond at which the tensor cores,
the memory, or the exponentials are at their limits. These limits are arithmetic. Nothing is run or
timed. It needs the wheels of the extra gpu-compile, and `ptxas` (nvidia-cuda-nvcc).
"""

import argparse
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import tables
from experiments.counts.chips import GPUS
from experiments.measure.compiled import chip_of
from experiments.plan import gpus
from experiments.runs.failures import RunError
from flax_mha import dot_product_attention, masks, scores

T, N, K = 1000, 4, 2
HEADS = (64, 128, 192, 256)
# The matmuls of a kernel, and the rows and columns of the other side that it loads, in heads.
MATMULS = {"forward": 2, "dq": 3, "dkv": 4, "dk": 3, "dv": 2, "dleaf": 2}
# The exponentials of a multiprocessor per clock: NVIDIA's programming guide, throughput of
# arithmetic instructions, compute capability 9.0.
EXPONENTIALS = 16
HEADER = (
    "kernel", "head", "registers", "spilled", "shared memory", "rows × buffers", "by matmuls",
    "by loads", "by exponentials",
)  # fmt: skip


class Found(NamedTuple):
    """The compiler's figures of a kernel.

    Attributes:
      name: the kernel's name.
      spilled: the bytes of registers that are stored to memory.
      shared: the bytes of shared memory.
      size: the rows that are loaded at a time, and the buffers for them.
    """

    name: str
    spilled: int
    shared: int
    size: Any


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--call", choices=("plain", "causal", "all"), default="plain")
    parser.add_argument("--heads", default=",".join(map(str, HEADS)), help="features, with commas")


def run(flags: argparse.Namespace) -> None:
    """Print the table, line by line."""
    ptxas = _ptxas()
    if ptxas is None:
        raise RunError("needs ptxas; pip install --no-deps nvidia-cuda-nvcc")
    print(tables.head(*HEADER))
    for features in map(int, flags.heads.split(",")):
        for found in compiled(features, flags.dtype, flags.call, ptxas):
            print(line(found, features), flush=True)


def _ptxas() -> str | None:
    """Return the path of ptxas, of a wheel or of the machine."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    return next((str(x) for x in wheels.glob("*/bin/ptxas")), shutil.which("ptxas"))


def compiled(features: int, dtype: str, call: str, ptxas: str) -> Iterator[Found]:
    """Yield each kernel of a call and its gradients, compiled for an H200."""
    with tempfile.TemporaryDirectory() as folder:
        # Mosaic writes its programs there. They are compiled as a whole, because the compiler
        # ignores the registers that a warpgroup asks for in a program that is linked later.
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1"}
        sizes = _compile(features, dtype, call)
        for path in sorted(Path(folder).glob("*.ptx")):
            command = [ptxas, "-arch=sm_90a", "-v", str(path), "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            spilled = re.search(r"(\d+) bytes spill stores", said)
            name = re.sub(r"_\d+$", "", path.stem)
            # Kernels of one name differ by a few bytes.
            texts = (x.read_text() for x in Path(folder).glob(f"{name}_*.resources.txt"))
            shared = [int(re.findall(r"smem_scratch_bytes=(\d+)", text)[0]) for text in texts]
            assert spilled is not None
            yield Found(name.removeprefix("flex_"), int(spilled[1]), max(shared), sizes[name])


def _compile(features: int, dtype: str, call: str) -> dict[str, Any]:
    """Compile a call and its gradients, and return the sizes of each kernel."""
    from flax_mha.kernels.flex.hopper import kernels

    if reason := gpus.lacking():
        raise RunError(f"this command {reason}; pip install -e '.[experiments,gpu-compile]'")
    chip = chip_of("h200")
    q, k = (chip.array(1, T, heads, features, dtype=jnp.dtype(dtype)) for heads in (N, K))
    learned = chip.weights(**({"slopes": (N,), "bias": (T, T)} if call == "all" else {}))

    def given(slopes: Any = None, bias: Any = None) -> dict[str, Any]:
        if call != "all":
            return {} if call == "plain" else {"mask": masks.Causal()}
        mods = scores.SoftCap(1.5), scores.Alibi(slopes)
        return {
            "mask": masks.Causal() & masks.Segments(jnp.zeros((1, T), jnp.int32)), "scores": mods,
            "bias": bias, "dropout_rate": 0.3, "dropout_rng": jax.random.key(0),
        }  # fmt: skip

    sizes: dict[str, Any] = {}
    module: Any = kernels
    original = module.run

    def noted(call: Any, x: Any, by_query: bool, size: Any, name: str, *rest: Any) -> Any:
        sizes[name] = size
        return original(call, x, by_query, size, name, *rest)

    def loss(q: Any, k: Any, v: Any, learned: Any) -> Any:
        out = dot_product_attention(q, k, v, kernel="flex", **given(**learned))
        return jnp.sum(out.astype(jnp.float32))

    module.run = noted
    with jax.set_mesh(chip.mesh):
        jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, k, k, learned).compile()
    module.run = original
    return sizes


def line(found: Found, features: int) -> str:
    """Return the line of a kernel, with its limits in scores per nanosecond."""
    from flax_mha.kernels.flex.hopper import block

    target = gpus.TARGETS["h200"]
    chip = GPUS[target.name]
    by_matmuls = chip.flops / (2 * MATMULS[found.name] * features) / 1e9
    # Each row of the other side is two vectors, for a block of rows of the own side.
    by_loads = chip.bandwidth * block.BLOCK / (4 * features) / 1e9
    by_exponentials = EXPONENTIALS * target.cores * target.clock
    return tables.line(
        f"`{found.name}`", features, "{} / {}".format(*block.REGISTERS), found.spilled,
        f"{found.shared // 1024} KiB", f"{found.size.step} × {found.size.stages}",
        f"{by_matmuls:,.0f}", f"{by_loads:,.0f}", f"{by_exponentials:,.0f}",
    )  # fmt: skip
