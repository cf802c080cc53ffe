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
    "Translator", "analysis", "attention_fn", "cache", "combine_masks",
    "dot_product_attention", "dot_product_attention_weights", "edits", "explain", "generate",
    "interop", "make_attention_mask", "make_causal_mask", "masks", "models", "muon_dimensions",
    "plots", "positions", "qk_clip", "sampling", "scores", "sharding", "variants",
]  # fmt: skip

if TYPE_CHECKING:
    from flax_mha import (
        analysis,
        cache,
        edits,
        interop,
        masks,
        models,
        plots,
        positions,
        sampling,
        scores,
        sharding,
        variants,
    )
    from flax_mha import nnx as nnx
    from flax_mha.cache import CacheConfig, KVCache
    from flax_mha.kernels import Capture, Explanation, Platform, dot_product_attention, explain
    from flax_mha.layer.qk_norm import QKNorm
    from flax_mha.linen import MultiHeadAttention, MultiHeadDotProductAttention, SelfAttention
    from flax_mha.masks.helpers import combine_masks, make_attention_mask, make_causal_mask
    from flax_mha.models import Classifier, Decoder, Encoder, LanguageModel, Translator
    from flax_mha.models.blocks import DecoderBlock, EncoderBlock
    from flax_mha.models.experts import Experts
    from flax_mha.models.feed_forward import MLP
    from flax_mha.models.generation import Generated, generate
    from flax_mha.optimizers.muon import muon_dimensions
    from flax_mha.optimizers.qk_clip import qk_clip
    from flax_mha.signatures.attention_fn import attention_fn, dot_product_attention_weights
else:  # Hide `__getattr__` from type checkers, which would accept any name.
    _HOMES = {
        "linen": ("MultiHeadAttention", "MultiHeadDotProductAttention", "SelfAttention"),
        "models.blocks": ("DecoderBlock", "EncoderBlock"),
        "cache": ("CacheConfig", "KVCache"),
        "models.experts": ("Experts",),
        "signatures.attention_fn": ("attention_fn", "dot_product_attention_weights"),
        "optimizers.muon": ("muon_dimensions",),
        "optimizers.qk_clip": ("qk_clip",),
        "masks.helpers": ("combine_masks", "make_attention_mask", "make_causal_mask"),
        "models.generation": ("Generated", "generate"),
        "kernels": ("Capture", "Explanation", "Platform", "dot_product_attention", "explain"),
        "models.feed_forward": ("MLP",),
        "layer.qk_norm": ("QKNorm",),
        "models": ("Classifier", "Decoder", "Encoder", "LanguageModel", "Translator"),
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names}
    # `nnx` is not in `__all__`, as a star import would replace Flax's.
    _NAMES = {*__all__, "nnx"}

    def __getattr__(name: str) -> object:
        if name not in _NAMES:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}", name=name,
                obj=sys.modules[__name__],
            )  # fmt: skip
        home = f"{__name__}.{_HOME.get(name, name)}"
        module = importlib.import_module(home)
        value: object = getattr(module, name) if name in _HOME else module
        globals()[name] = value  # Python finds it without this function next time.
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_NAMES})
