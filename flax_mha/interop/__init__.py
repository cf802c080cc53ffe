"""Models of Hugging Face folders as modules of ours, and back.

>>> model, variables = interop.load("path/to/Qwen3-0.6B")
>>> interop.save(config, variables, "path/to/mine")
>>> module, variables = interop.from_torch(layer.state_dict(), num_heads=8)
>>> module, variables = interop.from_layer(arrays, num_heads=8)  # of Keras, Haiku, timm …
>>> fast = interop.swap(model)  # of Flax's attention layers: ours in their place

A folder is `config.json` and safetensors. A family is a table, see `flax_mha.interop.table`: which
module a config means, and where each tensor goes; `save` is the table read backwards.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype

from flax_mha.base import checks
from flax_mha.interop import bert, clip, gpt, llama, moe, neutral, safetensors, t5, vision, whisper
from flax_mha.interop.device_put import Joined, place
from flax_mha.interop.generating import generation as generation
from flax_mha.interop.libraries import LIBRARIES as LIBRARIES
from flax_mha.interop.libraries import from_layer as from_layer
from flax_mha.interop.libraries import to_layer as to_layer
from flax_mha.interop.settings import Config, FileSettings, shown
from flax_mha.interop.swapping import swap as swap
from flax_mha.interop.table import Family, from_tensors, stored
from flax_mha.interop.torch_layers import from_torch as from_torch
from flax_mha.interop.torch_layers import to_torch as to_torch

_ADAPTER = "adapter_config.json"
_TABLES: tuple[tuple[str, Callable[[Config], Family], neutral.Neutral], ...] = (
    ("bert roberta xlm-roberta camembert electra ernie data2vec-text", bert.bert, neutral.BERT),
    ("distilbert", bert.distilbert, neutral.BERT),
    ("gpt2", gpt.gpt2, neutral.GPT2),
    ("gpt_neox", gpt.gpt_neox, neutral.DECODER),
    ("llama", llama.llama, neutral.LLAMA),
    ("mistral ministral smollm3", llama.llama, neutral.DECODER),
    ("qwen2 qwen3", llama.llama, neutral.QWEN),
    ("gemma2 gemma3_text", llama.llama, neutral.GEMMA),
    ("gpt_oss", moe.gpt_oss, neutral.EXPERTS),
    ("mixtral", moe.mixtral, neutral.EXPERTS),
    ("qwen3_moe", moe.qwen3_moe, neutral.QWEN3_MOE),
    ("t5", t5.t5, neutral.T5),
    ("vit deit vit_msn", vision.vit, neutral.VIT),
    ("dinov3_vit", vision.dinov3, neutral.DINO),
    ("timm_vit", vision.timm_vit, neutral.TIMM),
    ("vit_pytorch", vision.vit_pytorch, neutral.VIT_PYTORCH),
    ("clip siglip", clip.towers, neutral.TOWERS),
    ("clip_vision_model siglip_vision_model", clip.images, neutral.TOWERS),
    ("clip_text_model siglip_text_model", clip.texts, neutral.TOWERS),
    ("whisper", whisper.whisper, neutral.WHISPER),
)
# By `model_type` of a config.
FAMILIES: dict[str, Callable[[Config], Family]] = {
    name: neutral.checked(make, known) for names, make, known in _TABLES for name in names.split()
}


def family(config: Config) -> Family:
    """Return the module that a config means, and the table of its tensors.

    Raises:
      ValueError: if there is no such family, or its table lacks what the config asks for.
    """
    settings = FileSettings(config)
    model_type = settings.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"the config's model_type must be one of {sorted(FAMILIES)}, got {shown(model_type)}; "
            f"docs/interop.md shows how to write a table"
        )
    if quantized := settings.get("quantization_config"):
        method = quantized.get("quant_method", "an unknown method")
        raise ValueError(
            f"weights must be in a floating dtype, by the config's quantization_config they are "
            f"{method}; have transformers load them with dequantize=True, and save them"
        )
    try:
        return FAMILIES[model_type](config)
    except KeyError as error:
        raise ValueError(f"the config of a {model_type} must have {error}, and has not") from None


def load(
    path: str | Path, *, dtype: Dtype | None = None, shardings: Any = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of a folder, and its variables.

    Args:
      path: a folder with `config.json` and `model.safetensors`, or an index of several files.
      dtype: of floating parameters (default: as in the file).
      shardings: for each parameter, a tree like the variables of `jax.sharding.Sharding`, or one
        for all. Each device is given its part, which alone is read, but for kernels of patches
        and Gemma's norms, which are read whole (default: none, they are arrays of NumPy, which
        devices of a CPU take without a copy).

    Returns:
      The module and its variables. Of a checkpoint with a head for words or classes on top of a
      BERT or a ViT, the head is left out, with a warning that names its tensors.

    Raises:
      ValueError: if the files are damaged, or do not fit each other: one error with every tensor
        that is missing, surplus or of another shape.
      FileNotFoundError: if the folder has none.
    """
    folder = Path(path).expanduser()
    if (folder / _ADAPTER).exists():
        raise ValueError(
            f"{folder} must hold a whole model, got {_ADAPTER}, of weights that change it; merge "
            f"them (merge_and_unload of peft) and save the result"
        )
    model = family(safetensors.read_json(folder / "config.json"))
    tensors = safetensors.read_folder(folder)
    floating = None if dtype is None else checks.dtype("dtype", dtype)
    variables = from_tensors(model, tensors, join=Joined)
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, variables)
    placed = functools.partial(place, floating)
    return model.module, jax.tree.map(placed, variables, shardings, is_leaf=lambda x: x is None)


def save(config: Config, variables: Mapping[str, Any], path: str | Path) -> None:
    """Write a folder that `load` and `transformers` read, one tensor after another.

    Args:
      config: as in its `config.json`, with `model_type`. Its `dtype` is written as that of the
        variables (of several, one that holds them all).
      variables: of the module that the config means.
      path: of the folder, which is made.

    Raises:
      ValueError: if they do not fit each other.
    """
    folder = Path(path).expanduser()
    tensors = stored(family(config), variables)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.write(folder / "model.safetensors", tensors)
    kinds = {x.dtype for x in tensors.values() if jnp.issubdtype(x.dtype, jnp.floating)}
    saved = _as_dtype(config, np.result_type(*kinds).name) if kinds else dict(config)
    (folder / "config.json").write_text(json.dumps(saved, indent=2, default=str))


def _as_dtype(config: Config, name: str) -> dict[str, Any]:
    """Return a config with the dtype of its weights, under the old and the new name."""
    saved: dict[str, Any] = {"dtype": name}
    for key, x in config.items():
        if key in ("dtype", "torch_dtype"):
            saved[key] = name
        else:
            is_part = key in ("text_config", "vision_config") and isinstance(x, Mapping)
            saved[key] = _as_dtype(x, name) if is_part else x
    return saved
