"""Multi-head attention for JAX and Flax.

Names are imported on first use, so that `import flax_mha` is fast.
"""

import importlib
import sys
from typing import TYPE_CHECKING

__version__ = "0.3.0"

__all__ = [
    "MLP", "CacheConfig", "Capture", "Classifier", "Decoder", "DecoderBlock", "Encoder",
    "EncoderBlock", "Experts", "Explanation", "Generated", "KVCache", "LanguageModel",
    "MultiHeadAttention", "MultiHeadDotProductAttention", "Platform", "QKNorm", "SelfAttention",
    "Translator", "analysis", "attention_fn", "cache", "dot_product_attention",
    "dot_product_attention_weights", "edits", "explain", "generate", "interop", "masks", "models",
    "muon_dimensions", "plots", "positions", "qk_clip", "sampling", "scores", "sharding",
    "variants",
]  # fmt: skip

if TYPE_CHECKING:
    from flax_mha import analysis as analysis
    from flax_mha import cache as cache
    from flax_mha import interop as interop
    from flax_mha import masks as masks
    from flax_mha import models as models
    from flax_mha import nnx as nnx
    from flax_mha import positions as positions
    from flax_mha import scores as scores
    from flax_mha import sharding as sharding
    from flax_mha import variants as variants
    from flax_mha.cache import CacheConfig as CacheConfig
    from flax_mha.cache import KVCache as KVCache
    from flax_mha.kernels import Capture as Capture
    from flax_mha.kernels import Explanation as Explanation
    from flax_mha.kernels import Platform as Platform
    from flax_mha.kernels import dot_product_attention as dot_product_attention
    from flax_mha.kernels import explain as explain
    from flax_mha.layer import edits as edits
    from flax_mha.layer import plots as plots
    from flax_mha.layer.attention_fn import attention_fn as attention_fn
    from flax_mha.layer.attention_fn import (
        dot_product_attention_weights as dot_product_attention_weights,
    )
    from flax_mha.layer.muon import muon_dimensions as muon_dimensions
    from flax_mha.layer.qk_clip import qk_clip as qk_clip
    from flax_mha.layer.qk_norm import QKNorm as QKNorm
    from flax_mha.linen import MultiHeadAttention as MultiHeadAttention
    from flax_mha.linen import MultiHeadDotProductAttention as MultiHeadDotProductAttention
    from flax_mha.linen import SelfAttention as SelfAttention
    from flax_mha.models import Classifier as Classifier
    from flax_mha.models import LanguageModel as LanguageModel
    from flax_mha.models import Translator as Translator
    from flax_mha.models import sampling as sampling
    from flax_mha.models.blocks import DecoderBlock as DecoderBlock
    from flax_mha.models.blocks import EncoderBlock as EncoderBlock
    from flax_mha.models.experts import Experts as Experts
    from flax_mha.models.feed_forward import MLP as MLP
    from flax_mha.models.generation import Generated as Generated
    from flax_mha.models.generation import generate as generate
    from flax_mha.models.stacks import Decoder as Decoder
    from flax_mha.models.stacks import Encoder as Encoder
else:  # Hide `__getattr__` from type checkers, which would accept any name.
    _HOMES = {
        "linen": ("MultiHeadAttention", "MultiHeadDotProductAttention", "SelfAttention"),
        "models.blocks": ("DecoderBlock", "EncoderBlock"),
        "cache": ("CacheConfig", "KVCache"),
        "layer": ("edits", "plots"),
        "models.experts": ("Experts",),
        "layer.attention_fn": ("attention_fn", "dot_product_attention_weights"),
        "layer.muon": ("muon_dimensions",),
        "layer.qk_clip": ("qk_clip",),
        "models.generation": ("Generated", "generate"),
        "kernels": ("Capture", "Explanation", "Platform", "dot_product_attention", "explain"),
        "models.feed_forward": ("MLP",),
        "layer.qk_norm": ("QKNorm",),
        "models": ("Classifier", "LanguageModel", "Translator", "sampling"),
        "models.stacks": ("Decoder", "Encoder"),
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names}
    # `nnx` is not in `__all__`, as a star import would replace Flax's.
    _NAMES = {*__all__, "nnx"}

    def __getattr__(name: str) -> object:
        if name not in _NAMES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])
        home = f"{__name__}.{_HOME.get(name, name)}"
        value: object = importlib.import_module(home)
        if name in _HOME:
            value = getattr(value, name, None) or importlib.import_module(f"{home}.{name}")
        globals()[name] = value  # Python finds it without this function next time.
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_NAMES})
