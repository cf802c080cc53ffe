"""Look at the attention heads of a trained run or a published model on a prompt.

    python -m experiments.look --workdir=runs/text-… --prompt="The import statement"
    python -m experiments.look --workdir=runs/text-… --prompt="a b" --beside="a c"
    python -m experiments.look --workdir=runs/digits-… --prompt=7 --beside=8    # two test images
    python -m experiments.look --model=path/to/Qwen3-0.6B --prompt="12 7 401" --png=heads.png

It writes a page of HTML with the weights of every head (--out), and their picture if --png names
one. For a language model the page has the scores of `flax_mha.analysis.detect` on the first prompt.
"""

from absl import flags

from experiments.common import command
from experiments.common.outputs import try_output
from experiments.trained import heads
from experiments.trained import run as trained

WORKDIR, MODEL = trained.define_models()
flags.adopt_module_key_flags(trained)
PROMPT = flags.DEFINE_string(
    "prompt", None, "The text to look at, or the number of a test image.", required=True
)
BESIDE = flags.DEFINE_string(
    "beside", None, "Another text with as many tokens, or another image, to compare it with."
)
OUT = flags.DEFINE_string("out", "look.html", "The page to write.")
PNG = flags.DEFINE_string("png", None, "A picture of all heads to write.")


def main(argv: list[str]) -> None:
    """Write the page, and the picture."""
    del argv
    out = try_output(OUT.value, "--out")
    png = PNG.value and try_output(PNG.value, "--png")
    if WORKDIR.value is not None:
        reader = heads.open_run(WORKDIR.value, trained.DATA.value, trained.TOKENIZER.value)
    else:
        reader = heads.open_folder(MODEL.value or "")
    heads.write(reader, PROMPT.value, BESIDE.value, out, png)


if __name__ == "__main__":
    command.run(main)
