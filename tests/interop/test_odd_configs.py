"""Configs with wrong or missing values, and with values of several forms."""

from typing import Any

import jax
import pytest

from flax_mha import interop
from tests.interop.odd_configs import CONFIGS, LAYERS
from tests.interop.test_files import CONFIG


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"hidden_act": "a" * 10**6}, "hidden_act must be one of .*, got 'aaa.{90,100}; build"),
        (LAYERS | {"layer_types": ["full_attention", "chunked_attention"]},
         "layer_types must be full_attention or sliding_attention, or a flag, for each of"),
        (LAYERS | {"layer_types": ["full_attention"] * 3}, "for each of num_hidden_layers=2, got"),
        (LAYERS | {"sliding_window": None}, "must have 'sliding_window'"),
        (CONFIGS["clip"] | {"vision_config": None}, "must have 'vision_config'"),
        (CONFIGS["clip"] | {"text_config": {"hidden_act": "swish9"}}, "hidden_act must be one of"),
    ],
)  # fmt: skip
def test_error_names_setting_and_rule(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        interop.family(CONFIG | change)


def test_null_setting_equals_missing_setting() -> None:
    nulls = ("head_dim", "num_key_value_heads", "sliding_window", "rope_scaling", "layer_types")
    module = interop.family(CONFIG | dict.fromkeys(nulls)).module
    attention = module.decoder.blocks[0].attention
    assert (attention.head_dim, attention.num_kv_heads, attention.mask) == (None, None, None)


def test_image_sizes_may_be_pairs() -> None:
    """As in `transformers`. Pixels beyond the last patch are ignored."""
    family = interop.family(CONFIGS["vit"] | {"image_size": [9, 14], "patch_size": [2, 4]})
    assert family.example[0].shape == (1, 8, 12, 3)
    assert family.shapes()["positions/embedding"].shape == (13, 16)
    assert jax.tree.leaves(family.example)[0].strides == (0, 0, 0, 0)
