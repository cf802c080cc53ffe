"""Ask a trained run or a published model: it goes on with a text, or translates it.

    python -m experiments.generate --workdir=runs/text-… --prompt="The import statement"
    python -m experiments.generate --workdir=runs/translation-… --prompt="samedi 3 mars 2012"
    python -m experiments.generate --workdir=runs/text-… --data=FILE --prompt="To be"
    python -m experiments.generate --model=path/to/Qwen3-0.6B --prompt="The capital of France is"

Of a run its own config and its latest checkpoint are used, on one device. The file that it was
trained on, if it was one, is read if --data names it, and the file of its tokenizer if --tokenizer
does. Of a model the `config.json`, safetensors and `tokenizer.json` of a Hugging Face folder are
used.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from experiments import finished, pretrained, responses
from experiments.runs import command
from experiments.runs.failures import RunError

WORKDIR, MODEL = finished.define_models()
PROMPT = flags.DEFINE_string("prompt", None, "What to go on with, or to translate.", required=True)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Of the draws; 0: the most likely, always.")
TOP_K = flags.DEFINE_integer("top_k", None, "Draw from so many most likely tokens only.")
TOP_P = flags.DEFINE_float("top_p", None, "Draw from the most likely that have this probability.")
MIN_P = flags.DEFINE_float("min_p", None, "Draw from those with this share of the highest one.")
SEED = flags.DEFINE_integer("seed", 0, "Of the draws.", lower_bound=0, upper_bound=2**32 - 1)
NEW = flags.DEFINE_integer("max_new_tokens", None, "How many at most (default: the task's).")
BEAMS = flags.DEFINE_integer("beams", 1, "Candidates that a beam search follows.")
PENALTY = flags.DEFINE_float("length_penalty", 0.0, "Beams count log-probability / length ** this.")
EARLY = flags.DEFINE_enum("early_stopping", "false", ["false", "true", "never"], "End of a search.")


def main(argv: Sequence[str]) -> None:
    """Print the answer of the model, piece by piece."""
    del argv
    given: dict[str, Any] = {
        "temperature": TEMPERATURE.value, "top_k": TOP_K.value, "top_p": TOP_P.value,
        "min_p": MIN_P.value, "max_new_tokens": NEW.value, "beams": BEAMS.value,
        "length_penalty": PENALTY.value, "rng": jax.random.key(SEED.value),
        "early_stopping": EARLY.value if EARLY.value == "never" else EARLY.value == "true",
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    if WORKDIR.value is not None:
        files = finished.DATA.value, finished.TOKENIZER.value
        speak(WORKDIR.value, PROMPT.value, *files, **options)
    elif MODEL.value is not None:
        pretrained.respond(MODEL.value, PROMPT.value, _say, **options)
        print(flush=True)


def speak(
    workdir: str | Path, prompt: str, path: str | None = None, tokenizer: str | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Restore the run in a folder, and print its answer to a prompt.

    `path` is the file that the run was trained on, and `tokenizer` that of its tokenizer, if there
    are such files. Options are those of `flax_mha.generate`.
    """
    run, task = finished.open_run(workdir, path, tokenizer)
    respond = responses.RESPOND.get(run.config.task)
    if respond is None:
        raise RunError(
            f"{run.path} was trained on {run.config.task!r}, which makes no text; give a run of "
            f"configs/pydoc_lm.py or configs/dates.py"
        )
    params = finished.load(run, task).params
    respond(task, params, prompt, _say, options)
    print(flush=True)


def _say(piece: str) -> None:
    """Print a piece, with its control characters as codes: a terminal would obey them."""
    codes = re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", lambda c: f"\\x{ord(c[0]):02x}", piece)
    print(codes, end="", flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=command.parse_prompt)
