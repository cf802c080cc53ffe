"""Compiled programs as XLA prints them, with the number of runs of each instruction.

A loop's body is in the text once, and runs as often as its trip count: `known_trip_count` if the
compiler kept it (CPU, GPU), or the constant that the loop's condition compares with.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(calls|to_apply|branch_computations|(?:true|false)_computation)=(?:\{([^}]*)\}|%?([^\s,)]+))"
)
_WORD = re.compile(r"%([^\s,(){}]+)")


class Array(NamedTuple):
    """An array in a type: its dtype, its shape, and True if it lies in the chip's main memory."""

    dtype: str
    shape: tuple[int, ...]
    main: bool

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The number of bytes, without the padding of a layout."""
        if self.dtype == "pred":
            return self.size
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return -(-self.size * int(bits[1]) // 8) if bits else 0  # tokens have none


def arrays(type_: str) -> list[Array]:
    """Return the arrays of a type, in order."""
    return [
        Array(dtype, tuple(int(n) for n in sizes.split(",") if n), "S(" not in layout)
        for dtype, sizes, layout in _ARRAY.findall(type_)
    ]


def parts(type_: str) -> list[str]:
    """Return the types in a tuple, one level deep, or the type itself if it is no tuple."""
    if not type_.startswith("("):
        return [type_]
    found, depth, start = [], 0, 1
    for i, letter in enumerate(type_):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            found.append(type_[start:i].strip())
            start = i + 1
    return [part for part in found if part]


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # literals, attributes, metadata
    is_root: bool = False


class Run(NamedTuple):
    """An instruction with its number of runs.

    Attributes:
      instruction: the instruction.
      computation: the computation that contains it.
      times: the number of times it runs in a run of the program.
      fused: True if it is part of a fusion, so that its operands and result touch no memory.
    """

    instruction: Instruction
    computation: str
    times: int
    fused: bool


class Module:
    """A program's computations by name, from `compiled.as_text()` or a dump of the compiler's.

    Attributes:
      computations: instructions by computation.
      entry: the name of the computation that is the program.
      unknown: names of loops of unknown trip count; they count as run once.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry, self.unknown = "", list[str]()
        self._frames = _frames(text)
        here: list[Instruction] = []
        for line in text.splitlines():
            if head := _HEAD.match(line):
                here = self.computations[head[2]] = []
                self.entry = head[2] if head[1] else self.entry
            elif found := _LINE.match(line):
                here.append(_instruction(found[2], found[3])._replace(is_root=bool(found[1])))
        self._types = {
            name: {x.name: x.type for x in lines} for name, lines in self.computations.items()
        }

    def type_of(self, computation: str, name: str) -> str:
        """Return the type of an operand. Newer XLA writes `name#2` for that part of a tuple."""
        whole, *path = name.split("#")
        found = self._types[computation][whole]
        for place in path:
            found = parts(found)[int(place)]
        return found

    def runs(self, usual: bool = False) -> Iterator[Run]:
        """Yield every instruction that the program runs, with its number of runs.

        All branches of a conditional count, although only one of them runs at a time, so that
        counts are upper bounds; or if `usual`, its first branch alone, `lax.cond`'s for False.
        """
        self.unknown.clear()
        yield from self._runs(self.entry, 1, False, usual)

    def source(self, x: Instruction) -> str:
        """Return the file and line of Python that an instruction is from, such as "a/b.py:12"."""
        if found := re.search(r"stack_frame_id=(\d+)", x.rest):
            return self._frames.get(int(found[1]), "")
        found = re.search(r'source_file="([^"]*)" source_line=(\d+)', x.rest)
        return _place(*found.groups()) if found else ""

    def root(self, computation: str) -> Instruction:
        """Return the instruction whose result is a computation's."""
        return next(x for x in self.computations[computation] if x.is_root)

    def _runs(self, name: str, times: int, fused: bool, usual: bool) -> Iterator[Run]:
        for x in self.computations[name]:
            yield Run(x, name, times, fused)
            if x.opcode == "while":
                trips = self._trips(name, x)
                yield from self._runs(_attribute(x.rest, "body"), times * trips, fused, usual)
                continue
            # In reductions and sorts it is the function of two numbers.
            called = [] if x.opcode in _SCALAR else self._called(x)
            for inner in called[:1] if usual and x.opcode == "conditional" else called:
                yield from self._runs(inner, times, fused or "fusion" in x.opcode, usual)

    def _called(self, x: Instruction) -> list[str]:
        """Return the computations that an instruction calls, a conditional's for False first."""
        found = [
            (word.strip(" %"), attribute == "true_computation")
            for attribute, several, one in _CALLED.findall(x.rest)
            for word in (several or one).split(",")
        ]
        found = [pair for pair in found if pair[0] in self.computations]
        return [name for name, _ in sorted(found, key=lambda pair: pair[1])]

    def _trips(self, computation: str, loop: Instruction) -> int:
        if known := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.rest):
            return int(known[1])
        condition = {x.name: x for x in self.computations[_attribute(loop.rest, "condition")]}
        root = [x for x in condition.values() if x.opcode == "compare"]
        limits = [x for x in condition.values() if x.opcode == "constant"]
        start = self._start(computation, loop, condition, root)
        if len(root) == len(limits) == 1 and start is not None and "direction=LT" in root[0].rest:
            return max(0, int(limits[0].rest.split(")")[0]) - start)
        self.unknown.append(loop.name)
        return 1

    def _start(
        self, computation: str, loop: Instruction, condition: dict[str, Instruction],
        root: list[Instruction],
    ) -> int | None:  # fmt: skip
        """Return the counter's initial value: a constant in the tuple that the loop takes."""
        lines = {x.name: x for x in self.computations[computation]}
        places = [_tuple_index(condition, name) for x in root for name in x.operands]
        counters = [place for place in places if place is not None]
        given = lines.get(loop.operands[0])
        if len(counters) != 1 or given is None or given.opcode != "tuple":
            return None
        first = lines.get(given.operands[counters[0]])
        if first is None:
            return None
        while first.opcode in ("copy", "bitcast") and first.operands[0] in lines:
            first = lines[first.operands[0]]
        return int(first.rest.split(")")[0]) if first.opcode == "constant" else None


def _frames(text: str) -> dict[int, str]:
    """Return the innermost place of each stack frame in the tables before the computations."""
    files = {
        int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _table(text, "FileNames"), re.M)
    }
    line = r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"
    places = {
        int(n): _place(files[int(file)], row)
        for n, file, row in re.findall(line, _table(text, "FileLocations"), re.M)
    }
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", _table(text, "StackFrames"), re.M)
    return {int(n): places[int(place)] for n, place in frames}


def _table(text: str, name: str) -> str:
    """Return the lines of a table, up to the next empty line."""
    found = re.search(rf"^{name}\n(.*?)\n\n", text, re.M | re.S)
    return found[1] if found else ""


def _place(file: str, line: str) -> str:
    return f"{'/'.join(file.split('/')[-2:])}:{line}"


def _tuple_index(condition: dict[str, Instruction], name: str) -> int | None:
    """Return the index of an operand in the loop's tuple, or None."""
    whole, *path = name.split("#")
    if path:
        return int(path[0])
    found = condition[whole]
    return int(_attribute(found.rest, "index")) if found.opcode == "get-tuple-element" else None


_SCALAR = (
    "reduce", "reduce-window", "sort", "scatter", "select-and-scatter", "map", "all-reduce",
    "all-reduce-start", "reduce-scatter",
)  # fmt: skip


def _instruction(name: str, text: str) -> Instruction:
    """Parse the text after `name = `: a type, an opcode, operands in parentheses, the rest."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opened = text.index("(", end)
    closed = _closing(text, opened)
    opcode, inside = text[end:opened].strip(), text[opened + 1 : closed]
    # Literals have no operands.
    operands = () if opcode == "constant" else tuple(_WORD.findall(inside))
    rest = text[opened + 1 :] if opcode in ("constant", "parameter") else text[closed + 1 :]
    return Instruction(name, text[:end], opcode, operands, rest)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")


def _attribute(rest: str, name: str) -> str:
    found = re.search(rf"\b{name}=%?([^\s,]+)", rest)
    if found is None:
        raise ValueError(f"no {name}= in {rest[:80]!r}")
    return found[1]
