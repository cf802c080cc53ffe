"""The part of flex for TPUs, in Pallas' Mosaic: blocks of fast memory, in the order of a grid."""

from flax_mha.kernels import tpu
from flax_mha.kernels.flex.tile import Machine
from flax_mha.kernels.flex.tpu.kernels import forward, gradients
from flax_mha.kernels.flex.tpu.mosaic import call, missing_operation

# Tables of tiles are in scalar memory.
MACHINE = Machine(tpu.check, tpu.blocks, 2**16, missing_operation, call, forward, gradients)
