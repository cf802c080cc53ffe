"""Edge cases of masks: rules with one answer for all pairs, and pictures at other positions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, dot_product_attention
from flax_mha.masks import Causal, Predicate, Window


@pytest.mark.sampled(0.078, slow=0.2)
@pytest.mark.parametrize("answer", [True, np.bool_(False)], ids=repr)
def test_predicate_may_return_one_bool_for_all_pairs(answer: bool) -> None:
    """Alone, negated and combined, in every place that takes a mask."""
    q, rule = jnp.ones((1, 3, 2, 4)), Predicate(lambda *_: answer)
    table = jnp.full((3, 3), bool(answer))
    for mask, same in ((rule, table), (~rule, ~table), (rule & Causal(), jnp.tril(table))):
        for kernel in ("reference", "blockwise"):
            outs = [dot_product_attention(q, q, q, mask=m, kernel=kernel) for m in (mask, same)]
            np.testing.assert_allclose(*outs, rtol=1e-6)
        np.testing.assert_array_equal(mask.dense(3)[0], same)
    layer = MultiHeadAttention(2, attention_fn=nn.dot_product_attention, mask=rule)
    assert jax.eval_shape(layer.init_with_output, jax.random.key(0), q[0])[0].shape == (3, 2, 4)


def test_show_and_dense_take_positions() -> None:
    """Bottom-right causality, and a step of a ring cache with positions for each row."""
    lines = Causal().show(2, 4, q_positions=2).split("\n")
    assert lines[:2] == ["███·", "████"]
    lines = Causal().show(2, 4, kv_positions=np.array([0, 9, 1, 0])).split("\n")
    assert lines[:2] == ["█··█", "█·██"]
    at = np.array([[5], [2]])
    table = Window(2, 0).dense(1, 4, (2,), q_positions=at, kv_positions=[4, 1, 2, 3])
    distance = at[:, None, :, None] - np.array([4, 1, 2, 3])
    np.testing.assert_array_equal(table, (distance >= 0) & (distance <= 2))
