"""The names that the classes with Flax's names keep through 1.x: fields, defaults, arguments."""

import inspect
from typing import Any

import jax.numpy as jnp
import pytest

import flax_mha
from flax_mha import MultiHeadDotProductAttention, SelfAttention
from flax_mha.signatures.attention_fn import attention_fn
from tests.layer.test_fields import THEIRS

# Only new names may be added. Initializers are left out: those are compared with Flax's values.
SHARED = {
    "qkv_features": None, "out_features": None, "dtype": None, "param_dtype": jnp.float32,
    "precision": None, "dropout_rate": 0.0, "broadcast_dropout": True, "deterministic": None,
    "use_bias": True, "attention_fn": attention_fn, "normalize_qk": False,
    "force_fp32_for_softmax": False, "num_kv_heads": None, "head_dim": None, "v_head_dim": None,
    "project_out": True, "kernel": "auto", "mask": None, "scores": (), "scale": None,
    "sinks": False, "rotary": None, "qk_norm": None, "gate": None, "normalizer": "softmax",
    "cache": None, "capture": None, "out_kernel_init": None, "out_bias_init": None,
}  # fmt: skip
INITIALIZERS = ("kernel_init", "bias_init")
LINEN = SHARED | {"decode": False, "partitioned": False}
NNX = SHARED | {"in_kv_features": None, "decode": False, "keep_rngs": True}
OF_CALL = ("mask", "bias", "scores", "positions", "head_mask", "lengths", "order", "kv",
           "deterministic", "sow_weights")  # fmt: skip
INPUTS = ("inputs_q", "inputs_k", "inputs_v")
CLASSES: dict[Any, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    MultiHeadDotProductAttention: (
        LINEN, INPUTS, (*OF_CALL, "dropout_rng", "return_weights", "return_kv")
    ),
    SelfAttention: (
        LINEN, ("inputs_q", "mask", "deterministic", "dropout_rng"), ("sow_weights",)
    ),
    flax_mha.nnx.MultiHeadAttention: (
        NNX, INPUTS, (*OF_CALL, "rngs", "decode", "is_causal", "input_positions",
              "return_weights", "return_kv")
    ),
}  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES)
def test_fields_and_arguments_keep_names_and_defaults(cls: Any) -> None:
    """And the order of those that may be given by position."""
    fields = inspect.signature(cls.__init__).parameters
    promised, in_order, named = CLASSES[cls]
    assert {name: fields[name].default for name in promised} == promised
    assert {*INITIALIZERS} <= fields.keys()
    required = [n for n, p in fields.items() if p.default is p.empty
                and n not in ("self", "rngs", "fields")]  # fmt: skip
    assert required == ["num_heads", "in_features"][: 2 if "in_kv_features" in promised else 1]
    arguments = [*inspect.signature(cls.__call__).parameters][1:]
    assert tuple(arguments[: len(in_order)]) == in_order
    assert {*named} <= {*arguments}


@pytest.mark.parametrize(("theirs", "ours"), THEIRS)
def test_fields_of_flax_have_its_defaults(theirs: Any, ours: Any) -> None:
    """Initializers have tests of their values."""
    given = inspect.signature(theirs.__init__).parameters
    mine = inspect.signature(ours.__init__).parameters
    others = ("attention_fn", *INITIALIZERS)
    names = [n for n, p in given.items() if p.default not in (None, p.empty) and n not in others]
    shared = [name for name in names if name in mine]
    assert len(shared) >= 7
    assert all(mine[name].default == given[name].default for name in shared)
