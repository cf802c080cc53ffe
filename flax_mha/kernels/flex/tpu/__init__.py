"""The part of flex for TPUs, in Pallas' Mosaic: blocks of fast memory, in the order of a grid."""

from collections.abc import Sequence

import jax

from flax_mha.kernels import tpu
from flax_mha.kernels.flex.function import Function
from flax_mha.kernels.flex.tile import Machine
from flax_mha.kernels.flex.tpu.kernels import forward, gradients
from flax_mha.kernels.flex.tpu.mosaic import call, missing_operation
from flax_mha.kernels.spec import Platform


def _check(q: jax.Array, k: jax.Array, v: jax.Array, platform: Platform) -> str | None:
    del platform
    return tpu.check(q, k, v)


def _missing(function: Function, whole: Sequence[bool]) -> str | None:
    del whole
    return missing_operation(function)


# Tables of tiles are in scalar memory.
MACHINE = Machine(_check, tpu.blocks, 2**16, _missing, call, True, forward, gradients)
