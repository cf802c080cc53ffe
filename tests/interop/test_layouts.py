"""Orders and numbers in published files and configs that no round trip can check."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from flax_mha import interop, masks
from tests.interop.odd_configs import CONFIGS
from tests.interop.test_config_keys import variables


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(name: str) -> tuple[dict[str, np.ndarray], Any]:
        values = variables(CONFIGS[name])
        interop.save(CONFIGS[name], values, tmp_path)
        jax.tree.map(np.testing.assert_array_equal, interop.load(tmp_path)[1], values)
        (file,) = tmp_path.glob("*.safetensors")
        return load_file(file), values["params"]

    return save


def test_modernbert_has_the_activated_half_first(saved: Any) -> None:
    tensors, params = saved("modernbert")
    mlp = params["body"]["encoder"]["layers_0"]["mlp"]
    wanted = np.concatenate([mlp["gate"]["kernel"].T, mlp["up"]["kernel"].T])
    np.testing.assert_array_equal(tensors["model.layers.0.mlp.Wi.weight"], wanted)


def test_gpt_oss_interleaves_gates_and_values(saved: Any) -> None:
    tensors, params = saved("gpt_oss")
    mlp = params["decoder"]["layers_0"]["mlp"]
    pairs = tensors["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(pairs[..., ::2], mlp["gate_kernel"])
    np.testing.assert_array_equal(pairs[..., 1::2], mlp["up_kernel"])


def test_vit_flattens_patches_by_rows_columns_and_colors(saved: Any) -> None:
    tensors, params = saved("vit")
    weight = tensors["embeddings.patch_embeddings.projection.weight"]  # [D, C, P, P]
    kernel = params["embedding"]["patches"]["kernel"].reshape(4, 4, 3, 16)
    np.testing.assert_array_equal(weight, kernel.transpose(3, 2, 0, 1))


def test_numbers_of_configs_have_their_published_meaning() -> None:
    roberta, t5, deepseek, gpt_oss = (
        interop.family(CONFIGS[name]).module for name in ("roberta", "t5", "deepseek_v3", "gpt_oss")
    )
    assert roberta.first == 2  # Position 1 is that of padding.
    (bias,), (causal,) = t5.encoder.scores, t5.decoder.decoder.scores
    assert bias.bidirectional
    assert not causal.bidirectional
    # A sliding window of 4 has the query's own key and three before it.
    sliding = [x.attention.mask for x in gpt_oss.decoder.block if x.attention.mask is not None]
    assert sliding == [masks.Window(3, 0)]
    # YaRN's factor counts twice.
    (attention,) = {block.attention for block in jax.tree.leaves(deepseek.decoder.block)}
    config = CONFIGS["deepseek_v3"]
    size = 1 + 0.1 * config["rope_scaling"]["mscale_all_dim"] * math.log(2.0)
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    np.testing.assert_allclose(attention.scale, size**2 / math.sqrt(width))
