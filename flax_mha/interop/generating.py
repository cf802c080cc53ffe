"""The arguments of `flax_mha.generate` in a Hugging Face folder."""

from typing import Any

import numpy as np

from flax_mha.base import checks
from flax_mha.interop import neutral, safetensors
from flax_mha.interop.checked_config import FileSettings
from flax_mha.interop.folders import CONFIG, GENERATION, AnyPath, open_folder

# Lengths, which each call sets, and Whisper's tokens and tables.
_NEUTRAL = neutral.BOOKKEEPING | neutral.names("""
    alignment_heads begin_of_text_token_id bos_token_id is_multilingual lang_to_id language
    max_initial_timestamp_index max_length max_new_tokens no_timestamps_token_id output_scores
    output_logits pad_token_id prev_sot_token_id return_dict_in_generate return_timestamps task
    task_to_id temperature top_k top_p min_p trust_remote_code
""")


def generation(path: AnyPath) -> dict[str, Any]:
    """Return the arguments of `flax_mha.generate` from a folder's files.

    These are `eos` and `start`, for sampling `temperature`, `top_k`, `top_p` and `min_p`, and for
    search `beams`, `length_penalty` and `early_stopping`. A warning names other settings, such as a
    repetition penalty. `path` is a folder with `config.json`, and maybe `generation_config.json`.

    Raises:
      FileNotFoundError: if there is no `config.json`.
    """
    folder = open_folder(path)
    config = FileSettings(safetensors.read_json(folder / CONFIG))
    file = folder / GENERATION
    settings = FileSettings(safetensors.read_json(file) if file.exists() else {})
    arguments: dict[str, Any] = {}
    ends = settings.get("eos_token_id", config.get("eos_token_id", []))
    # Small test models keep the eos of a large vocabulary.
    if ends := [x for x in np.atleast_1d(ends).tolist() if x < config["vocab_size"]]:
        arguments["eos"] = tuple(ends)
    name = "decoder_start_token_id"
    if (start := settings.get(name, config.get(name))) is not None:
        arguments["start"] = start
    if settings.get("do_sample", False):
        # The defaults of transformers.
        arguments["temperature"] = settings.get("temperature", 1.0)
        arguments["top_k"] = settings.get("top_k", 50) or None
        arguments |= {name: settings[name] for name in ("top_p", "min_p") if settings.get(name)}
    elif (beams := settings.get("num_beams", 1)) > 1:
        arguments |= {"beams": beams, "length_penalty": settings.get("length_penalty", 1.0)}
        # False, True or "never".
        arguments["early_stopping"] = settings.get("early_stopping") or False
    # All defaults of others are 0, False or 1.
    unread = settings.unread(lambda name, x: name in _NEUTRAL or (x in (0, 1) and x is not True))
    if unread:
        checks.warn(
            f"{GENERATION} has settings that generate has no argument for: "
            f"{', '.join(sorted(unread))}"
        )
    return arguments
