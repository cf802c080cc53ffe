"""Bits that do not depend on the rest of the batch, and the command that tells where."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.measure import bits
from experiments.measure.__main__ import main
from flax_mha import dot_product_attention, masks


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.integers(2, 5), st.integers(1, 700), st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from(["float32", "bfloat16"]), st.booleans(),
)  # fmt: skip
def test_blockwise_gives_a_row_the_bits_that_it_has_alone(
    B: int, T: int, heads: tuple[int, int], dtype: str, is_causal: bool
) -> None:
    """Output and gradients."""
    N, K = heads
    rng = np.random.default_rng(T)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, 16)), dtype) for n in (N, K, K))

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        mask = masks.Causal() if is_causal else None
        out, pull = jax.vjp(
            lambda *x: dot_product_attention(*x, mask=mask, kernel="blockwise"), q, k, v
        )
        return out, *pull(out)

    last = both(*(x[-1:] for x in (q, k, v)))
    for together, alone in zip(both(q, k, v), last, strict=True):
        np.testing.assert_array_equal(together[-1:], alone)


@pytest.mark.slow
def test_command_prints_each_case(tmp_path: Path, capsys: Any) -> None:
    main(["bits", "--kernels=blockwise", "--dtypes=float32", f"--workdir={tmp_path}"])
    table = (tmp_path / "table.md").read_text()
    assert "| attention, neighbors | equal |" in table
    assert "| layer, alone | equal |" in table
    assert "| layer, step |" in table
    assert table in capsys.readouterr().out


def test_difference_is_told_in_units_of_the_last_place() -> None:
    one = jnp.ones(4)
    assert bits.shown(one, one) == "equal"
    assert bits.shown(one.at[0].add(2**-22), one) == "2"
    assert bits.shown(one.at[0].set(jnp.nan), one.at[0].set(jnp.nan)) == "equal"
