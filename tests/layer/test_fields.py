"""The fields of a layer, those of Flax that are refused, and subclasses with other defaults."""

import inspect
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_mha
from flax_mha import MultiHeadAttention, QKNorm, SelfAttention, masks, nnx, variants
from flax_mha.positions import Rotary
from tests.layer.test_flax_parity import normal
from tests.support.oracle import random_like

X = np.ones((2, 4, 8), np.float32)


def test_other_values_are_checked() -> None:
    """Also if an equal layer was checked before."""
    for layer, message in (
        (MultiHeadAttention(True), "num_heads must be an int, got True"),
        (MultiHeadAttention(1, use_bias=1), "use_bias must be True or False, got 1"),
        (MultiHeadAttention(1, dropout_rate=1.5), "dropout_rate must be in"),
        (MultiHeadAttention(4, gate="heads"), r"gate must be one of \['feature', 'head'\], got"),
        (
            MultiHeadAttention(4, qk_norm=QKNorm(), normalize_qk=True),
            r"normalize_qk=True is qk_norm=QKNorm\('layernorm'\), got both",
        ),
    ):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=message):
                jax.eval_shape(layer.init, jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"kind must be one of \['layernorm', 'rmsnorm'\], got"):
        QKNorm("rms")


def test_fields_that_have_no_hash_are_read_in_each_call() -> None:
    real = np.array([[True, False, True, True]] * 2)
    layer, other = (MultiHeadAttention(2, mask=masks.Keys(jnp.asarray(x))) for x in (real, ~real))
    variables = random_like(jax.eval_shape(layer.init, jax.random.key(0), X))
    one, two = jax.jit(lambda x: [m.apply(variables, x) for m in (layer, other)])(normal(*X.shape))
    assert np.abs(one - two).max() > 1e-3


def test_fields_after_the_first_are_named() -> None:
    """Unknown names are refused, and a layer shows its fields."""
    with pytest.raises(TypeError, match="positional"):
        MultiHeadAttention(8, jnp.float32)  # dtype is Flax's second field.
    for cls in (MultiHeadAttention, SelfAttention, nnx.MultiHeadAttention):
        with pytest.raises(TypeError, match="unexpected keyword argument 'num_head'"):
            made(cls, num_head=2)
    assert "num_kv_heads = 4" in repr(MultiHeadAttention(8, num_kv_heads=4))


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


def result(layer: Any, **call: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a call's output."""
    if isinstance(layer, flax.nnx.Module):
        return flax.nnx.eval_shape(lambda layer: layer(X, **call), layer)
    key = jax.random.key(0)
    return jax.eval_shape(lambda: layer.init_with_output(key, X, **call)[0])


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


def test_input_positions_are_positions() -> None:
    layer = nnx.MultiHeadAttention(2, 8, rotary=Rotary(), rngs=flax.nnx.Rngs(0))
    at = np.array([[3, 4, 5, 9], [0, 2, 4, 6]])
    call = flax.nnx.jit(lambda layer, **call: layer(normal(*X.shape), **call))
    np.testing.assert_array_equal(call(layer, input_positions=at), call(layer, positions=at))
    with pytest.raises(ValueError, match="got both; give only positions"):
        call(layer, positions=at, input_positions=at)
