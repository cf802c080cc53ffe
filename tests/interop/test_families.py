"""Every family against `transformers`: hidden states, gradients, tokens, and files both ways."""

import functools
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

torch = pytest.importorskip("torch", reason="needs the extra families")
pytest.importorskip("transformers", reason="needs the extra families")

from flax_mha import generate, interop  # noqa: E402
from flax_mha.models import LanguageModel  # noqa: E402
from flax_mha.models.blocks import Block  # noqa: E402
from tests.interop import by_hand  # noqa: E402
from tests.interop.families import CASES, IDS, make  # noqa: E402
from tests.support.oracle import error  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = CASES | by_hand.CASES
TEXTS = [name for name, case in ALL.items() if case.ours[0] is IDS and len(case.ours) == 1]


@functools.cache
def pair(name: str) -> tuple[Any, Any, Any]:
    """Return the `transformers` model, and our module with its variables."""
    theirs = make(ALL[name])
    if (copied := ALL[name].by_hand) is not None:
        tensors = {key: x.numpy() for key, x in theirs.state_dict().items()}
        return theirs, *copied(tensors)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        module, variables = interop.load(folder)
        return theirs, module, jax.tree.map(np.array, variables)


def run(theirs: Any, given: dict[str, Any]) -> Any:
    with torch.no_grad():
        return theirs(**{key: torch.tensor(x) for key, x in given.items()},
                      output_hidden_states=True)  # fmt: skip


def outputs(want: Any) -> tuple[Any, ...]:
    """Return the outputs of `transformers` in the order of ours."""
    if hasattr(want, "logits_per_image"):
        return want.image_embeds, want.text_embeds, want.logits_per_image
    return (want.logits if hasattr(want, "logits") else want.last_hidden_state,)


@pytest.mark.parametrize("name", ALL)
def test_every_hidden_state_matches_transformers(name: str) -> None:
    theirs, module, variables = pair(name)
    want = run(theirs, ALL[name].given)

    def is_block(module: Any, method: str) -> bool:
        return isinstance(module, Block) and method == "__call__"

    got, seen = module.apply(
        variables, *ALL[name].ours, capture_intermediates=is_block, mutable="intermediates"
    )
    got = got if isinstance(got, tuple) else (got,)
    for ours, expected in zip(got, outputs(want), strict=True):
        assert error(ours, expected.numpy()) < 1e-5
    # `Experts` sow more.
    blocks = [x[0] for path, x in flatten_dict(seen).items() if path[-1] == "__call__"]
    states: list[Any] = []
    for part in ("vision_model_output", "text_model_output"):
        states += (getattr(want, part, None) or {}).get("hidden_states", ())[1:]
    for part in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        # Decoders and ModernBERT return the last one after the final norm.
        states += (getattr(want, part, None) or ())[1:]
    states = [x.numpy() for x in states]
    assert blocks
    assert len(states) == len(blocks)
    close = sum(any(x.shape == y.shape and error(x, y) < 1e-5 for y in states) for x in blocks)
    stacks = 2 if len(ALL[name].ours) > 1 else 1
    normed = type(module).__name__ in ("LanguageModel", "Translator", "Whisper")
    assert close >= len(blocks) - (stacks if normed or "modernbert" in name else 0)


@pytest.mark.parametrize("name", TEXTS)
def test_gradients_of_embeddings_match_transformers(name: str) -> None:
    """The token table is the input of the first layer."""
    theirs, module, variables = pair(name)
    out = theirs(input_ids=torch.tensor(IDS))
    out = out.logits if hasattr(out, "logits") else out.last_hidden_state
    cotangent = np.random.default_rng(1).normal(size=out.shape).astype(np.float32)
    table = theirs.get_input_embeddings().weight
    (want,) = torch.autograd.grad(out, [table], torch.tensor(cotangent))

    def loss(variables: Any) -> jax.Array:
        return jnp.vdot(module.apply(variables, IDS), cotangent)

    params = jax.jit(jax.grad(loss))(variables)["params"]
    got = params.get("body", params)["embedding"]["table"]["embedding"]
    assert error(got, want.numpy()) < 1e-4


@pytest.mark.parametrize("name", [name for name in CASES if name not in TEXTS])
def test_gradients_of_inputs_match_transformers(name: str) -> None:
    """For images, sound and token tables."""
    theirs, module, variables = pair(name)
    given = {key: torch.tensor(x) for key, x in CASES[name].given.items()}
    tables = ("token_embedding.weight", "shared.weight", "embed_tokens.weight")
    asked = [p for key, p in theirs.named_parameters() if key.endswith(tables)]
    asked += [x.requires_grad_() for x in given.values() if x.is_floating_point()]
    out = outputs(theirs(**given))
    rng = np.random.default_rng(1)
    cotangents = [rng.normal(size=x.shape).astype(np.float32) for x in out]
    expected = torch.autograd.grad(out, asked, [torch.tensor(x) for x in cotangents])

    flat = flatten_dict(variables["params"], sep="/")
    path = [
        x
        for x in flat
        if x.endswith("table/embedding") and not x.startswith(("head", "decoder/head"))
    ]
    at = [i for i, x in enumerate(CASES[name].ours) if x.dtype == np.float32]

    def loss(actual: Any) -> jax.Array:
        params = unflatten_dict(flat | dict(zip(path, actual, strict=False)), sep="/")
        inputs = list(CASES[name].ours)
        for i, x in zip(at, actual[len(path) :], strict=True):
            inputs[i] = x
        got = module.apply({"params": params}, *inputs)
        got = got if isinstance(got, tuple) else (got,)
        return sum(jnp.vdot(x, y) for x, y in zip(got, cotangents, strict=True))

    actual = jax.jit(jax.grad(loss))([flat[x] for x in path] + [CASES[name].ours[i] for i in at])
    assert len(actual) == len(expected) > 0
    for ours, want in zip(actual, expected, strict=True):
        # PyTorch has channels first.
        want = want.movedim(1, -1) if want.ndim > 2 else want
        assert error(ours, want.numpy()) < 1e-4


@pytest.mark.parametrize("name", [x for x in TEXTS if isinstance(pair(x)[1], LanguageModel)])
def test_greedy_tokens_match_transformers(name: str) -> None:
    theirs, module, variables = pair(name)
    want = theirs.generate(
        torch.tensor(IDS[:, :5]), max_new_tokens=8, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    actual = generate(module, variables, jnp.asarray(IDS[:, :5]), max_new_tokens=8)
    np.testing.assert_array_equal(actual.tokens, want[:, 5:].numpy())


@pytest.mark.parametrize("name", CASES)
def test_saved_files_load_in_both_directions(name: str, tmp_path: Any) -> None:
    """Bitwise."""
    theirs, module, variables = pair(name)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded, actual = interop.load(tmp_path / "theirs")
    assert loaded == module
    jax.tree.map(np.testing.assert_array_equal, actual, variables)
    config = CASES[name].config.to_dict() | {"architectures": [type(theirs).__name__]}
    interop.save(config, actual, tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    mine = dict(again.named_parameters())
    for key, x in theirs.named_parameters():
        # Unused by the encoder: the pooler, and the mask token of training.
        if "pooler" not in key and not key.endswith("mask_token"):
            expected = x.detach().numpy()
            if "norm" in key and name in ("gemma2", "gemma3"):  # Stored as their difference from 1.
                np.testing.assert_allclose(mine[key].detach().numpy(), expected, atol=2e-7)
            else:
                np.testing.assert_array_equal(mine[key].detach().numpy(), expected)
