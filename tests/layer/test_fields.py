"""The fields of a layer: shown by its signature, and checked once for equal values."""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_mha
from flax_mha import CacheConfig, MultiHeadAttention, QKNorm, SelfAttention, masks, nnx, variants
from flax_mha.positions import Rotary

ROOT = Path(flax_mha.__file__).parent
X = np.ones((2, 4, 8), np.float32)
VARIANTS = [name for name in vars(variants) if name.endswith("Attention")]
CHECKS = {
    "check_fields", "fields", "function", "has_bias", "head_sizes", "out_table",
    "score_table", "table",
}  # fmt: skip


def called(function: Callable[[], Any]) -> set[str]:
    """Names of the functions of ours that a call calls."""
    names: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            names.add(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize(
    "layer",
    [
        MultiHeadAttention(2, dropout_rate=0.11),
        MultiHeadAttention(
            4, num_kv_heads=2, rotary=Rotary(), qk_norm=QKNorm(), gate="head", sinks=True,
            scale="learned", mask=masks.Causal(), use_bias=("query", "out"),
        ),
        MultiHeadAttention(2, decode=True, cache=CacheConfig(slots=4), mask=masks.Window(2, 0)),
        variants.MultiHeadLatentAttention(2, kv_rank=6, rope_dim=2, rotary=Rotary()),
    ],
    ids=["plain", "options", "decode", "latent"],
)  # fmt: skip
def test_a_second_call_checks_no_fields(layer: MultiHeadAttention) -> None:
    key = jax.random.key(0)

    def call(layer: MultiHeadAttention) -> None:
        jax.eval_shape(lambda: layer.init(key, X, deterministic=True))

    first, second = (called(lambda: call(layer.clone())) for _ in range(2))
    assert {"check_fields", "fields", "table"} <= first
    assert not second & CHECKS


def test_other_values_are_checked() -> None:
    variables = MultiHeadAttention(1).init(jax.random.key(0), X)
    for layer, message in (
        (MultiHeadAttention(True), "num_heads must be an int, got True"),
        (MultiHeadAttention(1, use_bias=1), "use_bias must be True or False, got 1"),
        (MultiHeadAttention(1, dropout_rate=1.5), "dropout_rate must be in"),
    ):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=message):
                layer.apply(variables, X)


@pytest.mark.sampled(0.13, slow=0.2)
def test_fields_that_have_no_hash_are_read_in_each_call() -> None:
    mask = masks.Keys(jnp.array([[True, False, True, True]] * 2))
    layer, other = (
        MultiHeadAttention(2, mask=mask),
        MultiHeadAttention(2, mask=masks.Keys(~mask.real)),
    )
    variables = layer.init(jax.random.key(0), X)
    x = jnp.asarray(np.random.default_rng(0).normal(size=X.shape), jnp.float32)
    assert np.abs(layer.apply(variables, x) - other.apply(variables, x)).max() > 1e-3


@pytest.mark.parametrize("name", ["MultiHeadAttention", *VARIANTS])
def test_signatures_show_the_fields(name: str) -> None:
    linen = MultiHeadAttention if name == "MultiHeadAttention" else getattr(variants, name)
    for cls in (linen, getattr(nnx, name)):
        _, *parameters = inspect.signature(cls.__init__).parameters.values()
        names = [parameter.name for parameter in parameters]
        assert names[0] == "num_heads"
        assert {"qkv_features", "mask", "sinks", "dropout_rate"} <= {*names}
        others = [x.name for x in parameters if x.kind is inspect.Parameter.VAR_KEYWORD]
        assert others == ([] if cls is linen else ["fields"])  # Those of the variant.


def test_fields_are_shown_in_the_order_of_their_use() -> None:
    parameters = inspect.signature(MultiHeadAttention).parameters
    first = "num_heads qkv_features out_features num_kv_heads head_dim v_head_dim mask rotary"
    assert [*parameters][:8] == first.split()
    assert "kernel: str = 'auto'" in str(inspect.signature(MultiHeadAttention))
    shown = re.findall(r"^    (\w+) = ", repr(MultiHeadAttention(8)), re.MULTILINE)
    refused = {name for name, parameter in parameters.items() if parameter.annotation is None}
    assert shown == [name for name in parameters if name not in {"parent", "name", *refused}]
    described = re.findall(r"^  (\w+): ", inspect.getdoc(MultiHeadAttention) or "", re.MULTILINE)
    assert described == shown
    with pytest.raises(TypeError, match="positional"):
        MultiHeadAttention(8, jnp.float32)  # dtype is Flax's second field.


@pytest.mark.parametrize("cls", [MultiHeadAttention, SelfAttention, nnx.MultiHeadAttention])
def test_unknown_names_are_refused(cls: Any) -> None:
    rngs = {"in_features": 8, "rngs": flax.nnx.Rngs(0)} if cls is nnx.MultiHeadAttention else {}
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_head'"):
        cls(2, num_head=2, **rngs)


@pytest.mark.parametrize("cls", [MultiHeadAttention, nnx.MultiHeadAttention])
def test_each_argument_is_described(cls: Any) -> None:
    """Arguments that nnx shares with linen are described there, and it says so."""
    for get in (lambda cls: cls, lambda cls: cls.__call__):
        doc, linen = (inspect.getdoc(get(x)) or "" for x in (cls, MultiHeadAttention))
        refers = f"`flax_mha.MultiHeadAttention{'' if get(cls) is cls else '.__call__'}`" in doc
        method = cls.__init__ if get(cls) is cls else get(cls)
        parameters = inspect.signature(method).parameters
        names = {name for name, parameter in parameters.items() if parameter.annotation is not None}
        names -= {"self", "parent", "name"}
        described = f"{doc}\n{linen}" if refers else doc
        assert not {x for x in names if not re.search(rf"\n  (\*\*)?{x}: ", described)}


THEIRS = (
    (flax.linen.MultiHeadDotProductAttention, flax_mha.MultiHeadDotProductAttention),
    (flax.linen.SelfAttention, SelfAttention),
    (flax.nnx.MultiHeadAttention, nnx.MultiHeadAttention),
)


def made(cls: Any, *args: Any, **fields: Any) -> Any:
    """Return a layer of linen or nnx with 2 heads, on inputs of 8 features."""
    if issubclass(cls, flax.nnx.Module):
        return cls(2, 8, *args, rngs=flax.nnx.Rngs(0), **fields)
    return cls(2, *args, **fields)


def result(layer: Any, **call: Any) -> jax.Array:
    if isinstance(layer, flax.nnx.Module):
        return layer(X, **call)
    return layer.init_with_output(jax.random.key(0), X, **call)[0]


@pytest.mark.parametrize(("theirs", "ours"), THEIRS)
def test_each_none_of_flax_is_taken_and_other_values_are_refused(theirs: Any, ours: Any) -> None:
    of_class, of_call = (
        [p for p in inspect.signature(x).parameters.values() if p.name not in ("self", "parent")]
        for x in (theirs.__init__, theirs.__call__)
    )
    # Flax 0.12.8 has not all.
    call = {p.name: None for p in of_call if p.default is None} | {"input_positions": None}
    layer = made(ours, **{p.name: None for p in of_class if p.default is None})
    assert result(layer, **call).shape == X.shape
    alone = [p.name for p in of_class if p.name.endswith(("_general", "_cls", "_promote_dtype"))]
    for name in alone:
        with pytest.raises(TypeError, match=f"{ours.__name__} takes only {name}=None, got .*; "):
            result(made(ours, **{name: jax.lax.dot_general}))
    of_linen = () if ours is nnx.MultiHeadAttention else ("input_positions",)
    for name in ("inputs_kv", "out_sharding", "qkv_sharding", *of_linen):
        with pytest.raises(TypeError, match=f"takes only {name}=None, got ndarray; "):
            result(layer, **{name: X})
    assert len(alone) >= 6


@pytest.mark.parametrize("cls", [MultiHeadAttention, SelfAttention, variants.TalkingHeadsAttention])
def test_a_subclass_may_give_fields_other_defaults(cls: Any) -> None:
    class Half(cls):
        dtype: Any = jnp.bfloat16
        use_bias: bool = False

    class Two(Half):
        num_heads: int = 2
        extra: int = 3

    assert result(Half(2)).dtype == result(Two()).dtype == jnp.bfloat16
    assert (Half(4).num_heads, Two(4).num_heads, Two(dtype=X.dtype).dtype) == (4, 4, X.dtype)
    assert not Two().use_bias


@pytest.mark.parametrize("cls", [nnx.MultiHeadAttention, nnx.TalkingHeadsAttention])
def test_a_subclass_in_nnx_may_give_fields_other_defaults(cls: Any) -> None:
    class Half(cls):
        def __init__(self, *sizes: int, **fields: Any) -> None:
            super().__init__(*sizes, **{"dtype": jnp.bfloat16, "num_kv_heads": 1} | fields)

    layer = made(Half, 4)
    assert result(layer).dtype == jnp.bfloat16
    assert (layer.qkv_features, layer.num_kv_heads) == (4, 1)
    with pytest.raises(TypeError, match="takes only qkv_dot_general=None"):
        made(Half, qkv_dot_general=jax.lax.dot_general)


@pytest.mark.parametrize(("theirs", "ours"), THEIRS)
def test_a_subclass_may_call_attention_fn(theirs: Any, ours: Any) -> None:
    q = np.random.default_rng(0).normal(size=(2, 4, 2, 4)).astype(np.float32)
    layer = made(ours)
    out = layer.attention_fn(q, q, q, mask=np.tri(4, dtype=bool)[None, None])
    want = made(theirs).attention_fn(q, q, q, mask=np.tri(4, dtype=bool)[None, None])
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    # The kernels take what a function cannot.
    assert result(made(ours, sinks=True, attention_fn=flax_mha.attention_fn)).shape == X.shape
    assert result(made(ours, sinks=True, attention_fn=None)).shape == X.shape


def test_a_call_traces_no_initializer_of_a_parameter_that_is_there() -> None:
    calls: list[Any] = []

    def init(*args: Any) -> jax.Array:
        calls.append(args)
        return jnp.ones(*args[1:])

    layer = MultiHeadAttention(2, kernel_init=init, bias_init=init)
    variables = layer.init(jax.random.key(0), X)
    made = len(calls)
    assert made == 8
    layer.apply(variables, X)
    assert len(calls) == made


def test_input_positions_are_positions() -> None:
    layer = nnx.MultiHeadAttention(2, 8, rotary=Rotary(), rngs=flax.nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=X.shape), jnp.float32)
    at = jnp.array([[3, 4, 5, 9], [0, 2, 4, 6]])
    out = layer(x, input_positions=at)
    np.testing.assert_array_equal(out, layer(x, positions=at))
    with pytest.raises(ValueError, match="got both; give only positions"):
        layer(x, positions=at, input_positions=at)
