"""Ask a trained run or a published model: it goes on with a text, or translates it.

    python -m experiments.generate --workdir=runs/text-… --prompt="The import statement"
    python -m experiments.generate --workdir=runs/translation-… --prompt="samedi 3 mars 2012"
    python -m experiments.generate --workdir=runs/text-… --data=FILE --prompt="To be"
    python -m experiments.generate --model=path/to/Qwen3-0.6B --prompt="The capital of France is"

A run is opened with its own config and its latest checkpoint, on one device. --data and --tokenizer
say where the files that it was trained on are now, if they have moved. A model is the folder of a
Hugging Face model: `config.json`, safetensors and `tokenizer.json`.
"""

import re
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments.common import command
from experiments.common.failures import RunError
from experiments.trained import pretrained, responses
from experiments.trained import run as trained

WORKDIR, MODEL = trained.define_models()
flags.adopt_module_key_flags(trained)
PROMPT = flags.DEFINE_string("prompt", None, "The text to go on with or translate.", required=True)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "How random the choice of tokens is; 0 always takes the most likely one."
)
TOP_K = flags.DEFINE_integer("top_k", None, "Draw only from this many most likely tokens.")
TOP_P = flags.DEFINE_float(
    "top_p", None, "Draw only from the most likely tokens whose probabilities add up to this."
)
MIN_P = flags.DEFINE_float(
    "min_p", None, "Draw only from tokens with at least this share of the highest probability."
)
SEED = flags.DEFINE_integer("seed", 0, "The seed of random draws.", 0, 2**32 - 1)
NEW = flags.DEFINE_integer(
    "max_new_tokens", None, "The maximum number of new tokens (default: what fits; 64 for a model)."
)
BEAMS = flags.DEFINE_integer("beams", 1, "The number of candidates that a beam search follows.")
PENALTY = flags.DEFINE_float(
    "length_penalty", 0.0, "Beams are ranked by log-probability / length ** this."
)


def main(argv: list[str]) -> None:
    """Print the answer of the model, piece by piece."""
    del argv
    given: dict[str, Any] = {
        "temperature": TEMPERATURE.value, "top_k": TOP_K.value, "top_p": TOP_P.value,
        "min_p": MIN_P.value, "max_new_tokens": NEW.value, "beams": BEAMS.value,
        "length_penalty": PENALTY.value, "rng": jax.random.key(SEED.value),
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    if WORKDIR.value is not None:
        speak(WORKDIR.value, PROMPT.value, trained.DATA.value, trained.TOKENIZER.value, **options)
    elif MODEL.value is not None:
        pretrained.respond(MODEL.value, PROMPT.value, _say, **options)
        print(flush=True)


def speak(
    workdir: str | Path, prompt: str, path: str | None = None, tokenizer: str | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Restore the run in a folder, and print its answer to a prompt.

    Args:
      workdir: the folder.
      prompt: the text.
      path: where the file that the run was trained on is now, if that has moved.
      tokenizer: where the file of its tokenizer is now, if that has moved.
      **options: options of `flax_mha.generate`.
    """
    run, task, params = trained.open_run(workdir, path, tokenizer)
    respond = responses.RESPOND.get(run.config.task)
    if respond is None:
        raise RunError(
            f"{run.path} was trained on {run.config.task!r}, which makes no text; give a run of "
            f"configs/pydoc_lm.py or configs/dates.py"
        )
    respond(task, params, prompt, _say, options)
    print(flush=True)


def _say(piece: str) -> None:
    """Print a piece, with its control characters as codes: a terminal would obey them."""
    codes = re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", lambda c: f"\\x{ord(c[0]):02x}", piece)
    print(codes, end="", flush=True)


if __name__ == "__main__":
    command.run(main)
