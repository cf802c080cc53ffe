"""Attention of models with experts, one layer each, against `transformers`."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
pytest.importorskip("transformers", reason="needs the extra families")

import transformers as hf  # noqa: E402

from flax_mha import (  # noqa: E402
    MultiHeadAttention,
    QKNorm,
    core,
    heads,
    masks,
    positions,
)
from flax_mha.positions import Rotary  # noqa: E402
from flax_mha.variants import MultiHeadLatentAttention  # noqa: E402
from tests.interop.families import DECODER, IDS, TEXT, Case, make  # noqa: E402
from tests.oracle import error  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
N, K, H = 4, 2, 16
Tensors = dict[str, np.ndarray]


def projections(w: Tensors, names: dict[str, tuple[str, int]], bias: bool) -> dict[str, Any]:
    """Kernels [D, n, ·] (out: [n, ·, D]) and biases, of so many heads."""
    found = {}
    for name, (theirs, count) in names.items():
        kernel = w[f"{theirs}.weight"].T
        shape = (count, -1, kernel.shape[1]) if name == "out" else (kernel.shape[0], count, -1)
        found[name] = {"kernel": kernel.reshape(shape)}
        if bias:
            x = w[f"{theirs}.bias"]
            found[name]["bias"] = x if name == "out" else x.reshape(count, -1)
    return found


QKVO = {"query": ("q_proj", N), "key": ("k_proj", K), "value": ("v_proj", K), "out": ("o_proj", N)}


def gpt_oss(config: Any, w: Tensors) -> tuple[Any, Any]:
    yarn = positions.Yarn(8.0, 8, truncate=False)
    layer = MultiHeadAttention(
        N, num_kv_heads=K, head_dim=H, sinks=True, rotary=Rotary(100.0, scaling=yarn),
        mask=masks.Causal() & masks.Window(2, 0),
    )  # fmt: skip
    return layer, projections(w, QKVO, bias=True) | {"sinks": w["sinks"]}


def qwen3_next(config: Any, w: Tensors) -> tuple[Any, Any]:
    layer = MultiHeadAttention(
        N, num_kv_heads=K, head_dim=H, use_bias=False, gate="feature", qk_norm=QKNorm("rmsnorm"),
        rotary=Rotary(1e4, fraction=0.25), mask=masks.Causal(),
    )  # fmt: skip
    # Each head has its queries, then its gates.
    q, gate = np.split(w["q_proj.weight"].reshape(N, 2, H, -1), 2, 1)
    w = w | {"q_proj.weight": q.reshape(N * H, -1), "gate.weight": gate.reshape(N * H, -1)}
    params = projections(w, QKVO | {"output_gate": ("gate", N)}, bias=False)
    for name, theirs in (("query_ln", "q_norm"), ("key_ln", "k_norm")):
        params[name] = {"scale": 1 + w[f"{theirs}.weight"]}
    return layer, params


def deepseek_v3(config: Any, w: Tensors) -> tuple[Any, Any]:
    rank, nope, rope, Hv = 12, 8, 4, 6
    layer = MultiHeadLatentAttention(
        N, head_dim=nope, rope_dim=rope, v_head_dim=Hv, kv_rank=rank, q_rank=16, use_bias=False,
        rotary=Rotary(1e4, interleaved=True), mask=masks.Causal(),
    )  # fmt: skip
    both = w["kv_b_proj.weight"].T.reshape(rank, N, nope + Hv)
    params = {
        "query_down": {"kernel": w["q_a_proj.weight"].T},
        "query_norm": {"scale": w["q_a_layernorm.weight"]},
        "kv_down": {"kernel": w["kv_a_proj_with_mqa.weight"].T},
        "kv_norm": {"scale": w["kv_a_layernorm.weight"]},
        "key": {"kernel": both[..., :nope]}, "value": {"kernel": both[..., nope:]},
    }  # fmt: skip
    names = {"query": ("q_b_proj", N), "out": ("o_proj", N)}
    return layer, params | projections(w, names, bias=False)


YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "truncate": False,
    "original_max_position_embeddings": 8, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LAYERS: dict[str, tuple[Any, Any, Any]] = {
    "gpt-oss": (gpt_oss, hf.GptOssForCausalLM, hf.GptOssConfig(
        **DECODER, num_local_experts=2, num_experts_per_tok=1, sliding_window=3,
        rope_parameters=YARN, layer_types=["sliding_attention"] * 3,
    )),
    "qwen3-next": (qwen3_next, hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig(
        **DECODER, layer_types=["full_attention"] * 3, num_experts=0, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )),
    "deepseek-v3": (deepseek_v3, hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config(
        **TEXT, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=6, first_k_dense_replace=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer(name: str) -> None:
    ours, model, config = LAYERS[name]
    theirs = make(Case(model, config, {}, ()))
    attention = theirs.model.layers[1].self_attn
    seen: dict[str, Any] = {}

    def hook(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen["x"], seen["y"] = (args or (kwargs["hidden_states"],))[0], out[0]

    attention.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        theirs(torch.tensor(IDS))
    tensors = {key: x.numpy() for key, x in attention.state_dict().items()}
    layer, params = ours(config, tensors)
    x = seen["x"].numpy()
    assert error(layer.apply({"params": params}, x), seen["y"].numpy()) < 1e-5
    cached = layer.clone(decode=True)
    held = cached.init(jax.random.key(0), x)["cache"]
    out, _ = cached.apply({"params": params, "cache": held}, x, mutable="cache")
    assert error(out, seen["y"].numpy()) < 1e-5


def test_whispers_positions() -> None:
    from transformers.models.whisper.modeling_whisper import sinusoids

    table = positions.sinusoidal(1500, 384, halves=True)
    np.testing.assert_allclose(table, sinusoids(1500, 384).numpy(), atol=2e-4)


class Gemma3n(MultiHeadAttention):
    """Gemma 3n norms values, too."""

    def compute(
        self, x_q: jax.Array, x_k: Any, x_v: Any, settings: Any, call: Any, cache: Any, **more: Any
    ) -> core.Output:
        weights = self.weights(x_q, x_k, x_v)
        q, k, v, _ = heads.project(weights, x_q, x_k, x_v)
        v = v if v is None else nn.RMSNorm(use_scale=False)(v)
        q, k = heads.normed(settings.qk_norm, weights, q, k, settings.dtype)
        q, k = heads.turned(settings.rotary, q, k, call.positions, None, cache)
        return core.attend(weights, settings, q, k, v, call, cache, **more)


def gemma3n(kind: str, w: Tensors) -> tuple[Any, Any]:
    """A layer, and the parameters that it has: of those that take, for queries and out."""
    local = kind == "sliding_attention"
    layer = Gemma3n(
        N, num_kv_heads=K, head_dim=H, use_bias=False, qk_norm=QKNorm("rmsnorm"), scale=1.0,
        rotary=Rotary(50.0 if local else 1e4), mask=masks.Window(2, 0) if local else masks.Causal(),
    )  # fmt: skip
    names = {ours: row for ours, row in QKVO.items() if f"{row[0]}.weight" in w}
    params = projections(w, names, bias=False)
    for ours, theirs in (("query_ln", "q_norm"), ("key_ln", "k_norm")):
        if f"{theirs}.weight" in w:
            params[ours] = {"scale": w[f"{theirs}.weight"]}
    return layer, params


def test_layers_that_share_keys_and_values() -> None:
    """Gemma 3n's: the last two of four layers attend to the keys of the first two."""
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
            x, wanted = seen[at]
            assert ("key" in params) == (at == giver)
            out, kv = layer.apply({"params": params}, x, kv=given, return_kv=True)
            assert error(out, wanted) < 1e-5
            given = kv
