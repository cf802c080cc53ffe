"""The schedules of Pallas kernels for TPUs, as libtpu prints them: bundles of tiles, and spills.

libtpu schedules a kernel as bundles of instructions, one for each cycle if nothing waits for
memory. A kernel loops over the steps of its grid. Branches skip the parts that a step leaves out.
"""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

# The flags that make libtpu write the schedules, when it is loaded, into a folder.
FLAGS = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=final_bundles"
)
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) [ \w,]*: [> ]*\{", re.MULTILINE)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")
# A branch takes effect behind four more bundles.
_DELAY = 5


class TileCost(NamedTuple):
    """The cost of a tile in a kernel's schedule.

    Attributes:
      bundles: the bundles.
      rows: the rows that go through matrix units.
      spills: the registers that are stored because too few are left.
    """

    bundles: int
    rows: int
    spills: int


def tiles(schedule: str) -> list[TileCost]:
    """Return the costs of a kernel's tiles, in its order, from the text of its schedule.

    A tile is a part that a branch skips, that multiplies matrices, and that has no such part in it.
    A kernel without branches is one tile.
    """
    starts = [found.start() for found in _BUNDLE.finditer(schedule)]
    bundles = [schedule[a:b] for a, b in itertools.pairwise([*starts, len(schedule)])]
    regions = {name: n for n, bundle in enumerate(bundles) for name in _REGION.findall(bundle)}
    # The region behind the last bundle has no start.
    branches = [
        (n, regions.get(name, len(bundles)))
        for n, bundle in enumerate(bundles) for name in _BRANCH.findall(bundle)
    ]  # fmt: skip
    parts = [(a, b) for a, b in branches if "vmatmul" in "".join(bundles[a + _DELAY : b])]
    if bundles and not branches:
        return [_cost(bundles)]
    inner = [(a, b) for a, b in parts if not any(a < c and d <= b for c, d in parts)]
    if any(a < n < b and to <= n for a, b in inner for n, to in branches):
        raise ValueError("a tile of the schedule has a loop of unknown steps")
    return [_cost(bundles[a + _DELAY : b]) for a, b in inner]


def _cost(bundles: Sequence[str]) -> TileCost:
    text = "".join(bundles)
    # A register holds 8 rows in float32, and 16 in bfloat16.
    products = re.findall(r"vmatmul\.(?:mubr\.)?(?:msk\.)?(\w+)", text)
    rows = sum(8 if dtype == "f32" else 16 for dtype in products)
    return TileCost(len(bundles), rows, len(re.findall(r"vst \[vmem:\[#\w+_spill\]", text)))
