"""The collectives of a compiled program."""

import math
import re
from typing import NamedTuple

import numpy as np

from experiments.common.counts.hlo import Instruction, Module, arrays, parts

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
      kind: one of KINDS.
      bytes: the size of its result on one device. For a ragged all-to-all, the rows there before or
        after it, whichever are fewer.
      times: the number of times that it runs.
      groups: the devices that take part together, as indices into the mesh, [groups, size]. For a
        permutation the pairs of sender and receiver.
    """

    kind: str
    bytes: int
    times: int
    groups: np.ndarray

    @property
    def sent(self) -> float:
        """The minimum bytes that each device sends, each time, for g devices in a group.

        | kind | bytes for a result of b bytes |
        |---|---|
        | all-reduce | 2·b·(g − 1)/g |
        | all-gather, all-to-all | b·(g − 1)/g |
        | reduce-scatter | b·(g − 1) |
        | collective-permute, collective-broadcast | b |

        Source: Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005.
        """
        g = self.groups.shape[1]
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        each = {"all-reduce": 2 / g, "reduce-scatter": 1.0}.get(self.kind, 1 / g)
        return self.bytes * (g - 1) * each

    def across(self, domains: np.ndarray) -> float:
        """Return the bytes that each device sends to other domains, such as machines or slices.

        In a group over n domains with g devices each, a sum is first taken within the domains, and
        then each device sends 1/g of its result. In an all-to-all, only the part for other domains
        crosses.

        Args:
          domains: the domain of each device of the mesh, in its order.
        """
        if self.kind == "collective-permute":
            pairs = domains[self.groups]
            return float(self.bytes * (pairs[:, 0] != pairs[:, 1]).any())
        members = domains[self.groups[0]]
        n = len(set(members))
        each = 1 if self.kind.endswith("all-to-all") else len(members) / n
        return self.sent * (1 - 1 / n) / (1 - 1 / len(members)) / each


def read(program: str | Module, devices: int, slices: int = 1) -> list[Collective]:
    """Return the collectives of a program, in the order of its text.

    For several slices, the TPU compiler writes the program of one. It sends to other slices by
    pairs of `send` and `recv`, whose attributes have the kind.

    Args:
      program: the program, or its text.
      devices: the number of devices that it runs on, of all slices.
      slices: the number of slices.
    """
    module = Module(program) if isinstance(program, str) else program
    found, own = [], devices // slices
    for x, computation, times, _ in module.runs():
        kind = x.opcode.removesuffix("-start")
        if kind == "recv" and (name := re.search(r'_xla_megascale_transfer_type="(\w+)"', x.rest)):
            size = arrays(x.type)[0].bytes
            kind = "collective-permute" if "->" in x.rest else name[1].lower().replace("_", "-")
            found.append(Collective(kind, size, times, _slice_groups(x.rest, own)))
        elif kind in KINDS and not _is_later_part(module, computation):
            size = _result(x)
            if computation.startswith("all-reduce-scatter"):
                # The TPU compiler writes a reduce-scatter as a fusion with this name: an all-reduce
                # after which each device keeps its part.
                kind = "reduce-scatter"
                size = sum(array.bytes for array in arrays(module.root(computation).type))
            groups = _groups(x.rest, own)
            if groups.shape[1] > 1:
                found.append(Collective(kind, size, times, groups))
    return found


def _is_later_part(module: Module, computation: str) -> bool:
    """Return True in the later fusions of a collective that the TPU compiler split.

    To overlap a collective with other work, fusions begin it, continue it and end it. Each of them
    contains the collective.
    """
    return computation.startswith("async_collective_fusion") or any(
        "AsyncCollectiveDone" in x.rest for x in module.computations[computation]
    )


def _result(x: Instruction) -> int:
    type_ = x.type
    if x.opcode == "ragged-all-to-all-start":
        # Of the first two arrays, one holds a device's own rows, and the other has room for all.
        return min(array.bytes for array in arrays(parts(type_)[0])[:2])
    if x.opcode in ("all-gather-start", "collective-permute-start"):
        type_ = parts(type_)[1]  # The first part holds the operands.
    return sum(array.bytes for array in arrays(type_))


def _groups(rest: str, devices: int) -> np.ndarray:
    """Parse the groups, in any of XLA's forms.

    | form | example |
    |---|---|
    | lists | `{{0,1},{2,3}}`, or `{}` for all |
    | pairs of a permutation | `source_target_pairs={{0,1},{1,0}}` |
    | a reshaped and transposed count | `[2,2]<=[2,2]T(1,0)` |
    | axes of a mesh | `mesh['a'=2,'b'=2] {'b'}` |
    | part of an axis, 2 after 4 | `mesh['a'=8] {'a':(4)2}` |
    | devices in another order | `mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}` |
    """
    if lists := re.search(r"(?:source_target_pairs|replica_groups)=\{([\d,{} ]*)\}", rest):
        return _lists(lists[1]) if lists[1] else np.arange(devices)[None]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", rest):
        return _order(iota[2]).reshape(_numbers(iota[1]))
    if mesh := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", rest
    ):
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        order = _order(mesh[2]) if mesh[2] else np.arange(math.prod(axes.values()))
        # Of an axis that is reshaped to [m, k, ·], the groups go along the second part.
        split = {name: (1, size, 1) for name, size in axes.items()}
        along = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", mesh[3])
        for name, m, k in along:
            if m:
                split[name] = int(m), int(k), axes[name] // (int(m) * int(k))
        inner = [3 * [*axes].index(name) + 1 for name, *_ in along]
        outer = [i for i in range(3 * len(axes)) if i not in inner]
        sizes = [size for parts in split.values() for size in parts]
        count = math.prod(sizes[i] for i in inner)
        return order.reshape(sizes).transpose(*outer, *inner).reshape(-1, count)
    raise ValueError(f"can't read the groups of a collective: {rest[:200]}")


def _slice_groups(rest: str, devices: int) -> np.ndarray:
    """Parse the groups of a transfer between slices, as indices into the mesh.

    | form | example |
    |---|---|
    | slices, from 1, and a range of devices of each | `"{1,2}x{0:15}"` |
    | lists, or pairs, of slice · 100,000 + device | `{{100000,200000}}`, `{{100000->200000}}` |
    """
    if grid := re.search(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"', rest):
        first = np.arange(int(grid[2]), int(grid[3]) + 1)[:, None]
        return first + devices * (np.array(_numbers(grid[1])) - 1)
    if lists := re.search(r"_xla_megascale_target=\{([\d,{}> -]*)\}", rest):
        found = _lists(lists[1].replace("->", ","))
        return found // 100_000 * devices - devices + found % 100_000
    raise ValueError(f"can't read the slices of a transfer: {rest[:300]}")


def _order(text: str) -> np.ndarray:
    """Parse `[2,2]T(1,0)` (a count, reshaped and transposed), or a list of numbers."""
    if iota := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        sizes = _numbers(iota[1])
        order = _numbers(iota[2]) if iota[2] else range(len(sizes))
        return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1)
    return np.array(_numbers(text))


def _lists(text: str) -> np.ndarray:
    return np.array([_numbers(inner) for inner in re.findall(r"\{([\d, ]+)\}", text)])


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
