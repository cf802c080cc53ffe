"""Layers of torch.nn: the same numbers, and state dicts that convert back bitwise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")

from flax_mha import (  # noqa: E402
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    QKNorm,
    interop,
    masks,
    positions,
    scores,
)
from tests.support.arrays import random_variables  # noqa: E402
from tests.support.oracle import error  # noqa: E402

# PyTorch warns that it skips a faster path.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")
D, N = 16, 4
RNG = np.random.default_rng(0)
X, Y, K, V = (
    RNG.normal(size=(2, *shape)).astype(np.float32) for shape in ((5, D), (7, D), (7, 12), (7, 20))
)


def arrays(module: Any) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in module.state_dict().items()}


def seeded(make: Any) -> Any:
    """Build the module with random changes to biases and scales, and no dropout."""
    torch.manual_seed(0)
    module = make().eval()
    with torch.no_grad():
        for x in module.parameters():
            x.add_(0.1 * torch.randn_like(x))
    return module


def ran(module: Any, *given: Any, **more: Any) -> np.ndarray:
    with torch.no_grad():
        out = module(*map(torch.tensor, given), **more)
    return (out[0] if isinstance(out, tuple) else out).numpy()


def same(theirs: Any, ours: Any, variables: Any) -> None:
    """Check that the variables convert back to the module's state dict, bitwise."""
    found = interop.to_torch(ours, variables)
    assert sorted(found) == sorted(theirs.state_dict())
    for name, x in arrays(theirs).items():
        np.testing.assert_array_equal(found[name], x)
    theirs.load_state_dict({name: torch.tensor(x) for name, x in found.items()})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("given", [(X, X, X), (X, Y, Y), (X, K, V)], ids=["self", "cross", "kdim"])
def test_attention_matches_torch(bias: bool, given: Any) -> None:
    sizes = {"kdim": 12, "vdim": 20} if given[1] is K else {}
    theirs = seeded(lambda: torch.nn.MultiheadAttention(D, N, bias=bias, batch_first=True, **sizes))
    ours, variables = interop.from_torch(theirs.state_dict(), N)
    assert error(jax.jit(ours.apply)(variables, *given), ran(theirs, *given)) < 2e-6
    same(theirs, ours, variables)


def test_padding_and_causal_masks_match_torch() -> None:
    theirs = seeded(lambda: torch.nn.MultiheadAttention(D, N, batch_first=True))
    ours, variables = interop.from_torch(theirs.state_dict(), N)
    hidden = np.arange(5) >= np.array([[5], [3]])
    later = ~np.tri(5, dtype=bool)
    want = ran(
        theirs, X, X, X, key_padding_mask=torch.tensor(hidden), attn_mask=torch.tensor(later)
    )
    found = ours.apply(variables, X, mask=masks.Causal() & masks.Keys(~hidden))
    assert error(found, want) < 2e-6


BLOCKS: dict[str, dict[str, Any]] = {
    "as it is": {}, "norm first": {"norm_first": True}, "no bias": {"bias": False},
    "gelu": {"activation": "gelu", "layer_norm_eps": 1e-3},
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_blocks_match_torch(kind: str, layers: int | None, name: str) -> None:
    options, nn = BLOCKS[name], torch.nn

    def make() -> Any:
        block = getattr(nn, f"Transformer{kind}Layer")(D, N, 24, batch_first=True, **options)
        if layers is None:
            return block
        if kind == "Decoder":
            return nn.TransformerDecoder(block, layers)
        norm = nn.LayerNorm(D, options.get("layer_norm_eps", 1e-5), bias=options.get("bias", True))
        return nn.TransformerEncoder(block, layers, norm, enable_nested_tensor=False)

    theirs = seeded(make)
    # A state dict does not contain these.
    others = {name: x for name, x in options.items() if name != "bias"}
    ours, variables = interop.from_torch(theirs.state_dict(), N, **others)
    given = (X,) if kind == "Encoder" else (X, Y)
    causal = {} if kind == "Encoder" else {"tgt_mask": torch.tensor(~np.tri(5, dtype=bool))}
    assert error(jax.jit(ours.apply)(variables, *given), ran(theirs, *given, **causal)) < 2e-6
    same(theirs, ours, variables)


def test_bfloat16_weights_stay_bfloat16() -> None:
    theirs = seeded(lambda: torch.nn.MultiheadAttention(D, N).bfloat16())
    _, variables = interop.from_torch(theirs.state_dict(), N)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("bfloat16")}
    want = theirs.state_dict()["out_proj.weight"].float().numpy().T.reshape(N, D // N, D)
    np.testing.assert_array_equal(variables["params"]["out"]["kernel"].astype(np.float32), want)


STATE = torch.nn.MultiheadAttention(D, N).state_dict()


@pytest.mark.parametrize(
    ("state", "heads", "told"),
    [
        (
            torch.nn.MultiheadAttention(D, N, add_bias_kv=True).state_dict(), N, "surplus bias_k",
        ),
        (torch.nn.Linear(2, 2).state_dict(), N, r"got \['bias', 'weight'\]"),
        (torch.nn.Transformer(D, N, 1, 1, 8).state_dict(), N, "prefix.* decoder of nn.Tr"),
        (STATE, 3, "divi"),
        (STATE | {"more": np.ones(1)}, N, "surplus more"),
        ({"out_proj.weight": np.ones((D, D))}, N, "missing in_proj_weight"),
        (
            {name: x.to(torch.int8) for name, x in STATE.items()}, N,
            "in_proj_weight must have a floating dtype, is int8; .* multiply codes by their scales",
        ),
    ],
)  # fmt: skip
def test_wrong_state_dicts_raise(state: Any, heads: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        interop.from_torch(state, heads)


def test_dropout_reaches_layers_and_blocks() -> None:
    block = torch.nn.TransformerEncoderLayer(D, N, 24)
    ours, _ = interop.from_torch(block.state_dict(), N, dropout=0.25)
    assert ours.dropout_rate == ours.attention.dropout_rate == 0.25


def test_other_objects_raise() -> None:
    with pytest.raises(TypeError, match="module must be an attention layer"):
        interop.to_torch(3, {})


LAYER = MultiHeadAttention(N)
REFUSED = {
    "gate": MultiHeadAttention(N, gate="head"),
    "rotary": MultiHeadAttention(N, rotary=positions.Rotary()),
    "qk_norm": MultiHeadAttention(N, qk_norm=QKNorm("rmsnorm", scale=False)),
    "in_proj_weight must be .48, 16., is .32, 16": MultiHeadAttention(N, num_kv_heads=2),
    "EncoderBlock with norm, got .rmsnorm.": EncoderBlock(
        MultiHeadAttention(N, use_bias=False), 8, norm="rmsnorm"
    ),
    "parallel": EncoderBlock(LAYER, 8, parallel=True),
    "rotary in a block": EncoderBlock(MultiHeadAttention(N, rotary=positions.Rotary()), 8),
    "Encoder with block, got": Encoder(2, (EncoderBlock(LAYER, 8), EncoderBlock(LAYER, 12))),
    "Encoder with scores": Encoder(1, EncoderBlock(LAYER, 8), scores=(scores.Alibi(),)),
}


@pytest.mark.parametrize("told", REFUSED)
def test_layers_that_torch_lacks_raise(told: str) -> None:
    module = REFUSED[told]
    variables = random_variables(module, X)
    with pytest.raises(ValueError, match=told.partition(" in a ")[0]):
        interop.to_torch(module, variables)
