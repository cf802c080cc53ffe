"""Layers of Gemma 3n that share keys and values, against `transformers`."""

from typing import Any

import flax.linen as nn
import jax
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
pytest.importorskip("transformers", reason="needs the extra families")

import transformers as hf  # noqa: E402

from flax_mha import MultiHeadAttention, QKNorm, masks  # noqa: E402
from flax_mha.layer import core  # noqa: E402
from flax_mha.positions import Rotary  # noqa: E402
from tests.interop.by_hand import QKVO, H, K, N, Tensors, projections  # noqa: E402
from tests.interop.families import DECODER, IDS, Case, make  # noqa: E402
from tests.support.oracle import error  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Gemma3n(MultiHeadAttention):
    """A layer of Gemma 3n, which also norms its values."""

    def compute(
        self, p: Any, x_q: jax.Array, x_k: Any, x_v: Any, call: Any, cache: Any
    ) -> core.Output:
        heads = core.project_heads(p, self, x_q, x_k, x_v, call, cache)
        if heads.v is not None:
            heads = heads._replace(v=nn.RMSNorm(use_scale=False)(heads.v))
        return core.attend(p, self, heads, call, cache)


def gemma3n(kind: str, w: Tensors) -> tuple[Any, Any]:
    """Return a layer and its parameters. Layers with shared keys have only queries and out."""
    local = kind == "sliding_attention"
    layer = Gemma3n(
        N, num_kv_heads=K, head_dim=H, use_bias=False, qk_norm=QKNorm("rmsnorm"), scale=1.0,
        rotary=Rotary(50.0 if local else 1e4), mask=masks.Window(2, 0) if local else masks.Causal(),
    )  # fmt: skip
    names = {ours: row for ours, row in QKVO.items() if f"{row[0]}.weight" in w}
    params = projections(w, names)
    for ours, theirs in (("query_ln", "q_norm"), ("key_ln", "k_norm")):
        if f"{theirs}.weight" in w:
            params[ours] = {"scale": w[f"{theirs}.weight"]}
    return layer, params


def test_layers_with_shared_kv_match_transformers() -> None:
    """In Gemma 3n, the last two of four layers attend to the keys of the first two."""
    kinds = ["sliding_attention", "full_attention"] * 2
    theirs = make(Case(hf.Gemma3nForCausalLM, hf.Gemma3nTextConfig(
        **DECODER | {"num_hidden_layers": 4, "intermediate_size": [48] * 4}, layer_types=kinds,
        num_kv_shared_layers=2, sliding_window=3, hidden_size_per_layer_input=8, laurel_rank=4,
        vocab_size_per_layer_input=64, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ), {}, ()))  # fmt: skip
    seen: list[tuple[Any, Any]] = []

    def hook(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen.append(((args or (kwargs["hidden_states"],))[0].numpy(), out[0].numpy()))

    layers = [layer.self_attn for layer in theirs.model.layers]
    for layer in layers:
        layer.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        theirs(torch.tensor(IDS))
    for giver, taker in ((0, 2), (1, 3)):
        given: Any = None
        for at in (giver, taker):
            tensors = {key: x.numpy() for key, x in layers[at].state_dict().items()}
            layer, params = gemma3n(kinds[at], tensors)
            x, expected = seen[at]
            assert ("key" in params) == (at == giver)
            out, kv = layer.apply({"params": params}, x, kv=given, return_kv=True)
            assert error(out, expected) < 1e-5
            given = kv
