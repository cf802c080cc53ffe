"""Every family against `transformers`: hidden states, gradients, tokens, and files both ways."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

torch = pytest.importorskip("torch", reason="needs the extra families")
pytest.importorskip("transformers", reason="needs the extra families")

from flax_mha import generate, interop  # noqa: E402
from flax_mha.interop import neutral, safetensors  # noqa: E402
from flax_mha.models.blocks import Block  # noqa: E402
from tests.interop.families import ALIASES, CASES, IDS, make, pair, run  # noqa: E402
from tests.support.oracle import error  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BFLOAT16 = (
    "olmo2", "mt5", "modernbert classifies", "dinov2, registers", "deepseek-v3", "gemma4",
)  # fmt: skip
GENERATING = [
    x for x, case in CASES.items() if case.model.__name__.endswith(("CausalLM", "LMHeadModel"))
]


def outputs(want: Any) -> tuple[Any, ...]:
    """Return the outputs of `transformers` in the order of ours."""
    if hasattr(want, "logits_per_image"):
        return want.image_embeds, want.text_embeds, want.logits_per_image
    return (want.logits if hasattr(want, "logits") else want.last_hidden_state,)


def hidden_states(want: Any) -> list[np.ndarray]:
    """Return what the blocks of `transformers` return."""
    states: list[Any] = []
    for part in ("vision_model_output", "text_model_output"):
        states += (getattr(want, part, None) or {}).get("hidden_states", ())[1:]
    for part in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        states += (getattr(want, part, None) or ())[1:]
    return [x.detach().numpy() for x in states]


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_gradients_match_transformers(name: str) -> None:
    """Gradients are those of images, sound, and the embeddings of tokens."""
    theirs, module, variables = pair(name)
    given = {key: torch.tensor(x) for key, x in CASES[name].given.items()}
    flat = flatten_dict(variables["params"], sep="/")
    if CASES[name].given.keys() == {"input_ids"}:
        paths = [x for x in flat if re.fullmatch(r"(body/)?embedding/table/embedding", x)]
        asked = [theirs.get_input_embeddings().weight]
    else:
        paths = [x for x in flat if x.endswith("table/embedding") and "head/" not in x]
        names = ("token_embedding.weight", "shared.weight", "embed_tokens.weight")
        asked = [p for key, p in theirs.named_parameters() if key.endswith(names)]
    asked += [x.requires_grad_() for x in given.values() if x.is_floating_point()]
    want = theirs(**given, output_hidden_states=True)
    rng = np.random.default_rng(1)
    cotangents = [rng.normal(size=x.shape).astype(np.float32) for x in outputs(want)]
    slopes = torch.autograd.grad(outputs(want), asked, [torch.tensor(x) for x in cotangents])
    at = [i for i, x in enumerate(CASES[name].ours) if x.dtype == np.float32]

    def is_block(module: Any, method: str) -> bool:
        return isinstance(module, Block) and method == "__call__"

    def loss(actual: Any) -> Any:
        params = unflatten_dict(flat | dict(zip(paths, actual, strict=False)), sep="/")
        inputs = list(CASES[name].ours)
        for i, x in zip(at, actual[len(paths) :], strict=True):
            inputs[i] = x
        got, sown = module.apply(
            {"params": params}, *inputs, capture_intermediates=is_block, mutable="intermediates"
        )
        got = got if isinstance(got, tuple) else (got,)
        return sum(jnp.vdot(x, y) for x, y in zip(got, cotangents, strict=True)), (got, sown)

    actual = [flat[x] for x in paths] + [CASES[name].ours[i] for i in at]
    gradients, (got, sown) = jax.jit(jax.grad(loss, has_aux=True))(actual)
    for ours, expected in zip(got, outputs(want), strict=True):
        assert error(ours, expected.detach().numpy()) < 1e-5
    assert len(gradients) == len(slopes) > 0
    for ours, slope in zip(gradients, slopes, strict=True):
        # PyTorch has channels first.
        slope = slope.movedim(1, -1) if slope.ndim > 2 else slope
        assert error(ours, slope.numpy()) < 1e-4
    # `Experts` sow more.
    blocks = [x[0] for path, x in flatten_dict(sown).items() if path[-1] == "__call__"]
    states = hidden_states(want)
    assert len(states) == len(blocks) > 0
    close = sum(any(x.shape == y.shape and error(x, y) < 1e-5 for y in states) for x in blocks)
    # Decoders and ModernBERT return the last one after the final norm.
    stacks = 2 if len(CASES[name].ours) > 1 else 1
    normed = type(module).__name__ in ("LanguageModel", "Translator", "Whisper")
    assert close >= len(blocks) - (stacks if normed or "modernbert" in name else 0)


@pytest.mark.sampled(0.24)
@pytest.mark.parametrize("name", GENERATING)
def test_greedy_tokens_match_transformers(name: str) -> None:
    theirs, module, variables = pair(name)
    want = theirs.generate(
        torch.tensor(IDS[:, :5]), max_new_tokens=8, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    actual = generate(module, variables, IDS[:, :5], max_new_tokens=8)
    np.testing.assert_array_equal(actual.tokens, want[:, 5:].numpy())


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_match_transformers(name: str) -> None:
    theirs, module, variables = pair(name)
    got = jax.tree.leaves(jax.jit(module.apply)(variables, *ALIASES[name].ours))
    want = run(theirs, ALIASES[name].given)
    expected = (want[0], want.pooler_output) if "'" in name else want[:1]
    for ours, x in zip(got, expected, strict=True):
        assert error(ours, x.numpy()) < 1e-5
    if name == "clip's texts":
        _, third = module.apply(variables, IDS, at=np.array([2, 2]))
        assert error(third, want[0][:, 2].numpy()) < 1e-5


@pytest.mark.parametrize("name", CASES | ALIASES)
def test_saved_files_load_in_both_directions(name: str, tmp_path: Path) -> None:
    """Bitwise, under the names of `transformers`, and from a folder or a config."""
    theirs, module, variables = pair(name)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded, actual = interop.load(tmp_path / "theirs")
    assert loaded == module
    jax.tree.map(np.testing.assert_array_equal, actual, variables)
    interop.save(tmp_path / "theirs", actual, tmp_path / "again")
    names = {x: {*safetensors.file_names(tmp_path / x)} for x in ("theirs", "again")}
    # The mask token is only for training, and the pooler only for a classifier.
    unread = {x for x in names["theirs"] if "pooler" in x or x.endswith("mask_token")}
    assert names["theirs"] - unread <= names["again"] <= names["theirs"]
    config = (CASES | ALIASES)[name].config.to_dict() | {"architectures": [type(theirs).__name__]}
    interop.save(config, actual, tmp_path / "ours")
    mine = dict(type(theirs).from_pretrained(tmp_path / "ours").named_parameters())
    for key, x in theirs.named_parameters():
        if "pooler" not in key and not key.endswith("mask_token"):
            # Gemma's scales are stored as their difference from 1.
            atol = 2e-7 if "norm" in key and name in ("gemma2", "gemma3") else 0
            found, wanted = mine[key].detach().numpy(), x.detach().numpy()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", BFLOAT16)
def test_sharded_bfloat16_folder_loads_and_is_saved(name: str, tmp_path: Path) -> None:
    """Published models are split over several files."""
    theirs = make(CASES[name]).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len([*(tmp_path / "theirs").glob("*.safetensors")]) > 1
    _, variables = interop.load(tmp_path / "theirs")
    assert {x.dtype for x in jax.tree.leaves(variables)} == {np.dtype("bfloat16")}
    interop.save(tmp_path / "theirs", variables, tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours")
    assert again.dtype == torch.bfloat16
    mine = again.state_dict()
    for key, x in theirs.state_dict().items():
        if not key.endswith("mask_token"):
            np.testing.assert_array_equal(mine[key].float(), x.float(), err_msg=key)


# These ask for further outputs, split a matmul, are read by a table, or are replaced by a call.
ELSEWHERE = {
    "chunk_size_feed_forward", "eos_token_id", "intermediate_size", "is_encoder_decoder",
    "max_position_embeddings", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "pooler_output_size", "projection_size", "return_dict", "use_cache",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIASES)
def test_neutral_settings_do_not_change_transformers(name: str) -> None:
    """A setting that no table reads changes no output of `transformers`."""
    case = ALIASES[name]
    weights, settings = make(case).state_dict(), case.config.to_dict()
    (known,) = (x for kinds, _, x in interop._TABLES if settings["model_type"] in kinds.split())
    names = [
        key for key, value in (neutral.ALWAYS | known).items()
        if value is ... and type(settings.get(key)) in (bool, int, float) and key not in ELSEWHERE
    ]  # fmt: skip

    def changed(change: dict[str, Any]) -> np.ndarray:
        config = type(case.config).from_dict(settings | change)
        config._attn_implementation = "eager"
        model = case.model(config).eval()
        model.load_state_dict(weights)
        return np.asarray(run(model, case.given)[0].numpy())

    whole = changed({})
    assert names
    for key in names:
        x = settings[key]
        other = not x if isinstance(x, bool) else x + 1 if isinstance(x, int) else x / 2 + 0.25
        np.testing.assert_array_equal(changed({key: other}), whole, err_msg=key)
