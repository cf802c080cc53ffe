"""Layers with other projections or weights than `MultiHeadAttention`."""

from flax_mha.variants.chosen_blocks import ChosenBlocksAttention
from flax_mha.variants.differential import DifferentialAttention
from flax_mha.variants.forgetting import ForgettingAttention
from flax_mha.variants.latent import MultiHeadLatentAttention
from flax_mha.variants.talking_heads import TalkingHeadsAttention

__all__ = [
    "ChosenBlocksAttention", "DifferentialAttention", "ForgettingAttention",
    "MultiHeadLatentAttention", "TalkingHeadsAttention",
]  # fmt: skip
__dir__ = __all__.copy
