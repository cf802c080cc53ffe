"""The bytes that a compiled program moves between a chip and its main memory.

An instruction that touches main memory reads each of its operands once and writes its result once,
with the padding of their layouts, and with these exceptions:

| instruction | bytes |
|---|---|
| slices and gathers, as instructions or as the only use of a fusion's operand | the slice |
| updates in place (`dynamic-update-slice`, `scatter`), fused or not | the update |
| copies between main memory and the memory on a TPU's chip | one side |
| cuDNN's calls | without their workspace |

A Pallas kernel or a call of cuDNN can read its operands again, block by block: this is not counted.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from experiments.common.counts.hlo import Instruction, Module, arrays, parts

# These move nothing, or bytes that other instructions count.
_FREE = frozenset((
    "parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "while", "call",
    "conditional", "after-all", "add-dependency", "opt-barrier",
    "partition-id", "replica-id", "async-start", "async-update",
))  # fmt: skip
_FREE_CALLS = re.compile(
    r'custom_call_target="(?:ConcatBitcast|AllocateBuffer|Sharding|Assume\w+)"'
)
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the place of the operand with the update


class Moved(NamedTuple):
    """An instruction outside of fusions, with its bytes to and from main memory in one run."""

    instruction: Instruction
    times: int
    bytes: int


def walk(module: Module) -> Iterator[Moved]:
    """Yield the instructions that a program runs, which on GPUs are its kernel launches."""
    for run in module.runs():
        x = run.instruction
        if run.fused or x.opcode in _FREE or x.opcode.endswith("-done"):
            continue
        if x.opcode != "custom-call" or not _FREE_CALLS.search(x.rest):
            yield Moved(x, run.times, _bytes(module, run.computation, x))


def moved(module: Module) -> int:
    """Return the bytes that a program moves."""
    return sum(one.times * one.bytes for one in walk(module))


def _bytes(module: Module, computation: str, x: Instruction) -> int:
    operands = [_size(module.type_of(computation, name)) for name in x.operands]
    result = _size(x.type)
    distinct = sum(dict(zip(x.operands, operands, strict=True)).values())
    if x.opcode == "copy-start":
        return result  # Its type has the copy's, the operand's, and a flag.
    if x.opcode == "slice-start":
        return _size(parts(x.type)[1], anywhere=True)
    if x.opcode.endswith("-start") and not x.opcode.startswith("fusion"):
        return max(distinct, result)  # a collective's result has its operands again
    if x.opcode in ("dynamic-slice", "slice"):
        return 2 * result
    if x.opcode == "gather":
        return 2 * result + operands[1]
    if x.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if x.opcode == "scatter":
        return operands[1] + 3 * operands[2]  # reads and writes the rows that it updates
    if x.opcode == "custom-call" and "__cudnn" in x.rest:
        result -= sum(array.stored for array in arrays(x.type) if array.dtype == "u8")
    if x.fusion is None:
        return distinct + result
    reads, root = _reads(module, x.fusion), module.root(x.fusion)
    taken: dict[str, int] = {}
    for number, (name, size) in enumerate(zip(x.operands, operands, strict=True)):
        taken[name] = max(taken.get(name, 0), min(size, reads.get(number, 0)))
    # The type of an asynchronous fusion has its operands too.
    type_ = x.type if x.opcode == "fusion" else root.type
    return sum(taken.values()) + _written(module, x.fusion, root, type_)


def _reads(module: Module, computation: str) -> dict[int, int]:
    """Return the bytes that a fusion reads of each parameter, if it lies in main memory."""
    parameters: dict[str, int] = {}  # also by the names of their reshaped forms
    whole, reads = dict[int, int](), dict[int, int]()
    for x in module.computations[computation]:
        if x.opcode == "parameter":
            parameters[x.name] = x.number
            whole[x.number] = _size(x.type, anywhere=True)
            continue
        same = _same(module, x)
        if same is not None and x.operands[same] in parameters:
            parameters[x.name] = parameters[x.operands[same]]
        for place, name in enumerate(x.operands):
            if name in parameters and place != same:
                number = parameters[name]
                size = _read(module, computation, x, place, whole[number])
                reads[number] = min(whole[number], reads.get(number, 0) + size)
    return reads


def _read(module: Module, computation: str, x: Instruction, place: int, whole: int) -> int:
    """Return the bytes that an instruction of a fusion reads of an operand of `whole` bytes."""
    if x.fusion:
        return _reads(module, x.fusion).get(place, 0)
    if place == 0 and x.opcode in _SLICES:
        return _size(x.type, anywhere=True)
    if place == 0 and x.opcode in _UPDATES:
        update = module.type_of(computation, x.operands[_UPDATES[x.opcode]])
        return _size(update, anywhere=True) if x.opcode == "scatter" else 0
    return whole


def _written(module: Module, computation: str, x: Instruction, type_: str) -> int:
    """Return the bytes that a fusion writes to main memory, of the part of this type."""
    if x.opcode == "tuple":
        each = zip(x.operands, parts(type_), strict=True)
        return sum(
            _written(module, computation, module.find(computation, y), part) for y, part in each
        )
    while (same := _same(module, x)) is not None or x.opcode in ("copy", "convert"):
        x = module.find(computation, x.operands[same or 0])
    if x.opcode in _UPDATES:
        update = module.type_of(computation, x.operands[_UPDATES[x.opcode]])
        return min(_size(type_), _size(update, anywhere=True))
    if x.fusion:
        return _written(module, x.fusion, module.root(x.fusion), type_)
    return _size(type_)


def _same(module: Module, x: Instruction) -> int | None:
    """Return the place of the operand whose reshaped form an instruction is, or None."""
    if x.opcode in ("bitcast", "reshape"):
        return 0
    if x.fusion is None:
        return None
    root = module.root(x.fusion)
    # Inside a fusion, another one that copies is a view of its operand with other tiles.
    while (same := _same(module, root)) is not None or root.opcode == "copy":
        root = module.find(x.fusion, root.operands[same or 0])
    return root.number if root.opcode == "parameter" else None


def _size(type_: str, anywhere: bool = False) -> int:
    """Return the bytes of a type's arrays in main memory, or of all."""
    return sum(array.stored for array in arrays(type_) if anywhere or array.main)
