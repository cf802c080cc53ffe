"""`measure compiled` and `timed`: the bytes of small programs by hand, and their tables."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.common.counts import traffic
from experiments.common.counts.hlo import Module
from experiments.measure import __main__ as measure
from experiments.measure.timing import program


def test_slices_and_updates_count_alone(optimized: None) -> None:
    """One row of 4 KiB is read from each of two buffers, and written to one."""

    def run(x: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
        return x.at[i].set(jax.lax.dynamic_index_in_dim(y, i, keepdims=False))

    x = jnp.ones((1024, 1024))
    text = jax.jit(run, donate_argnums=0).lower(x, x, 3).compile().as_text()
    assert 2 * 4096 <= traffic.moved(Module(text)) < 4 * 4096


@pytest.mark.parametrize(
    ("line", "bytes"),
    [
        ("f32[1024]{0} add(%x, %x)", 2 * 4096), ("f32[1024]{0} add(%x, %y)", 2 * 4096),
        # To the chip, and a quarter to the chip, where y is.
        ("(f32[1024]{0:S(1)}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%x)", 4096),
        ("((f32[1024]{0}), f32[256]{0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:256]}", 1024),
        # Features in the lanes are padded to 128 of them.
        ("f32[8,64]{1,0:T(8,128)} broadcast(%x)", 2 * 4096),
        ("f32[64,8]{0,1:T(8,128)} broadcast(%x)", 2 * 4096),
        ("bf16[64,128]{0,1:T(8,128)(2,1)} broadcast(%x)", 4096 + 2 * 128 * 128),
    ],
)  # fmt: skip
def test_bytes_of_an_instruction(line: str, bytes: int) -> None:
    text = f"""
ENTRY %main (x: f32[1024], y: f32[1024]) -> f32[1024] {{
  %x = f32[1024]{{0}} parameter(0)
  %y = f32[1024]{{0:T(1024)S(1)}} parameter(1)
  ROOT %r = {line}
}}
"""
    assert traffic.moved(Module(text)) == bytes


def test_other_tiles_of_a_buffer_are_no_copy() -> None:
    """Inside a fusion, libtpu views a buffer with other tiles by a fusion that copies it."""
    text = """
%tiles (x: s8[64,4096]) -> s8[64,4096] {
  %x = s8[64,4096]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %c = s8[64,4096]{1,0:T(8,128)(4,1)} copy(%x)
}

%update (x: s8[64,4096], i: s32[]) -> s8[64,4096] {
  %x = s8[64,4096]{1,0:T(32,128)(4,1)} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %v = s8[64,4096]{1,0:T(8,128)(4,1)} fusion(%x), kind=kLoop, calls=%tiles
  %s = s8[64,128]{1,0:T(8,128)(4,1)} dynamic-slice(%v, %zero, %i), dynamic_slice_sizes={64,128}
  ROOT %u = s8[64,4096]{1,0:T(32,128)(4,1)} dynamic-update-slice(%v, %s, %zero, %i)
}

ENTRY %main (x: s8[64,4096], i: s32[]) -> s8[64,4096] {
  %x = s8[64,4096]{1,0:T(32,128)(4,1)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %r = s8[64,4096]{1,0:T(32,128)(4,1)} fusion(%x, %i), kind=kLoop, calls=%update
}
"""
    assert 2 * 64 * 128 <= traffic.moved(Module(text)) < 3 * 64 * 128


def test_unusual_branches_count_unless_told() -> None:

    def run(rare: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.cond(rare, jnp.exp, lambda x: x, x)

    text = jax.jit(run).lower(True, jnp.ones(1024)).compile().as_text()
    assert "conditional(" in text
    assert traffic.moved(Module(text)) - traffic.moved(Module(text, usual=True)) == 2 * 4096


def test_scan_moves_each_layer_once(optimized: None) -> None:
    """A step copies its own of the stacked weights, multiplies by it, and copies the result."""
    w, x = jnp.ones((6, 64, 64)), jnp.ones((64, 64))

    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    module = Module(jax.jit(run).lower(w, x).compile().as_text())
    product = 3 * 4 * 64 * 64
    assert 6 * product <= traffic.moved(module) < 6 * 2.5 * product


@pytest.mark.slow
def test_table_of_a_decoding_step(tmp_path: Path) -> None:
    """A step reads parameters and cache once, and hardly anything else."""
    measure.main(["compiled", "--programs=decode-grouped", "--top=2", f"--workdir={tmp_path}"])
    hand, ours = json.loads((tmp_path / "results.json").read_text())["rows"]
    least = (2 * (2 * 16 + 2 * 4) * 2048 * 128 + 2 * 2 * 8 * 4 * 8192 * 128) / 2**20
    for row in (ours, hand):
        assert least <= row["MiB"] < 1.1 * least
        assert row["held"] < 4
    assert ours["Mcycles"] < 1.5 * hand["Mcycles"]
    assert any("/kernel/" in one["source"] for one in ours["top"])
    cells = f"| `decode-grouped` | step | ours | {ours['MiB']:,.0f} | {ours['kernels']} | "
    assert cells in (tmp_path / "table.md").read_text()


def test_a_cache_is_replaced_and_its_positions_stay() -> None:
    def step(cache: Any, x: jax.Array) -> Any:
        k, at = cache["k"] + x, cache["at"]
        return k.sum() + at, {"k": k, "at": at + 1}

    work = program(step, [{"k": jnp.zeros((1, 2, 3)), "at": jnp.array(7)}, jnp.ones(())], True)
    assert [float(work.call()) for _ in range(3)] == [6 + 7, 12 + 7, 18 + 7]
