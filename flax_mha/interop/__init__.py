"""Conversion of Hugging Face models and other libraries' layers to Flax modules, and back.

>>> model, variables = interop.load("path/to/Qwen3-0.6B")
>>> interop.save("path/to/Qwen3-0.6B", variables, "path/to/mine")  # with its tokenizer
>>> module, variables = interop.from_torch(layer.state_dict(), num_heads=8)
>>> module, variables = interop.from_layer(arrays, num_heads=8)  # from Keras, Haiku, timm …
>>> fast = interop.swap(model)  # replaces Flax's attention layers

A family is a module with a table of its tensors (`flax_mha.interop.table`), which `load` and `save`
both read.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype

from flax_mha.base import checks
from flax_mha.interop import (
    bert,
    clip,
    deepseek,
    gemma4,
    gpt,
    llama,
    llama_cpp,
    modernbert,
    neutral,
    safetensors,
    t5,
    vision,
    whisper,
)
from flax_mha.interop.checked_config import REMEDY, Config, several
from flax_mha.interop.contexts import within
from flax_mha.interop.device_put import place
from flax_mha.interop.folders import CONFIG, AnyPath, carry, open_folder
from flax_mha.interop.generating import generation
from flax_mha.interop.libraries import LIBRARIES, from_layer, to_layer
from flax_mha.interop.neutral import DECODER, ENCODER, EXPERTS, names
from flax_mha.interop.swapping import swap
from flax_mha.interop.table import Family, from_tensors, stored
from flax_mha.interop.torch_layers import from_torch, to_torch

__all__ = [
    "FAMILIES", "LIBRARIES", "family", "from_layer", "from_torch", "generation", "load", "save",
    "swap", "to_layer", "to_torch", "within",
]  # fmt: skip
__dir__ = __all__.copy

_TABLES: Any = (
    ("bert roberta xlm-roberta camembert electra ernie data2vec-text", bert.bert, ENCODER),
    ("modernbert", modernbert.modernbert,
     ENCODER | names("layer_norm_eps position_embedding_type")),
    ("distilbert", bert.distilbert, ENCODER),
    ("gpt2", gpt.gpt2, DECODER | {"scale_attn_weights": True}),
    ("gpt_neox", gpt.gpt_neox, DECODER),
    ("llama", llama.llama, DECODER | names("max_window_layers")),
    ("mistral ministral smollm3 olmo2", llama.llama, DECODER),
    # Qwen2's biases are fixed.
    ("qwen2 qwen3", llama.llama, DECODER | names("attention_bias")),
    # `hidden_act` is the old key of `hidden_activation`.
    ("gemma2 gemma3_text", llama.llama, DECODER | names("hidden_act")),
    # Sizes of parts that are refused, and images' tokens.
    ("gemma4_text", gemma4.gemma4, DECODER | {"use_bidirectional_attention": "vision"} | names(
        "moe_intermediate_size num_experts top_k_experts use_double_wide_mlp "
        "vocab_size_per_layer_input"
    )),
    ("gpt_oss", llama.gpt_oss, EXPERTS),
    ("mixtral", llama.mixtral, EXPERTS),
    ("qwen3_moe", llama.qwen3_moe, EXPERTS | names("intermediate_size max_window_layers")
     | {"decoder_sparse_step": 1, "mlp_only_layers": []}),
    ("deepseek_v3", deepseek.deepseek_v3, EXPERTS | names("head_dim qk_head_dim")),
    ("t5 mt5", t5.t5, names("n_positions is_gated_act dense_act_fn")),
    ("vit deit vit_msn", vision.vit, ENCODER),
    ("dinov2 dinov2_with_registers", vision.dinov2, ENCODER),
    ("dinov3_vit", vision.dinov3, ENCODER),
    ("timm_vit", vision.timm_vit, {"global_pool": "token"}),
    ("vit_pytorch", vision.vit_pytorch, {}),
    ("clip siglip", clip.towers, ENCODER),
    ("clip_vision_model siglip_vision_model", clip.images, ENCODER),
    ("clip_text_model siglip_text_model", clip.texts, ENCODER),
    # The scale is never applied.
    ("whisper", whisper.whisper, names("num_hidden_layers scale_embedding")),
)  # fmt: skip
# By the config's `model_type`.
FAMILIES: dict[str, Callable[[Config], Family]] = {
    name: neutral.checked(make, known) for names, make, known in _TABLES for name in names.split()
}


def family(config: Config) -> Family:
    """Return the module of the content of a `config.json`, and the table of its tensors.

    Raises:
      ValueError: if the family or one of the settings is not supported.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"the config's model_type must be one of {', '.join(sorted(FAMILIES))}, got "
            f"{model_type!r:.100}; docs/interop.md shows how to write a table"
        )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "an unknown method")
        raise ValueError(
            f"weights must have a floating dtype, got {method} in the config's "
            f"quantization_config; load them in transformers with dequantize=True, and save them"
        )
    try:
        return FAMILIES[model_type](config)
    except KeyError as error:
        raise ValueError(
            f"the config of a {model_type} must have {error}, got none; {REMEDY}"
        ) from None


def load(
    path: AnyPath, *, dtype: Dtype | None = None, shardings: Any = None, as_jax: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """Load the model of a folder or of a GGUF file, and its variables.

    Args:
      path: a folder with `config.json` and `model.safetensors`, or with an index of several files;
        or a file `.gguf` of a Llama, Qwen2 or Qwen3 with tensors of F32, F16, BF16 and Q8_0, which
        becomes float32 (extra `files`).
      dtype: the dtype of floating parameters (default: the file's).
      shardings: one sharding, or a tree of them like the variables, to read only each device's part
        (default: NumPy arrays, which CPU devices use without a copy).
      as_jax: True for arrays of JAX on the default device in place of NumPy arrays. NumPy promotes
        bfloat16 with Python's numbers to float32, as in a moving average outside of `jax.jit`.

    Returns:
      The module and its variables. A warning names the heads that are left out.

    Raises:
      ValueError: if a file is damaged, or tensors are missing, surplus or misshapen, all of which
        the error lists.
      FileNotFoundError: if the folder lacks a file.
    """
    if Path(path).suffix == ".gguf":
        config, tensors = llama_cpp.read(Path(path).expanduser())
    else:
        config, tensors = _read_folder(open_folder(path))
    model = family(config)
    floating = None if dtype is None else checks.dtype("dtype", dtype)
    variables = from_tensors(model, tensors, join=list)
    if as_jax and shardings is None:
        shardings = jnp.zeros(()).sharding  # The default device's.
    is_views = lambda x: isinstance(x, list)  # noqa: E731
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, variables, is_leaf=is_views)
    with ThreadPoolExecutor(4) as threads:  # NumPy copies without Python's lock.
        futures = jax.tree.map(
            lambda x, sharding: threads.submit(place, floating, x, sharding),
            variables, shardings, is_leaf=is_views,
        )  # fmt: skip
    return model.module, jax.tree.map(lambda x: x.result(), futures)


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} must hold a complete model, got an adapter (adapter_config.json); merge "
            f"it with peft's merge_and_unload and save the result"
        )
    return safetensors.read_json(folder / CONFIG), safetensors.read_folder(folder)


def save(
    config: Config | AnyPath, variables: Mapping[str, Any], path: AnyPath | None = None
) -> None:
    """Write a folder that `load` and `transformers` read, one tensor at a time.

    If the model came from a folder, its tensors keep their names, and its tokenizer, settings,
    license and model card are copied. Warnings name the files and heads that are left behind.

    Args:
      config: the folder that the model was loaded from, or the content of a `config.json`. Its
        `dtype` is replaced by the variables' dtype.
      variables: the variables of the config's module.
      path: the folder to write (default: the folder `config`, whose weights are replaced).

    Raises:
      ValueError: if the variables do not fit the config.
      FileNotFoundError: if the folder `config` does not exist.
    """
    if isinstance(config, Mapping):
        source, given = None, dict(config)
    else:
        source = open_folder(config)
        given = safetensors.read_json(source / CONFIG)
    folder = Path(source if path is None else path).expanduser()  # type: ignore[arg-type]
    model = family(given)
    tensors = stored(model, variables)
    if source is not None:
        published = safetensors.file_names(source)
        own = {model.bare(name): name for name in published}
        tensors = {own.get(model.bare(name), name): x for name, x in tensors.items()}
        model.warn_of_heads(x for x in published if x not in tensors)
    folder.mkdir(parents=True, exist_ok=True)
    left = [] if source is None else carry(source, folder)
    safetensors.write_folder(folder, tensors)
    dtypes = [x.dtype for x, _ in tensors.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    given = _set_dtype(given, max(dtypes, key=lambda x: x.itemsize).name)
    with safetensors.replacing(folder / CONFIG) as file:
        file.write(json.dumps(given, indent=2, default=str).encode())
    if left:
        checks.warn(f"{source} has files that are left behind: {several(left)}; copy them by hand")


def _set_dtype(config: Config, name: str) -> dict[str, Any]:
    """Return a config with this dtype under the old and the new key, also in its parts."""
    parts = {
        x: _set_dtype(config[x], name) for x in ("text_config", "vision_config") if config.get(x)
    }
    old = {"torch_dtype": name} if "torch_dtype" in config else {}
    return {**config, "dtype": name} | old | parts
