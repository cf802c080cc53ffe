"""Configs with wrong values raise a one-line error at once."""

import inspect
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import interop
from flax_mha.interop import safetensors
from flax_mha.interop.checked_config import RULES, FileSettings
from tests.interop.odd_configs import CONFIGS, LAYERS, odd
from tests.interop.test_files import CONFIG, variables
from tests.interop.test_published_checkpoints import written

MOST = 30.0  # seconds, on a busy machine
NAMED = re.compile(r'\b(?:config|given|image|text)(?:\.get\(|\[)"(\w+)"')


def told(config: dict[str, Any], build: bool) -> str | None:
    """Return the error of a config, or None."""
    try:
        family = interop.family(config)
        if build:
            family.shapes()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.sampled(0.125)
@pytest.mark.parametrize("name", CONFIGS)
def test_odd_settings_build_or_raise_one_line(name: str) -> None:
    assert told(CONFIGS[name], build=True) is None
    refused = 0
    for setting, value, config in odd(CONFIGS[name]):
        case, start = f"{setting}={str(value)[:20]}", time.monotonic()
        # Building is slow; most rules accept zero and True.
        error = told(config, build=value in (0, 1))
        assert time.monotonic() - start < MOST, case
        if error is not None:
            assert "\n" not in error, case
            assert len(error) < 600, case
            refused += 1
    assert refused > 5 * len(CONFIGS[name])


def test_every_setting_that_a_family_reads_has_a_rule() -> None:
    read = {
        name
        for make in (*interop.FAMILIES.values(), interop.shared_settings.rotary)
        for name in NAMED.findall(inspect.getsource(inspect.getmodule(inspect.unwrap(make))))
    }
    assert len(read) > 60
    assert read <= RULES.keys()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "16"}, "hidden_size must be a whole number in 1 … 16,777,216, got '16'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number in 1 … 512, got"),
        ({"num_attention_heads": 10**9}, "num_attention_heads must be a whole number in 1 … "),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number in 0 … 1, got '1e-6'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a positive number, got nan"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "rope_scaling.factor must be a pos"),
        ({"rope_parameters": {"full_attention": {"rope_theta": []}}},
         "rope_parameters.full_attention.rope_theta must be a positive number, got \\[]"),
        ({"quantization_config": "int4"}, "quantization_config must be an object, got 'int4'"),
        ({"model_type": ["qwen3"]}, "model_type must be a string, got \\['qwen3']"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"hidden_act": "a" * 10**6}, "activation must be one of .*, got 'aaa.{70,80}; build"),
        (LAYERS | {"layer_types": ["full_attention", "chunked_attention"]},
         "layer_types must be a list of full_attention and sliding_attention, got \\['full_att"),
        (LAYERS | {"layer_types": ["full_attention"] * 3}, "one for each of num_hidden_layers=2"),
        (LAYERS | {"sliding_window": None}, "must have 'sliding_window'"),
        ({"model_type": "mixtral", "num_hidden_layers": 512, "num_local_experts": 10**4,
          "num_experts_per_tok": 1}, "must have at most 32,768 experts in all, got 512 of 10,000"),
        (CONFIGS["clip"] | {"vision_config": None}, "must have 'vision_config'"),
        (CONFIGS["clip"] | {"text_config": {"hidden_act": "swish9"}}, "activation must be one of"),
        (CONFIGS["dinov3"] | {"image_size": 2**16}, "must have 1 … 65,536 patches of its patch_s"),
        (CONFIGS["vit"] | {"patch_size": 16}, "got 8 × 8 of 16 × 16"),
    ],
)  # fmt: skip
def test_error_names_setting_and_rule(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        interop.family(CONFIG | change)


def test_null_setting_equals_missing_setting() -> None:
    nulls = ("head_dim", "num_key_value_heads", "sliding_window", "rope_scaling", "layer_types")
    module = interop.family(CONFIG | dict.fromkeys(nulls) | {"tie_word_embeddings": None}).module
    assert not module.tied
    attention = module.decoder.blocks[0].attention
    assert (attention.head_dim, attention.num_kv_heads, attention.mask) == (None, None, None)


def test_unread_settings_are_not_checked() -> None:
    interop.family(CONFIG | {"pad_token_id": -1, "dtype": ["wide"], "image_size": None})
    kept = {"heads": "all", "more": None}
    mine: list[Any] = []
    interop.FAMILIES["mine"] = lambda config: mine.append(config)  # type: ignore[func-returns-value]
    try:
        interop.family({"model_type": "mine", **kept})
    finally:
        del interop.FAMILIES["mine"]
    assert mine == [{"model_type": "mine", **kept}]
    assert FileSettings(kept)["more"] is None


def test_more_layers_than_in_file_raise_quickly(tmp_path: Path) -> None:
    """A missing setting is reported before shapes are computed, which takes time per layer."""
    interop.save(CONFIG, variables(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 512}))
    start = time.monotonic()
    with pytest.raises(
        ValueError, match=r"missing model\.layers\.2\..*; 5,510 more; take"
    ) as error:
        interop.load(tmp_path)
    assert time.monotonic() - start < MOST
    assert len(str(error.value)) < 10_000


def test_image_sizes_may_be_pairs() -> None:
    """As in `transformers`. Pixels beyond the last patch are ignored."""
    family = interop.family(CONFIGS["vit"] | {"image_size": [9, 14], "patch_size": [2, 4]})
    assert family.example[0].shape == (1, 8, 12, 3)
    assert family.shapes()["positions/embedding"].shape == (13, 16)
    assert jax.tree.leaves(family.example)[0].strides == (0, 0, 0, 0)


def test_tensor_names_are_printed_in_one_line(tmp_path: Path) -> None:
    written(tmp_path, CONFIG, {"a\nb": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"got: .a tensor named 'a\\+nb'"):
        safetensors.read_folder(tmp_path)
