"""Beam search and filters of sampling against `transformers`, token for token."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
hf = pytest.importorskip("transformers", reason="needs the extra families")

from flax_mha import Capture, analysis, generate, sampling  # noqa: E402
from tests.interop import families  # noqa: E402
from tests.interop.families import T5, TEXT, case, loaded, make, run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
NEW, V = 6, 14
IDS = np.random.default_rng(0).integers(4, V, (3, 5))
LENGTHS = np.array([5, 2, 4])
LLAMA = TEXT | {"vocab_size": V, "num_hidden_layers": 1}
CASES = {
    "llama": case(hf.LlamaForCausalLM, {}, **LLAMA),
    "t5": case(
        hf.T5ForConditionalGeneration, {}, decoder_start_token_id=0, pad_token_id=0,
        **T5 | {"vocab_size": V, "num_layers": 1, "num_decoder_layers": 1},
    ),
}  # fmt: skip


@functools.cache
def pair(name: str) -> tuple[Any, Any, Any]:
    return loaded(make(CASES[name]))


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


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize(
    ("beams", "eos", "early"),
    [MANY[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY[1:])],
)  # fmt: skip
def test_beams_match_transformers(name: str, beams: int, eos: tuple[int, ...], early: Any) -> None:
    """Ragged prompts of 1 to 3 rows, three length penalties, and ends at different lengths."""
    _, module, variables = pair(name)
    start: dict[str, Any] = {"start": 0} if name == "t5" else {}
    lengths, ends = LENGTHS[: 5 - beams], set()
    for penalty in (0.5, 1.0, -1.0):
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


GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
CASES["gpt2"] = case(hf.GPT2LMHeadModel, {}, **GPT2, pad_token_id=0)
PADDED = {
    "left": [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]],
    "between": [[1, 1, 1, 1, 1], [1, 0, 0, 1, 1], [0, 1, 0, 1, 1]],
}


@functools.cache
def jitted(module: Any) -> Any:
    """Return one function for all masks, so that each model is compiled once."""
    return jax.jit(module.apply)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("side", PADDED)
def test_attention_mask_gives_the_numbers_of_transformers(side: str, name: str) -> None:
    """The ids and the mask as its tokenizers give them, in NumPy or in PyTorch.

    Logits are compared at its own positions, which `generate` gives there: a plain call counts
    padding too.
    """
    theirs, module, variables = pair(name)
    mask, is_t5 = np.array(PADDED[side]), name == "t5"
    ids, at = np.where(mask, IDS, 0), np.maximum(mask.cumsum(-1) - 1, 0)
    call = {"max_new_tokens": NEW, **({"start": 0} if is_t5 else {})}
    ours = (ids, IDS[:, :3]) if is_t5 else (ids,)
    if is_t5 and side == "between":
        for refused in (
            lambda: generate(module, variables, ids, attention_mask=mask, **call),
            lambda: module.apply(variables, *ours, attention_mask=mask),
        ):
            with pytest.raises(ValueError, match=r"no padding between tokens .* got it in row 1"):
                refused()
        return
    more = {"decoder_input_ids": IDS[:, :3]} if is_t5 else {"position_ids": at}
    wanted = run(theirs, {"input_ids": ids, "attention_mask": mask, **more}).logits.numpy()
    logits = np.asarray(jitted(module)(variables, *ours, attention_mask=mask))
    real = slice(None) if is_t5 else mask == 1
    np.testing.assert_allclose(logits[real], wanted[real], atol=1e-4)
    if side == "right" and not is_t5:
        return  # transformers asks for padding on the left, and gives other tokens.
    found = theirs.generate(
        torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=NEW, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    wanted = found[:, 1 if is_t5 else ids.shape[1] :].numpy()
    for given in ((ids, mask), (torch.tensor(ids), torch.tensor(mask))):
        tokens = generate(module, variables, given[0], attention_mask=given[1], **call).tokens
        np.testing.assert_array_equal(tokens, wanted)


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "distilbert", "bert classifies", "modernbert classifies"]
)
@pytest.mark.parametrize("side", PADDED)
def test_attention_mask_gives_the_features_of_transformers(side: str, name: str) -> None:
    """RoBERTa takes positions from the ids of padding."""
    theirs, module, variables = families.pair(name)
    mask = np.array(PADDED[side])
    ids = np.where(mask, IDS, theirs.config.pad_token_id)
    wanted = run(theirs, {"input_ids": ids, "attention_mask": mask})[0].numpy()
    calls = [{"attention_mask": mask}] + [{"lengths": mask.sum(-1)}] * (side == "right")
    for call in calls:
        x = np.asarray(jitted(module)(variables, ids, **call))
        real = slice(None) if x.ndim == 2 else mask == 1
        np.testing.assert_allclose(x[real], wanted[real], atol=1e-4)


def test_captured_values_are_the_attentions_and_hidden_states_of_transformers() -> None:
    """As the page "From Hugging Face" says, for tokens behind padding on the left."""
    theirs, module, variables = pair("llama")
    mask = np.array(PADDED["left"])
    ids, real = np.where(mask, IDS, 0), mask == 1
    wanted = run(
        theirs, {"input_ids": ids, "attention_mask": mask}, output_attentions=True,
        output_hidden_states=True,
    )  # fmt: skip
    watched = analysis.watch(module, Capture(("weights", "resid_pre")))
    apply = jax.jit(functools.partial(watched.apply, mutable="intermediates"))
    _, sown = apply(variables, ids, attention_mask=mask)
    (layer,) = (x for name, x in sown["intermediates"]["decoder"].items() if "layers" in name)
    weights = np.moveaxis(layer["attention"]["attention_weights"][0], 1, 2)[real]
    theirs_weights = np.moveaxis(wanted.attentions[0].numpy(), 1, 2)[real]
    np.testing.assert_allclose(weights, theirs_weights, atol=1e-5)
    first = wanted.hidden_states[0].numpy()[real]
    np.testing.assert_allclose(layer["resid_pre"][0][real], first, atol=1e-5)


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
