"""Position encodings: sinusoidal, rotary, and a learned table."""

from flax_mha.positions.axial import Axial as Axial
from flax_mha.positions.axial import MRope as MRope
from flax_mha.positions.embedding import PositionEmbedding as PositionEmbedding
from flax_mha.positions.embedding import sinusoidal as sinusoidal
from flax_mha.positions.rope import Rotary as Rotary
from flax_mha.positions.rope import Rotation as Rotation
from flax_mha.positions.rope import rotary as rotary
from flax_mha.positions.rope_scaling import DynamicNtk as DynamicNtk
from flax_mha.positions.rope_scaling import Interpolation as Interpolation
from flax_mha.positions.rope_scaling import Llama3 as Llama3
from flax_mha.positions.rope_scaling import LongRope as LongRope
from flax_mha.positions.rope_scaling import Ntk as Ntk
from flax_mha.positions.rope_scaling import Proportional as Proportional
from flax_mha.positions.rope_scaling import Yarn as Yarn

__all__ = [
    "Axial", "DynamicNtk", "Interpolation", "Llama3", "LongRope", "MRope", "Ntk",
    "PositionEmbedding", "Proportional", "Rotary", "Rotation", "Yarn", "rotary", "sinusoidal",
]  # fmt: skip
__dir__ = __all__.copy
