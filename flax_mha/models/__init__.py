"""Models built from the layer: feed-forward, experts, blocks, stacks, models, generation."""

from flax_mha.models.embeddings import PatchEmbedding, TokenEmbedding
from flax_mha.models.models import Classifier, LanguageModel, Translator
from flax_mha.models.stacks import Decoder, Encoder
from flax_mha.positions import PositionEmbedding

__all__ = [
    "Classifier", "Decoder", "Encoder", "LanguageModel", "PatchEmbedding", "PositionEmbedding",
    "TokenEmbedding", "Translator",
]  # fmt: skip
__dir__ = __all__.copy
