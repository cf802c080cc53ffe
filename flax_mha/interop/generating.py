"""Arguments of `flax_mha.generate` that a Hugging Face folder says."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from flax_mha.interop import neutral, safetensors
from flax_mha.interop.settings import FileSettings

_FILE = "generation_config.json"
# Lengths, which a call says, and tokens and tables of Whisper by their names.
_NEUTRAL = neutral.BOOKKEEPING | neutral.names("""
    alignment_heads begin_of_text_token_id bos_token_id is_multilingual lang_to_id language
    max_initial_timestamp_index max_length max_new_tokens no_timestamps_token_id output_scores
    output_logits pad_token_id prev_sot_token_id return_dict_in_generate return_timestamps task
    task_to_id temperature top_k top_p trust_remote_code
""") | {
    "diversity_penalty": 0.0, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "guidance_scale": 1.0, "length_penalty": 1.0, "min_length": 0, "min_p": 0.0,
    "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "remove_invalid_values": False, "renormalize_logits": False, "repetition_penalty": 1.0,
    "typical_p": 1.0,
}  # fmt: skip


def generation(path: str | Path) -> dict[str, Any]:
    """Return the arguments of `flax_mha.generate` in a folder's files.

    They are `eos` and `start`, and of a model that draws `temperature`, `top_k` and `top_p`. A
    warning names settings that `generate` has no argument for, such as a penalty of repetitions.

    Args:
      path: a folder with `generation_config.json`, or with `config.json` alone, as older ones.

    Raises:
      ValueError: if a setting is not what it must be.
      FileNotFoundError: if there is no `config.json`.
    """
    folder = Path(path).expanduser()
    config = FileSettings(safetensors.read_json(folder / "config.json"))
    said = FileSettings(safetensors.read_json(folder / _FILE) if (folder / _FILE).exists() else {})
    arguments: dict[str, Any] = {}
    ends = said.get("eos_token_id", config.get("eos_token_id", []))
    # Small models keep the end of a large vocabulary, which they can't write.
    if ends := [x for x in np.atleast_1d(ends).tolist() if x < config["vocab_size"]]:
        arguments["eos"] = tuple(ends)
    starts = "decoder_start_token_id"
    if starts in said or starts in config:
        arguments["start"] = said.get(starts, config.get(starts))
    if said.get("do_sample", False):
        # As the library's own defaults have it.
        arguments["temperature"] = said.get("temperature", 1.0)
        arguments["top_k"] = said.get("top_k", 50) or None
        arguments |= {"top_p": said["top_p"]} if "top_p" in said else {}
    if unread := said.unread(neutral.among(_NEUTRAL)):
        warnings.warn(
            f"{_FILE} has settings that generate has no argument for: {', '.join(sorted(unread))}",
            stacklevel=2,
        )
    return arguments
