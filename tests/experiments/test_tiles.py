"""`measure tiles`: a recorded schedule with known counts, the table, and a real compilation."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.counts import schedule
from experiments.counts.schedule import TileCost
from experiments.measure import __main__ as measure
from experiments.measure import tiles
from experiments.runs.failures import RunError

ROOT = Path(__file__).parent.parent.parent
# Shortened from kernels for v5e and v5p: a kernel and a step that can be skipped as a whole, its
# beginning without a matmul, and two tiles. The second one has a part of its own without a matmul.
RECORDED = """
= control target key start
PB: predicated region body
= control target key end

     0   :  { %s1 = smov.u32 0 /* copy */  ;;  %7 = sbr.rel (%p0) target = $region4 } /* Start region 0 */
   0x1 LB: > { %p1 = scmp.ge.s32.totalorder %s9, 4 }
   0x2   : > { %8 = sbr.rel (%p1) target = $region40  ;;  %p2 = scmp.eq.s32.totalorder %s9, 0 }
   0x3   : > { %s2 = sld [smem:[#allocation11 + %s9]] (!%p1) }
   0x4   :  {}
   0x5   :  {}
   0x6   : > { %9 = sbr.rel (!%p2) target = $region44 }
   0x7   : > { %10 = vst [vmem:[#allocation6] sm:$0xff] (%p2), /*vst_source=*/%v1 } /* Start region 43 */
   0x8   :  {}
   0x9   :  {}
   0xa   :  {}
   0xb PF: > { %p3 = scmp.ne.s32.totalorder %s9, 2 } /* Start/End empty region 44 :: Start region 45 */
   0xc   : > { %11 = sbr.rel (%p3) target = $region48 }
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
  0x10   :  {} /* End region 46 */
  0x11   : > { %12 = vmatmul.bf16.vlgmr.msra.gmra.mxu0 %v1  ;;  %13 = vmatmul.msk.bf16.gmra.mxu1 %vm1, %v2 }
  0x12   : > { %14 = vst [vmem:[#allocation153_spill] sm:$0xff] /*vst_source=*/%v3
             ;;  %15 = vmatmul.f32.gmra.mxu2 %v4 }
  0x13   : > { %16 = vst [vmem:[#allocation5] sm:$0xff] /*vst_source=*/%v3 } /* End region 47 */
  0x14 PF: > { %p4 = scmp.ne.s32.totalorder %s9, 1 } /* Start/End empty region 48 */
  0x15   : > { %17 = sbr.rel (%p4) target = $region52 }
  0x16   :  {}
  0x17   :  {}
  0x18   :  {}
  0x19   :  {}
  0x1a   : > { %18 = vmatmul.mubr.bf16.gmra.mxu0 %v1  ;;  %19 = vmatprep.mubr.bf16.mxu0 %v2 }
  0x1b   : > { %20 = sbr.rel (%p5) target = $region50 }
  0x1c   :  {}
  0x1d   :  {}
  0x1e   :  {}
  0x1f   :  {}
  0x20   : > { %21 = vst [vmem:[#allocation7_spill] sm:$0xff] (%p5), /*vst_source=*/%v3 }
  0x21 PF: > { %22 = vst [vmem:[#allocation8_spill] sm:$0xff] /*vst_source=*/%v3 } /* Start/End empty region 50 */
  0x22 PF: > { %s9 = sadd.s32 1, %s9 } /* Start/End empty region 40 :: Start/End empty region 52 */
  0x23   : > { %23 = sbr.rel (!%p6) target = $region0 }
  0x24   :  {}
"""  # noqa: E501
FULL, PARTIAL = TileCost(3, 16 + 16 + 8, 1), TileCost(8, 16, 2)


def test_tiles_of_a_schedule_are_counted() -> None:
    assert schedule.tiles(RECORDED) == [FULL, PARTIAL]
    assert schedule.tiles("") == []
    # A kernel of one step has no branches.
    assert schedule.tiles("   0x1   :  {}\n   0x2   :  { vmatmul.f32.gmra.mxu2 %v4 }") == [
        TileCost(2, 8, 0)
    ]


def test_loop_in_a_tile_is_refused() -> None:
    looped = RECORDED.replace("(%p5) target = $region50", "(%p5) target = $region48")
    with pytest.raises(ValueError, match="a loop of unknown steps"):
        schedule.tiles(looped)


def test_table_compares_with_512() -> None:
    def rows(chip: str, size: int, *costs: TileCost) -> dict:
        return tiles._row("flex_forward", (size, size), "full", costs, chip)

    # The larger of bundles and rows / 4.
    usual, large = TileCost(1100, 4096, 0), TileCost(4000, 16384, 7)
    given = [rows("v5e", 512, usual), rows("v5e", 1024, large),
             {"kernel": "flex", "block": (2048, 512), "error": "too large"},
             {"kernel": "short", "block": (512, 512),
              "error": "kernel='short' can't run this call: it has no room; …"}]  # fmt: skip
    lines = tiles.page("v5e", given).splitlines()
    assert lines[2:] == [
        "| `flex_forward` | 512² | full | 1,100 | 1,024 | 0 | 4.30 | 1.000 |",
        "| `flex_forward` | 1024² | full | 4,000 | 4,096 | 7 | 4.00 | 0.931 |",
        "| `flex` | 2048 × 512 | does not compile | | | | | |",
        "| `short` | 512² | refused | | | | | |",
    ]
    # Other chips have no rate of rows, and sums add the larger numbers of each kernel.
    assert tiles._row("", (512, 512), "full", [usual, large], "v6e")["cycles"] == 5100
    assert tiles._row("", (512, 512), "full", [usual, large], "v5e")["cycles"] == 1100 + 4096


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--kernels=flex,flox"], "--kernels: must be some of flex,splash,short, got 'flox'"),
        (["--blocks=512,x"], "--blocks must be sizes such as 512,512x1024, .*, got 'x'"),
        (["--blocks=512x200"], "multiples of 128 .*, got '512x200'"),
        (["--blocks=512", "--length=512"], "at most half of --length=512, got '512'"),
        (["--chip=h200"], "invalid choice: 'h200'"),
    ],
)
def test_wrong_flags_of_tiles_are_named(flags: list[str], error: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=error):
        measure.main(["tiles", f"--workdir={tmp_path / 'new'}", *flags])


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu")
def test_tiles_of_all_kernels_are_compiled(tmp_path: Path) -> None:
    # In a process of its own, because libtpu reads its flags when it is loaded.
    folder = tmp_path / "new"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.measure", "tiles", "--blocks=256,512x256",
         "--length=1024", f"--workdir={folder}"],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / "results.json").read_text())["rows"]
    found = {(row["kernel"], *row["block"], row["tile"]): row for row in rows}
    kernels = ("flex_forward", "flex_backward", "flex, all")
    expected = {
        (name, bq, 256, kind)
        for name in kernels for bq in (256, 512) for kind in ("full", "partial")
    }  # fmt: skip
    splash = "splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv", "splash, all"
    short = "short_forward", "short_backward", "short, all"
    assert {*found} == expected | {(name, 512, 512, "both") for name in (*splash, *short)}
    # A head of 512 keys. The guard against NaN adds a few rows.
    for name, products in zip(short, (2, 6, 8), strict=True):
        assert found[name, 512, 512, "both"]["rows"] == pytest.approx(products * 512 * 4, rel=0.01)
    # Forward has two products, of 128 features by 256 keys, and backward five.
    for name, products in zip(kernels, (2, 5, 7), strict=True):
        for bq in (256, 512):
            for kind in ("full", "partial"):
                assert found[name, bq, 256, kind]["rows"] == products * bq * 2
    full, partial = (found["flex, all", 512, 256, kind] for kind in ("full", "partial"))
    assert full["rows"] / 4 <= full["cycles"] < partial["cycles"] < full["rows"]
    assert (folder / "table.md").read_text() in done.stdout
