"""Model types and settings that share a table with others, against `transformers`: logits."""

from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
hf = pytest.importorskip("transformers", reason="needs the extra families")

from flax_mha import interop  # noqa: E402
from flax_mha.interop import neutral, safetensors  # noqa: E402
from tests.interop.families import (  # noqa: E402
    DECODER,
    IDS,
    SOUND,
    TEXT,
    TOWER,
    WHISPER,
    Case,
    image,
    make,
    text,
)
from tests.support.oracle import error  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
# Rows of 11 tokens are longer than these.
SHORT = {"max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.5, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0],
    "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 8,
    "mscale": 1.4, "mscale_all_dim": 0.7,
}  # fmt: skip


CASES = {
    "xlm-roberta": text(hf.XLMRobertaModel, hf.XLMRobertaConfig(**TEXT)),
    "camembert": text(hf.CamembertModel, hf.CamembertConfig(**TEXT)),
    "ernie": text(hf.ErnieModel, hf.ErnieConfig(**TEXT)),
    "data2vec-text": text(hf.Data2VecTextModel, hf.Data2VecTextConfig(**TEXT)),
    "electra": text(hf.ElectraModel, hf.ElectraConfig(**TEXT, embedding_size=32)),
    "electra classifies": text(
        hf.ElectraForSequenceClassification,
        hf.ElectraConfig(**TEXT, embedding_size=32, num_labels=3),
    ),
    "vit-msn": image(hf.ViTMSNModel, hf.ViTMSNConfig(**TOWER)),
    "dinov3 without biases": image(
        hf.DINOv3ViTModel, hf.DINOv3ViTConfig(**TOWER, mlp_bias=False, use_gated_mlp=True)
    ),
    "clip's images": image(hf.CLIPVisionModel, hf.CLIPVisionConfig(**TOWER)),
    "clip's texts": text(hf.CLIPTextModel, hf.CLIPTextConfig(**TEXT)),
    "clip's texts to their end": text(
        hf.CLIPTextModel, hf.CLIPTextConfig(**TEXT | {"eos_token_id": int(IDS[1, 3])})
    ),
    "siglip's images": image(hf.SiglipVisionModel, hf.SiglipVisionConfig(**TOWER)),
    "siglip's texts": text(hf.SiglipTextModel, hf.SiglipTextConfig(**TEXT)),
    "whisper scaled": Case(
        hf.WhisperForConditionalGeneration, hf.WhisperConfig(**WHISPER, scale_embedding=True),
        {"input_features": SOUND, "decoder_input_ids": IDS}, (SOUND.transpose(0, 2, 1), IDS),
    ),
    "ministral": text(hf.MinistralForCausalLM, hf.MinistralConfig(
        **DECODER, sliding_window=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )),
    "smollm3": text(hf.SmolLM3ForCausalLM, hf.SmolLM3Config(
        **DECODER, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=3
    )),
    "qwen2 late windows": text(hf.Qwen2ForCausalLM, hf.Qwen2Config(
        **TEXT, num_key_value_heads=2, use_sliding_window=True, sliding_window=3,
        max_window_layers=1,
    )),
    "llama, mscale": text(hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER, rope_parameters=YARN)),
    "llama, dynamic": text(hf.LlamaForCausalLM, hf.LlamaConfig(
        **DECODER | {"max_position_embeddings": 6},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    )),
    "llama, longrope": text(
        hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER, rope_parameters=LONGROPE)
    ),
    "llama, longrope of short rows": text(hf.LlamaForCausalLM, hf.LlamaConfig(
        **DECODER,
        rope_parameters=LONGROPE | {"original_max_position_embeddings": 16, "factor": 4.0},
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_aliases_match_transformers(name: str, tmp_path: Any) -> None:
    case = CASES[name]
    theirs = make(case)
    theirs.save_pretrained(tmp_path / "theirs")
    module, variables = interop.load(tmp_path / "theirs")
    got = jax.tree.leaves(jax.jit(module.apply)(variables, *case.ours))
    with torch.no_grad():
        want = theirs(**{key: torch.tensor(x) for key, x in case.given.items()})
    expected = (want[0], want.pooler_output) if "'" in name else want[:1]
    for ours, x in zip(got, expected, strict=True):
        assert error(ours, x.numpy()) < 1e-5
    if name == "clip's texts":
        _, third = module.apply(variables, IDS, at=np.array([2, 2]))
        assert error(third, want[0][:, 2].numpy()) < 1e-5
    # Save it back, under the same names.
    interop.save(tmp_path / "theirs", variables, tmp_path / "again")
    theirs_names, names = (safetensors.file_names(tmp_path / x) for x in ("theirs", "again"))
    unread = {x for x in theirs_names if "pooler" in x or x.endswith("mask_token")}
    assert {*names} == {*theirs_names} - unread
    config = case.config.to_dict() | {"architectures": [type(theirs).__name__]}
    interop.save(config, variables, tmp_path / "ours")
    again = dict(type(theirs).from_pretrained(tmp_path / "ours").named_parameters())
    for key, x in theirs.named_parameters():
        if "pooler" not in key and not key.endswith("mask_token"):
            np.testing.assert_array_equal(again[key].detach().numpy(), x.detach().numpy())


def flipped(x: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(x, bool):
        return not x
    return x + 1 if isinstance(x, int) else 0.5 * x + 0.25


# Further outputs, the split of a matmul, and settings that a table reads or a call replaces.
ELSEWHERE = {
    "chunk_size_feed_forward", "eos_token_id", "intermediate_size", "is_encoder_decoder",
    "max_position_embeddings", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "pooler_output_size", "projection_size", "return_dict", "use_cache",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_neutral_settings_do_not_change_transformers(name: str) -> None:
    """A setting that no table reads changes no output of `transformers`."""
    case = CASES[name]
    weights, said = make(case).state_dict(), case.config.to_dict()
    (known,) = (x for kinds, _, x in interop._TABLES if said["model_type"] in kinds.split())
    names = [
        key for key, value in (neutral.ALWAYS | known).items()
        if value is ... and type(said.get(key)) in (bool, int, float) and key not in ELSEWHERE
    ]  # fmt: skip

    def run(change: dict[str, Any]) -> np.ndarray:
        config = type(case.config).from_dict(said | change)
        config._attn_implementation = "eager"
        model = case.model(config).eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            found = model(**{key: torch.tensor(x) for key, x in case.given.items()})[0]
        return np.asarray(found.numpy())

    whole = run({})
    assert names
    for key in names:
        np.testing.assert_array_equal(run({key: flipped(said[key])}), whole, err_msg=key)
