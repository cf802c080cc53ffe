"""Layers that project or combine otherwise than `MultiHeadAttention`, on the same core."""

from flax_mha.variants.differential import DifferentialAttention as DifferentialAttention
from flax_mha.variants.latent import MultiHeadLatentAttention as MultiHeadLatentAttention
