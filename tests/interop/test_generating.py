"""Arguments of `generate` from a folder, and generation from sound."""

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import generate, interop
from tests.interop.odd_configs import CONFIGS
from tests.interop.test_files import CONFIG, variables
from tests.support.decoding import greedy
from tests.support.oracle import float64


def told(path: Path, own: dict[str, Any] | None, **config: Any) -> dict[str, Any]:
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    if own is not None:
        (path / "generation_config.json").write_text(json.dumps(own))
    return interop.generation(path)


def test_folder_gives_eos_and_start(tmp_path: Path) -> None:
    assert told(tmp_path, None) == {}
    old = told(tmp_path, None, eos_token_id=3, decoder_start_token_id=0)
    assert old == {"eos": (3,), "start": 0}
    # A token beyond the vocabulary is never generated.
    assert told(tmp_path, {"eos_token_id": [1, 2, 10**6]}, eos_token_id=3) == {"eos": (1, 2)}


def test_folder_gives_sampling_settings(tmp_path: Path) -> None:
    """As in `transformers`, some count only if do_sample is set."""
    own = {"eos_token_id": 1, "temperature": 0.6, "top_p": 0.9, "pad_token_id": 0}
    assert told(tmp_path, own) == {"eos": (1,)}
    drawn = {"eos": (1,), "temperature": 0.6, "top_p": 0.9, "top_k": 50}
    assert told(tmp_path, own | {"do_sample": True}) == drawn
    own = {"do_sample": True, "top_k": 0, "min_p": 0.1, "num_beams": 1}
    assert told(tmp_path, own) == {"temperature": 1.0, "top_k": None, "min_p": 0.1}
    assert told(tmp_path, {"min_p": 0.1}) == {}


def test_folder_gives_beam_search_settings(tmp_path: Path) -> None:
    """With the defaults of `transformers`. Beams that are drawn are not supported."""
    found = {"beams": 4, "length_penalty": 1.0, "early_stopping": False}
    assert told(tmp_path, {"num_beams": 4}) == found
    own = {"num_beams": 2, "length_penalty": 0.5, "early_stopping": "never"}
    assert told(tmp_path, own) == {"beams": 2, "length_penalty": 0.5, "early_stopping": "never"}
    with pytest.warns(UserWarning, match="num_beams=4$"):
        assert "beams" not in told(tmp_path, {"num_beams": 4, "do_sample": True})


def test_unsupported_generation_settings_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told(tmp_path, {"repetition_penalty": 1.0, "max_length": 20, "transformers_version": "4"})
    with pytest.warns(UserWarning, match=r"repetition_penalty=1\.1, suppress_tokens=\[1, 2\]$"):
        told(tmp_path, {"suppress_tokens": [1, 2], "repetition_penalty": 1.1})


WHISPER = CONFIGS["whisper"]
SOUND = np.random.default_rng(0).normal(size=(2, 32, 8)).astype(np.float32)


@pytest.mark.slow
def test_generation_from_sound_matches_full_forward() -> None:
    """After several first tokens, and with several eos tokens."""
    module, given = interop.family(WHISPER).module, variables(WHISPER)
    given = jax.tree.map(lambda x: 3 * x, given)
    wanted = greedy(lambda tokens: module.apply(given, SOUND, tokens), np.array([[1, 5, 7]] * 2), 4)
    found = generate(module, given, SOUND, start=(1, 5, 7), max_new_tokens=4)
    np.testing.assert_array_equal(found.tokens, wanted)


@pytest.mark.sampled(0.12)
@jax.numpy_dtype_promotion("standard")  # as Flax's norms need
def test_gradients_in_bfloat16_grow_with_sounds(optimized: None) -> None:
    """The gradients of the convolutions' biases by 512 sounds are 512 times those by one."""
    module = interop.family(WHISPER).module
    given = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), variables(WHISPER))

    @jax.jit
    def gradient(sound: Any) -> Any:
        loss = lambda given: module.apply(given, sound, method="encode")[..., 0].sum()  # noqa: E731
        return [jax.grad(loss)(given)["params"][f"conv{i}"]["bias"] for i in (1, 2)]

    sound = jnp.asarray(SOUND[:1], jnp.bfloat16)
    for one, many in zip(gradient(sound), gradient(jnp.repeat(sound, 512, 0)), strict=True):
        one, many = float64(one), float64(many)
        assert abs(np.vdot(one, many) / np.vdot(one, one) / 512 - 1) < 0.02


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ({"prompt": SOUND[0]}, ValueError, r"prompt must have shape \[B, S, D\] with"),
        ({"lengths": np.array([3, 4])}, ValueError, "none to Whisper or a step"),
        ({"start": None}, ValueError, "got start=None for a Whisper; give it"),
        ({"start": (1, 24)}, ValueError, "start must be in 0 … 23, got 24"),
    ],
)
def test_invalid_calls_for_sound_raise(call: dict[str, Any], error: Any, words: str) -> None:
    call = {"prompt": SOUND, "start": 1, "max_new_tokens": 2} | call
    module = interop.family(WHISPER).module
    with pytest.raises(error, match=words):
        generate(module, {"params": {}}, **call)
