"""The part of flex for NVIDIA's Hopper, in Pallas' Mosaic GPU: a producer and two consumers.

It refuses float32, which `wgmma` would round to TF32. Heads above 64 features have a pass each for
the gradients of keys and of values, and each learned array has one that computes the scores again.

Compiled for an H200 (MOSAIC_GPU_DUMP_PTX=1, then `ptxas -v`), every kernel has 240 registers in a
consumer's thread and 24 in the producer's, takes 80 to 202 KiB of shared memory, and spills none.
With the wheel `nvidia-nvjitlink`, XLA may compile in parts. `ptxas` then gives 168 registers to
each thread (C7504).
"""

import math

import jax
import jax.numpy as jnp

from flax_mha.base import shapes
from flax_mha.kernels.call.spec import Platform
from flax_mha.kernels.chips import gpus
from flax_mha.kernels.flex.hopper.block import BLOCK
from flax_mha.kernels.flex.hopper.fragments import call, missing
from flax_mha.kernels.flex.hopper.kernels import FORWARD, forward, gradients
from flax_mha.kernels.flex.tile import Machine
from flax_mha.sharding.shard_map import varying

# Why this JAX can't run it, or None.
LACKING = (
    None if jax.__version_info__ >= (0, 12)
    else f"needs JAX 0.12 for NVIDIA GPUs, this is {jax.__version__}"
)  # fmt: skip
# Its compute capability, whose matmuls (`wgmma`) no later generation has.
HOPPER = (9, 0)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, platform: Platform) -> str | None:
    dims, capability = shapes.Dims.of(q, k, v), gpus.capability(platform.device)
    if LACKING or isinstance(capability, str):
        return LACKING or str(capability)
    if capability != HOPPER:
        return f"runs on NVIDIA GPUs of the Hopper generation only, this is {platform.device}"
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16 on NVIDIA GPUs, got {q.dtype}"
    if not (dims.T and dims.S and math.prod(dims.B)):
        return "there are no rows, queries or keys"
    if max(dims.H, dims.Hv) > max(FORWARD):
        return f"takes heads of at most {max(FORWARD)} features, got {max(dims.H, dims.Hv)}"
    return "inside jax.shard_map it needs check_vma=False" if varying(q) else None


MACHINE = Machine(
    check=_check, blocks=lambda dims, device: [((BLOCK, BLOCK), 1.0)], table=2**22,
    whole_tiles=False, lanes=False, visits=lambda call, states, dtype: None,
    turns=lambda call, dtype: False, missing=missing, run=call, forward=forward,
    gradients=gradients,
)  # fmt: skip
