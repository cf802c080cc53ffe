"""Beam search and filters of sampling against `transformers`, token for token."""

import functools
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
hf = pytest.importorskip("transformers", reason="needs the extra families")

from flax_mha import generate, interop, sampling  # noqa: E402
from tests.interop.families import T5, TEXT, Case, make  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
NEW, V = 6, 14
IDS = np.random.default_rng(0).integers(4, V, (3, 5))
LENGTHS = np.array([5, 2, 4])
LLAMA = TEXT | {"vocab_size": V, "num_hidden_layers": 1}
CASES = {
    "llama": Case(hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA), {}, ()),
    "t5": Case(
        hf.T5ForConditionalGeneration,
        hf.T5Config(**T5 | {"vocab_size": V, "num_layers": 1, "num_decoder_layers": 1},
                    decoder_start_token_id=0, pad_token_id=0), {}, (),
    ),
}  # fmt: skip


@functools.cache
def pair(name: str) -> tuple[Any, Any, Any]:
    theirs = make(CASES[name])
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, *interop.load(folder)


def beams_of(name: str, lengths: np.ndarray, beams: int, **options: Any) -> Any:
    """Return the tokens and the scores of `transformers`."""
    B, T = len(lengths), IDS.shape[1]
    real = np.arange(T) < lengths[:, None]
    ids, decoder_only = np.where(real, IDS[:B], 0), name == "llama"
    if decoder_only:  # padding comes first there
        shifts = [np.roll(row, T - n) for row, n in zip(ids, lengths, strict=True)]
        ids, real = np.array(shifts), real[:, ::-1].copy()
    found = pair(name)[0].generate(
        torch.tensor(ids), attention_mask=torch.tensor(real).long(), num_beams=beams,
        do_sample=False, max_new_tokens=NEW, pad_token_id=0, return_dict_in_generate=True,
        output_scores=True, **options,
    )  # fmt: skip
    return found.sequences[:, T if decoder_only else 1 :].numpy(), found.sequences_scores.numpy()


MANY = [(n, eos, early) for n, eos in [(2, (6,)), (3, (6, 9)), (4, (9,))]
        for early in (False, True, "never")]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("beams", "eos", "early"),
    [MANY[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY[1:])],
)  # fmt: skip
def test_beams_match_transformers(name: str, beams: int, eos: tuple[int, ...], early: Any) -> None:
    """Ragged prompts of 1 to 3 rows, every length penalty, and ends at different lengths."""
    _, module, variables = pair(name)
    start: dict[str, Any] = {"start": 0} if name == "t5" else {}
    lengths, ends = LENGTHS[: 5 - beams], set()
    for penalty in (0.0, 0.5, 1.0, 2.0, -1.0):
        tokens, scores = beams_of(name, lengths, beams, eos_token_id=list(eos),
                                  length_penalty=penalty, early_stopping=early)  # fmt: skip
        found = generate(
            module, variables, IDS[: len(lengths)], lengths=lengths, max_new_tokens=NEW, eos=eos,
            beams=beams, length_penalty=penalty, early_stopping=early, **start,
        )  # fmt: skip
        for ours, n, expected in zip(found.tokens, found.lengths, tokens, strict=True):
            np.testing.assert_array_equal(ours[:n], expected[:n])
            assert n == NEW or ours[n - 1] in eos
            ends.add(int(n))
        np.testing.assert_allclose(found.scores, scores, rtol=1e-4, atol=1e-5)
    assert len(ends) > 1


def test_filters_match_transformers() -> None:
    """Temperature, top_k, top_p and min_p in this order."""
    from transformers.generation import logits_process as theirs

    x = 2 * np.random.default_rng(0).normal(size=(64, 20)).astype(np.float32)
    rule = sampling.Sampling.checked(temperature=1.7, top_k=12, top_p=0.9, min_p=0.15)
    given = torch.tensor(x) / 1.7
    for warp in (theirs.TopKLogitsWarper(12), theirs.TopPLogitsWarper(0.9),
                 theirs.MinPLogitsWarper(0.15)):  # fmt: skip
        given = warp(None, given)
    expected = given.numpy()
    np.testing.assert_allclose(jax.jit(rule.limit)(x), expected, rtol=1e-6)
    alone = theirs.MinPLogitsWarper(0.15)(None, torch.tensor(x)).numpy()
    np.testing.assert_array_equal(sampling.min_p(jnp.asarray(x), 0.15), alone)
