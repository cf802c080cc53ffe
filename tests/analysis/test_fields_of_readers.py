"""Functions that read a layer, a block or a stack know each of its fields, or refuse it by name."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import (
    Capture,
    Decoder,
    DecoderBlock,
    EncoderBlock,
    LanguageModel,
    MultiHeadAttention,
    analysis,
    interop,
    models,
    positions,
    scores,
)
from flax_mha.layer.qk_norm import QKNorm
from tests.support.arrays import random_variables
from tests.support.layer_parts import PARTS
from tests.support.oracle import error

X, D = np.random.default_rng(0).normal(size=(1, 6, 16)).astype(np.float32), 16
TOKENS = np.arange(6)[None]
LAYER = MultiHeadAttention(4)
# Values that change what a layer computes. All other fields are in `SAME`.
OF_LAYER: dict[str, Any] = {
    name: value for part in PARTS.values() for name, value in part.fields.items() if name != "mask"
} | {
    "num_kv_heads": 2, "head_dim": 3, "v_head_dim": 3, "rotary": positions.Rotary(),
    "scores": (scores.SoftCap(0.1),), "scale": 2.0, "normalizer": "sigmoid",
    "qk_norm": QKNorm("rmsnorm"), "gate": "head", "use_bias": ("query",),
    "project_out": False, "normalize_qk": True, "qkv_features": 8, "out_features": 24,
    "attention_fn": lambda query, key, value, **_: 2 * value,
}  # fmt: skip
OF_BLOCK: dict[str, Any] = {
    "pre_norm": ("mlp",), "gated": True, "mlp_bias": False, "branch_norm": True,
    "parallel": True, "layer_scale": 0.5, "output_scale": 0.5,
}  # fmt: skip
SAME = {
    "num_heads", "mask", "kernel", "dropout_rate", "broadcast_dropout", "deterministic", "decode",
    "cache", "capture", "dtype", "param_dtype", "precision", "kernel_init", "out_kernel_init",
    "bias_init", "out_bias_init", "partitioned", "parent", "force_fp32_for_softmax", "name",
    "attention", "mlp_dim", "mlp", "norm", "activation", "remat", "norm_epsilon",
}  # fmt: skip


def test_tables_have_all_fields() -> None:
    for cls, table in ((MultiHeadAttention, OF_LAYER), (EncoderBlock, OF_BLOCK)):
        names = {x.name for x in dataclasses.fields(cls) if "dot_general" not in x.name}
        assert {x for x in names if not x.endswith("einsum_cls")} - SAME == {*table}


def read_back(read: Any, *args: Any, **options: Any) -> Any:
    """Return the module that was written. A failure to read it is no refusal to write it."""
    try:
        return read(*args, **options)
    except ValueError as error:
        raise AssertionError(f"written, but not read: {error}") from None


def differ(written: Any, read: Any, module: Any, values: Any, x: Any = X) -> float:
    """Return the error of a module that was read, against the one that was written."""
    return error(*jax.jit(lambda: (written.apply(read, x), module.apply(values, x)))())


def by_torch(module: Any) -> float:
    values = random_variables(module, X)
    options: Any = {"norm_first": True, "activation": "gelu", "layer_norm_eps": 1e-6}
    back, read = read_back(interop.from_torch, interop.to_torch(module, values), 4, **options)
    return differ(back, read, module, values)


def by_keras(layer: Any) -> float:
    values = random_variables(layer, X)
    back, read = read_back(interop.from_layer, interop.to_layer(layer, values, "keras"), 4)
    return differ(back, read, layer, values)


def by_ov(layer: Any) -> float:
    values = random_variables(layer, X[:, :1])

    @jax.jit
    def both() -> Any:
        p = values["params"]
        ov = analysis.ov(layer, p, biases=True).dense().sum(0)
        # A single token has weight 1, except with sinks and normalizers.
        plain = layer.clone(sinks=False, normalizer="softmax")
        return ov, p["out"].get("bias", 0), plain.apply(values, X[:, :1])[0, 0]

    ov, bias, wanted = both()
    return error(np.append(X[0, 0], 1.0) @ ov + bias, wanted)


def by_qk(layer: Any) -> float:
    values = random_variables(layer, X[:, :1])
    watched = layer.clone(capture=Capture(("scores",)))

    @jax.jit
    def both() -> Any:
        _, state = watched.apply(values, X[:, :1], mutable="intermediates")
        form = analysis.qk(layer, values["params"], distance=0, biases=True).dense()
        return form, state["intermediates"]["attention_scores"][0]

    (form, seen), x = both(), np.append(X[0, 0], 1.0)
    return error(np.einsum("d,nde,e->n", x, form, x), seen[0, :, 0, 0])


def by_logits(part: Any) -> float:
    block = DecoderBlock(part, 24) if isinstance(part, MultiHeadAttention) else part
    model = LanguageModel(models.TokenEmbedding(11, D), Decoder(2, block))
    values = random_variables(model, TOKENS)

    @jax.jit
    def both() -> Any:
        shares = analysis.attribute_logits(model, values, TOKENS, TOKENS)
        return shares, model.apply(values, TOKENS)

    shares, logits = both()
    total = sum(np.sum(x, -1) if x.ndim == 3 else np.asarray(x) for x in shares.values())
    return error(total, np.take_along_axis(np.asarray(logits), TOKENS[..., None], -1)[..., 0])


def by_pruning(layer: Any) -> float:
    values = random_variables(layer, X)
    keep = np.array([0.0, 0, 1, 1], np.float32)

    @jax.jit
    def both() -> Any:
        smaller, fewer = analysis.prune(layer, values, {"": (0, 1)})
        return smaller.apply(fewer, X), layer.apply(values, X, head_mask=keep)

    return error(*both())


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("name", OF_LAYER)
@pytest.mark.parametrize("read", [by_torch, by_keras, by_ov, by_qk, by_logits, by_pruning])
def test_fields_of_layers(read: Any, name: str) -> None:
    check(read, name, LAYER.clone(**{name: OF_LAYER[name]}))


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("name", OF_BLOCK)
@pytest.mark.parametrize("read", [by_torch, by_logits])
def test_fields_of_blocks(read: Any, name: str) -> None:
    kind = EncoderBlock if read is by_torch else DecoderBlock
    check(read, name, kind(LAYER, 24).clone(**{name: OF_BLOCK[name]}))


def check(read: Any, name: str, module: Any) -> None:
    """Check that a function gives the right numbers, or an error about the field."""
    refusal = ""
    try:
        assert read(module) < 1e-5
    except ValueError as error:
        refusal = str(error)
    about = (name, "sizes and biases", "num_heads", "features")
    assert not refusal or any(x in refusal for x in about), refusal
