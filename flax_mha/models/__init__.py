"""Models built from the layer: feed-forward, experts, blocks, stacks, models, generation."""

from flax_mha.models.embeddings import PatchEmbedding as PatchEmbedding
from flax_mha.models.embeddings import TokenEmbedding as TokenEmbedding
from flax_mha.models.models import Classifier as Classifier
from flax_mha.models.models import LanguageModel as LanguageModel
from flax_mha.models.models import Translator as Translator
from flax_mha.models.stacks import Decoder as Decoder
from flax_mha.models.stacks import Encoder as Encoder
from flax_mha.positions import PositionEmbedding as PositionEmbedding

__all__ = [
    "Classifier", "Decoder", "Encoder", "LanguageModel", "PatchEmbedding", "PositionEmbedding",
    "TokenEmbedding", "Translator",
]  # fmt: skip
__dir__ = __all__.copy
