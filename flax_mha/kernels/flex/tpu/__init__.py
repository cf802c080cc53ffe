"""The part of flex for TPUs, in Pallas' Mosaic: blocks of fast memory, in the order of a grid."""

from flax_mha.kernels.chips import tpus
from flax_mha.kernels.flex.tile import Machine
from flax_mha.kernels.flex.tpu.kernels import forward, gradients, turns, visits
from flax_mha.kernels.flex.tpu.mosaic import call, missing_operation

MACHINE = Machine(
    check=lambda q, k, v, platform: tpus.check(q, k, v),
    blocks=tpus.block_choices,
    table=2**16,  # in scalar memory
    whole_tiles=True, lanes=True, visits=visits, turns=turns,
    missing=lambda function, operands: missing_operation(function),
    run=call, forward=forward, gradients=gradients,
)  # fmt: skip
