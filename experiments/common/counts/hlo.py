"""Read compiled programs as XLA prints them, with the number of runs of each instruction.

A loop's body is in the text once, and runs as often as its trip count: `known_trip_count` if the
compiler kept it (CPU, GPU), or the constant that the loop's condition compares with (TPU).
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_TILE = re.compile(r"\{([\d,]+):T\(([\d,]+)\)")
_CALLED = re.compile(
    r"\b(calls|to_apply|called_computations|branch_computations|(?:true|false)_computation)="
    r"(?:\{([^}]*)\}|%?([^\s,)]+))"
)
_WORD = re.compile(r"%([^\s,(){}]+)")
# Their computation combines two numbers, and is no part of the program's work.
_SCALAR = (
    "reduce", "reduce-window", "sort", "scatter", "select-and-scatter", "all-reduce",
    "all-reduce-start", "reduce-scatter",
)  # fmt: skip


class Array(NamedTuple):
    """An array in a type.

    Attributes:
      dtype: its dtype, as XLA writes it.
      shape: its shape.
      layout: its layout as XLA writes it, such as `{0,1:T(8,128)S(1)}`: axes from the fastest one,
        the tile that the fastest ones are padded to, and the memory.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def main(self) -> bool:
        """True if it lies in the chip's main memory."""
        return "S(" not in self.layout

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The number of bytes, without the padding of the layout."""
        return self._bytes(self.size)

    @property
    def stored(self) -> int:
        """The number of bytes in memory, with the padding of the layout."""
        sizes, tile = [*self.shape], _TILE.match(self.layout)
        if tile:
            axes, padded_to = ([*map(int, part.split(","))] for part in tile.groups())
            for axis, to in zip(axes, padded_to[::-1], strict=False):
                sizes[axis] = -(-sizes[axis] // to) * to
        return self._bytes(math.prod(sizes))

    def _bytes(self, size: int) -> int:
        if self.dtype == "pred":
            return size
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return -(-size * int(bits[1]) // 8) if bits else 0  # tokens have none


def arrays(type_: str) -> list[Array]:
    """Return the arrays of a type, in order."""
    return [
        Array(dtype, tuple(int(n) for n in sizes.split(",") if n), layout)
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

    @property
    def number(self) -> int:
        """The index of a parameter, or the value of an integer constant."""
        return int(self.rest.split(")")[0])

    @property
    def source(self) -> str:
        """The names of the transformations, modules and functions that it is from."""
        return "".join(re.findall(r'op_name="([^"]*)"', self.rest)[:1])

    @property
    def fusion(self) -> str | None:
        """The computation of a fusion, or None for other instructions."""
        return self.attribute("calls") if "fusion" in self.opcode else None

    def attribute(self, name: str) -> str | None:
        """Return the word of an attribute, or None if the instruction lacks it."""
        found = re.search(rf"\b{name}=%?([^\s,]+)", self.rest)
        return found[1] if found else None


class Run(NamedTuple):
    """An instruction with its number of runs."""

    instruction: Instruction
    computation: str  # the one that contains it
    times: int  # in a run of the program
    fused: bool  # part of a fusion, so that its operands and result touch no memory


class Module:
    """A program, from `compiled.as_text()` or a dump of the compiler's.

    All branches of a conditional count, although only one runs at a time, so that counts are upper
    bounds. With `usual`, only the first branch counts, which `lax.cond` runs for False.

    Attributes:
      computations: instructions by computation.
      entry: the name of the computation that is the program.
      unknown: names of loops of unknown trip count; they count as run once.
    """

    def __init__(self, text: str, usual: bool = False) -> None:
        self.usual = usual
        self.computations: dict[str, list[Instruction]] = {}
        self.entry, self.unknown = "", list[str]()
        here: list[Instruction] = []
        for line in text.splitlines():
            if head := _HEAD.match(line):
                here = self.computations[head[2]] = []
                self.entry = head[2] if head[1] else self.entry
            elif found := _LINE.match(line):
                here.append(_instruction(found[2], found[3], is_root=bool(found[1])))
        self._named = {name: {x.name: x for x in xs} for name, xs in self.computations.items()}

    def find(self, computation: str, name: str) -> Instruction:
        """Return an instruction of a computation."""
        return self._named[computation][name]

    def root(self, computation: str) -> Instruction:
        """Return the instruction whose result is a computation's."""
        return next(x for x in self.computations[computation] if x.is_root)

    def type_of(self, computation: str, name: str) -> str:
        """Return the type of an operand. Newer XLA writes `name#2` for that part of a tuple."""
        whole, *path = name.split("#")
        found = self.find(computation, whole).type
        for place in path:
            found = parts(found)[int(place)]
        return found

    def runs(self) -> Iterator[Run]:
        """Yield every instruction that the program runs, with its number of runs."""
        self.unknown.clear()
        yield from self._runs(self.entry, 1, False)

    def _runs(self, name: str, times: int, fused: bool) -> Iterator[Run]:
        for x in self.computations[name]:
            yield Run(x, name, times, fused)
            called, trips = [] if x.opcode in _SCALAR else self._called(x), 1
            if x.opcode == "while":
                called, trips = [str(x.attribute("body"))], self._trips(name, x)
            elif x.opcode == "conditional" and self.usual:
                called = called[:1]
            for inner in called:
                yield from self._runs(inner, times * trips, fused or "fusion" in x.opcode)

    def _called(self, x: Instruction) -> list[str]:
        """Return the computations that an instruction calls, a conditional's for False first."""
        found = [
            word.strip(" %")
            for _, several, one in sorted(_CALLED.findall(x.rest))
            for word in (several or one).split(",")
        ]
        return [name for name in found if name in self.computations]

    def _trips(self, computation: str, loop: Instruction) -> int:
        if known := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.rest):
            return int(known[1])
        condition = str(loop.attribute("condition"))
        compares, limits = (
            [x for x in self.computations[condition] if x.opcode == opcode]
            for opcode in ("compare", "constant")
        )
        if len(compares) == len(limits) == 1 and "direction=LT" in compares[0].rest:
            places = [self._counter(condition, name) for name in compares[0].operands]
            counters = [place for place in places if place is not None]
            start = self._start(computation, loop, counters[0]) if len(counters) == 1 else None
            if start is not None:
                step = self._step(str(loop.attribute("body")), counters[0])
                return max(0, -((start - limits[0].number) // step))
        self.unknown.append(loop.name)
        return 1

    def _counter(self, condition: str, name: str) -> int | None:
        """Return the index of a condition's operand in the loop's tuple, or None."""
        whole, *path = name.split("#")
        x = self.find(condition, whole)
        index = path[0] if path else None
        if x.opcode == "get-tuple-element":
            index = x.attribute("index")
        return None if index is None else int(index)

    def _step(self, body: str, counter: int) -> int:
        """Return the constant that a loop's body adds to its counter, 1 if it is not found."""
        lines = self._named[body]
        x = lines.get(self.root(body).operands[counter])
        added = [lines[name] for name in x.operands if name in lines] if x else []
        constants = [x.number for x in added if x.opcode == "constant"]
        return constants[0] if x and x.opcode == "add" and constants else 1

    def _start(self, computation: str, loop: Instruction, counter: int) -> int | None:
        """Return the constant that a loop's counter starts from, or None."""
        lines = self._named[computation]
        x = lines.get(loop.operands[0])
        x = lines.get(x.operands[counter]) if x and x.opcode == "tuple" else None
        while x and x.opcode in ("copy", "bitcast"):
            x = lines.get(x.operands[0])
        return x.number if x and x.opcode == "constant" else None


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    """Parse the text after `name = `: a type, an opcode, operands in parentheses, the rest."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opened = text.index("(", end)
    closed = _closing(text, opened)
    opcode, inside = text[end:opened].strip(), text[opened + 1 : closed]
    # Literals have no operands.
    operands = () if opcode == "constant" else tuple(_WORD.findall(inside))
    rest = text[opened + 1 :] if opcode in ("constant", "parameter") else text[closed + 1 :]
    return Instruction(name, text[:end], opcode, operands, rest, is_root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")
