"""Look at the attention heads of a trained run or a published model on a prompt.

    python -m experiments.look --workdir=runs/text-… --prompt="The import statement"
    python -m experiments.look --workdir=runs/text-… --prompt="a b" --beside="a c"
    python -m experiments.look --model=path/to/Qwen3-0.6B --prompt="12 7 401" --png=heads.png

It writes a page of HTML with the weights of every head (--out), and their picture if --png names
one. The attribution of a head is the gradient of the first prompt's largest next logit by a factor
on the head's output: to first order, the logit falls by it if the head is removed. The scores of
kinds of heads are those of `flax_mha.analysis.detect`, on the first prompt.
"""

import sys
from collections.abc import Sequence

from absl import app, flags

from experiments import command, heads
from experiments.runs import log
from experiments.runs.failures import RunError

WORKDIR = flags.DEFINE_string("workdir", None, "A run's folder.")
DATA = flags.DEFINE_string("data", None, "The file that the run was trained on, if it was one.")
TOKENIZER = flags.DEFINE_string("tokenizer", None, "The file of the run's tokenizer, if any.")
MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder.")
PROMPT = flags.DEFINE_string("prompt", None, "The text to look at.", required=True)
BESIDE = flags.DEFINE_string("beside", None, "Another text of as many tokens, shown beside it.")
OUT = flags.DEFINE_string("out", "look.html", "The page to write.")
PNG = flags.DEFINE_string("png", None, "A picture of all heads to write.")


def main(argv: Sequence[str]) -> None:
    """Write the page, and the picture."""
    log.hush()
    try:
        if argv[1:]:
            raise RunError(f"unexpected {argv[1:]}; quote a prompt of several words")
        workdir, model = WORKDIR.value, MODEL.value
        if workdir is not None and model is None:
            reader = heads.open_run(workdir, DATA.value, TOKENIZER.value)
        elif model is not None and workdir is None:
            reader = heads.open_folder(model)
        else:
            raise RunError("give --workdir, a run, or --model, a Hugging Face folder")
        heads.write(reader, PROMPT.value, BESIDE.value, OUT.value, PNG.value)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main, flags_parser=command.parse)
