"""Every key of a config is read, known to be neutral, or refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import interop
from flax_mha.interop import neutral
from tests.interop.odd_configs import CONFIGS
from tests.interop.test_files import CONFIG, saved, variables
from tests.interop.test_published_checkpoints import GPT2, LLAMA, T5
from tests.interop.written import write

Config = dict[str, Any]

# Settings that change the computation of other models.
OTHERS: Config = {
    "adapter": "lora", "alibi": True, "attention_multiplier": 0.5, "auto_map": {"AutoModel": "a.B"},
    "add_cross_attention": True, "clip_qkv": 8.0, "dual_chunk_attention_config": {"chunk_size": 8},
    "embedding_multiplier": 12.0, "is_decoder": True, "logit_scale": 0.0625, "logits_scaling": 8.0,
    "more": 1, "multi_query": True, "no_rope_layers": [1, 0], "pruned_heads": {"0": [1]},
    "quantization": {"bits": 4}, "residual_multiplier": 0.2, "rope_interleaved": True,
    "swin_norm": True, "use_bidirectional_attention": True, "use_mrope": True, "use_qk_norm": True,
}  # fmt: skip


def known(config: Config) -> Any:
    (names,) = (x for types, _, x in interop._TABLES if config["model_type"] in types.split())
    return neutral.ALWAYS | names


def meaning(config: Config) -> Any:
    """Return the module, the example and the rows of a config, or its error."""
    try:
        family = interop.family(config)
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    rows = [(row.theirs, row.ours, row.part) for row in family.rows]
    return family.module, jax.tree.map(np.shape, family.example), rows


def changes(config: Config, path: str = "") -> Iterator[tuple[str, list[Config]]]:
    """Yield each setting, nested ones included, and configs with other values of it."""
    for name, x in config.items():
        if isinstance(x, dict) and name != "id2label":
            for setting, changed in changes(x, f"{path}{name}."):
                yield setting, [config | {name: each} for each in changed]
            continue
        others: list[Any] = ["silu", [3], not x, 0]
        others += [x * 2, x + 1, x / 2] if type(x) in (int, float) else []
        others += [x[::-1]] if isinstance(x, list) else []
        yield f"{path}{name}", [config | {name: each} for each in others if each != x]


@pytest.mark.parametrize("name", CONFIGS)
def test_no_setting_is_ignored(name: str) -> None:
    """A setting without effect must be known to be neutral."""
    config = CONFIGS[name]
    whole, same = meaning(config), set()
    assert not isinstance(whole, str), whole
    for path, changed in changes(config):
        if all(meaning(each) == whole for each in changed):
            same.add(path.rpartition(".")[2])
    assert same <= known(config).keys() | {"num_labels"}


@pytest.mark.parametrize("name", CONFIGS)
def test_unsupported_settings_are_refused_by_name(name: str) -> None:
    config = CONFIGS[name]
    nested = [x for x in config if isinstance(config[x], dict) and x not in known(config)]
    for setting, value in OTHERS.items():
        told = meaning(config | {setting: value})
        assert f"got {setting}=" in told, (setting, told)
        assert "\n" not in told
        for part in nested:
            told = meaning(config | {part: config[part] | {setting: value}})
            assert f"{part}.{setting}" in str(told), (part, setting)
    of_causality = "is_causal" in known(config)
    for value in (True, False):
        refused = isinstance(meaning(config | {"is_causal": value}), str)
        assert refused == (not of_causality or known(config)["is_causal"] != value)


def test_default_settings_of_transformers_are_neutral() -> None:
    """Old configs contain every setting at its default."""
    beside = {
        "_name_or_path": "x", "add_cross_attention": False, "bad_words_ids": None,
        "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "is_decoder": False,
        "is_encoder_decoder": False, "max_length": 20, "num_beams": 1, "pruned_heads": {},
        "do_sample": False, "temperature": 1.0, "tie_encoder_decoder": False, "top_k": 50,
        "torchscript": False,
        "torch_dtype": "float16", "transformers_version": "4.16.0", "use_bfloat16": False,
        "more": None,
    }  # fmt: skip
    for config in CONFIGS.values():
        assert meaning(config | beside) == meaning(config)
        for name, part in config.items():
            if name.endswith("_config") and part:
                assert meaning(config | {name: part | beside}) == meaning(config)


YARN = CONFIGS["deepseek_v3"]["rope_scaling"]
# Keys of published configs that `transformers` does not write.
PUBLISHED: dict[str, Config] = {
    "modernbert": {
        "gradient_checkpointing": False, "position_embedding_type": "absolute",
        "reference_compile": True, "repad_logits_with_grad": False, "torch_dtype": "float32",
    },
    "deepseek_v3": {
        "aux_loss_alpha": 0.001, "ep_size": 1, "seq_aux": True, "torch_dtype": "bfloat16",
        "rope_scaling": {name.replace("rope_type", "type"): x for name, x in YARN.items()},
    },
    "gemma4": {"use_bidirectional_attention": "vision"},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_configs_are_neutral(name: str) -> None:
    assert meaning(CONFIGS[name] | PUBLISHED[name]) == meaning(CONFIGS[name])


LAYERS = ["sliding_attention", "full_attention"]
WINDOWS = CONFIG | {"sliding_window": 4, "layer_types": LAYERS}
GEMMA = CONFIG | {"model_type": "gemma3_text", "sliding_window": 4, "rope_local_base_freq": 1e4}
SCALED = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CONFIG | {"model_type": "mamba"}, "model_type must be one of"),
        (CONFIG | {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4 .* in transformers"),
        (CONFIG | {"model_type": "gpt_oss", "swiglu_alpha": 1.5}, "swiglu_alpha must be 1.702"),
        (CONFIG | {"hidden_size": None}, "config of a qwen3 must have 'hidden_size'"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (LLAMA | {"sliding_window": 4}, "got sliding_window=4"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}},
         "got rope_parameters.partial_rotary_factor=0.5"),
        (CONFIG | {"model_type": "mistral", "sliding_window": 4, "layer_types": LAYERS},
         "got layer_types="),
        (CONFIG | {"model_type": "smollm3", "no_rope_layers": [1]}, "for each of num_hidden"),
        (CONFIG | {"rope_scaling": SCALED, "rope_parameters": SCALED | {"factor": 4.0}},
         "got rope_scaling.rope_type=.yarn.; rope_scaling.factor=8.0"),
        (CONFIG | {"rope_scaling": SCALED, "original_max_position_embeddings": 16,
                   "max_position_embeddings": 64}, "got original_max_position_embeddings=16"),
        (CONFIGS["deepseek_v3"] | {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        (CONFIGS["deepseek_v3"] | {"num_key_value_heads": 2}, "num_key_value_heads must be 4"),
        (CONFIGS["gemma4"] | {"hidden_size_per_layer_input": None}, "must be 0, got 256"),
        (CONFIGS["gemma4"] | {"num_kv_shared_layers": 1}, "num_kv_shared_layers must be 0, got 1"),
        (CONFIGS["gemma4"] | {"use_bidirectional_attention": "all"}, "attention='all'"),
        (CONFIGS["gemma4"] | {"layer_types": LAYERS[::-1]}, "the last full_attention, got"),
        (CONFIGS["gemma4"] | {"rope_parameters": {"full_attention": SCALED}},
         r"rope_type must be one of \['default', 'proportional'\], got 'yarn'"),
        (CONFIGS["gemma4"] | {"per_layer_config": {"1": {"sliding_window": 3}}},
         "got per_layer_config.1.sliding_window=3"),
        (CONFIGS["modernbert"] | {"rope_theta": 1e4}, "rope_theta must be None, got 10000.0"),
        (CONFIGS["whisper"] | {"tie_word_embeddings": False}, "tie_word_embeddings must be True"),
        (CONFIGS["siglip"] | {"vision_config": CONFIGS["siglip"]["vision_config"]
                              | {"vision_use_head": False}}, "vision_use_head must be True"),
        (CONFIGS["clip"] | {"text_config_dict": {"hidden_size": 24}}, "hidden_size must be 16"),
        (CONFIGS["bert"] | {"model_type": "electra", "embedding_size": 8}, "embedding_size must"),
        (CONFIG | {"tie_word_embeddings": "yes"}, "must be true or false, got 'yes'"),
        (CONFIG | {"hidden_act": "a" * 10**6}, "hidden_act must be one of .*, got 'aaa.{90,100}; "),
        (WINDOWS | {"layer_types": ["full_attention", "chunked_attention"]},
         "layer_types must be full_attention or sliding_attention, or a flag, for each of"),
        (WINDOWS | {"layer_types": ["full_attention"] * 3}, "for each of num_hidden_layers=2, got"),
        (WINDOWS | {"sliding_window": None}, "must have 'sliding_window'"),
        (CONFIGS["clip"] | {"vision_config": None}, "must have 'vision_config'"),
    ],
)  # fmt: skip
def test_settings_with_silent_effect_are_refused(config: Config, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        interop.family(config)


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_folder_of_every_family_loads_bitwise_equal(name: str, tmp_path: Path) -> None:
    """Without the libraries: each family's layout of tensors converts both ways."""
    wanted = variables(CONFIGS[name])
    interop.save(CONFIGS[name], wanted, tmp_path)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-7)  # noqa: E731
    # Gemma's scales are stored as their difference from 1.
    same = close if name.startswith("gemma") else np.testing.assert_array_equal
    jax.tree.map(same, interop.load(tmp_path)[1], wanted)


def test_missing_tower_settings_take_transformers_defaults() -> None:
    """Files leave them out."""
    sparse = {"text_config": {"vocab_size": 256000}, "vision_config": {"image_size": 384}}
    module = interop.family({"model_type": "siglip", **sparse}).module
    assert module.text.embedding.vocab_size == 256000
    assert (module.image.encoder.num_layers, module.image.embedding.patch_size) == (12, (16, 16))


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize(
    ("config", "name", "copy"),
    [(CONFIG, "model.embed_tokens", "lm_head"), (GPT2, "transformer.wte", "lm_head"),
     (T5, "shared", "lm_head"), (T5, "shared", "decoder.embed_tokens")],
    ids=["qwen3", "gpt2", "t5", "t5's decoder"],
)  # fmt: skip
def test_tied_head_may_be_stored_under_either_name(
    config: Config, name: str, copy: str, tmp_path: Path
) -> None:
    """Or under both, but not with different numbers."""
    tensors = saved(config, tmp_path)
    table = tensors[f"{name}.weight"]
    wanted = jax.tree.leaves(interop.load(tmp_path)[1])
    both = tensors | {f"{copy}.weight": table}
    without = {key: x for key, x in both.items() if key != f"{name}.weight"}
    for given in (both, without):
        write(tmp_path / "model.safetensors", given)
        found = jax.tree.leaves(interop.load(tmp_path)[1])
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    other = table.copy()
    other[-1, -1] += 1
    write(tmp_path / "model.safetensors", tensors | {f"{copy}.weight": other})
    words = rf"{copy}.weight must equal {name}.weight, which the config ties it to"
    with pytest.raises(ValueError, match=words):
        interop.load(tmp_path)


def test_untied_gpt2_saves_and_loads_its_head(tmp_path: Path) -> None:
    config = GPT2 | {"tie_word_embeddings": False}
    assert "lm_head.weight" in saved(config, tmp_path)
    assert not interop.load(tmp_path)[0].tied


def test_modules_for_further_tokens_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3's follow its layers, as many as the config says."""
    config = CONFIGS["deepseek_v3"]
    tensors = saved(config, tmp_path)
    name = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    write(tmp_path / "model.safetensors", tensors | {name: np.ones((2, 2))})
    with pytest.warns(UserWarning, match=f"has no place for them: {name}$"):
        interop.load(tmp_path)
    without = config | {"num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(without))
    with pytest.raises(ValueError, match=f"surplus {name}"):
        interop.load(tmp_path)


def test_folder_with_adapter_raises(tmp_path: Path) -> None:
    saved(CONFIG, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config.json.*merge_and_unload"):
        interop.load(tmp_path)


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
