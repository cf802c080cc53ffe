"""Position encodings: sinusoidal, rotary, and a learned table."""

from flax_mha.positions.axial import Axial, MRope
from flax_mha.positions.embedding import PositionEmbedding, sinusoidal
from flax_mha.positions.rope import Rotary, Rotation, rotary
from flax_mha.positions.rope_scaling import (
    DynamicNtk,
    Interpolation,
    Llama3,
    LongRope,
    Ntk,
    Proportional,
    Yarn,
)

__all__ = [
    "Axial", "DynamicNtk", "Interpolation", "Llama3", "LongRope", "MRope", "Ntk",
    "PositionEmbedding", "Proportional", "Rotary", "Rotation", "Yarn", "rotary", "sinusoidal",
]  # fmt: skip
__dir__ = __all__.copy
