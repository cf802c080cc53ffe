"""Multi-head attention for Flax: masks as values, sharded heads, linear memory."""

from flax_mha import cache as cache
from flax_mha import masks as masks
from flax_mha import positions as positions
from flax_mha import scores as scores
from flax_mha import sharding as sharding
from flax_mha.attention import MultiHeadAttention as MultiHeadAttention
from flax_mha.blocks import DecoderBlock as DecoderBlock
from flax_mha.blocks import EncoderBlock as EncoderBlock
from flax_mha.kernels import dot_product_attention as dot_product_attention
from flax_mha.kernels import explain as explain
from flax_mha.mlp import MLP as MLP
from flax_mha.models import Classifier as Classifier
from flax_mha.models import Encoder as Encoder

__version__ = "0.1.0"
