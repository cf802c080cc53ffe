"""Checks of the synchronisation in a kernel for Hopper, on its jaxpr.

Tensor cores must read committed stores only. A buffer must be read between the wait for its barrier
and its release, which follows every matmul that reads it. An interpreter does not see all of this.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

_SYNC = (
    "barrier_wait", "barrier_arrive", "wgmma_ref", "wgmma_accumulator_deref", "commit_smem", "swap",
    "copy_gmem_to_smem",
)  # fmt: skip


class Event(NamedTuple):
    """An operation, its references and their slots, and the innermost loop that holds it."""

    name: str
    refs: tuple[Any, ...]
    slots: tuple[Any, ...]
    loop: int


class _Walk:
    """The events of a kernel's jaxpr in order. Equal expressions have equal keys."""

    def __init__(self) -> None:
        self.count, self.events = 0, []

    def new(self) -> tuple[str, int]:
        self.count += 1
        return "new", self.count

    def walk(self, jaxpr: Any, keys: Sequence[Any], loop: int = 0) -> list[Any]:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), keys, strict=True))
        for eqn in jaxpr.eqns:
            inputs = [x.val if hasattr(x, "val") else known[x] for x in eqn.invars]
            found = self._equation(eqn, eqn.primitive.name, inputs, loop)
            known.update(zip(eqn.outvars, found, strict=True))
        return [x.val if hasattr(x, "val") else known[x] for x in jaxpr.outvars]

    def _equation(self, eqn: Any, name: str, inputs: list[Any], loop: int) -> list[Any]:
        params = eqn.params
        if name in _SYNC:
            self.events.append(_event(name, params, inputs, loop))
        if name == "jit":
            return self.walk(params["jaxpr"].jaxpr, [*params["jaxpr"].consts, *inputs], loop)
        if name == "run_scoped":
            inner = params["jaxpr"]
            return self.walk(inner, [*inputs, *(self.new() for _ in inner.invars)], loop)
        if name == "cond":
            for branch in params["branches"]:
                self.walk(branch.jaxpr, [*branch.consts, *inputs[1:]], loop)
        if name == "while":
            start = params["cond_nconsts"]
            consts = inputs[start : start + params["body_nconsts"]]
            body = params["body_jaxpr"].jaxpr
            carry = [self.new() for _ in body.invars[len(consts) :]]
            self.walk(body, [*consts, *carry], self.new()[1])
        if name == "scan":
            consts, *others = map(list, params["ft_in"].update(inputs).unpack())
            carry = [self.new() for group in others for _ in group]
            self.walk(params["jaxpr"].jaxpr, [*consts, *carry], self.new()[1])
        if name in ("cond", "while", "scan") or len(eqn.outvars) != 1:
            return [self.new() for _ in eqn.outvars]
        return [(name, str(params), *map(_hashable, inputs))]


def _hashable(x: Any) -> Any:
    return x if isinstance(x, tuple) else str(x)


def _event(name: str, params: Any, inputs: list[Any], loop: int) -> Event:
    trees = {
        "barrier_wait": (1, ("transforms_treedef",)),
        "barrier_arrive": (1, ("transforms_treedef",)),
        "wgmma_ref": (3, ("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree")),
        "swap": (1, ("tree",)),
        "copy_gmem_to_smem": (
            3, ("src_transforms_treedef", "dst_transforms_treedef", "barrier_transforms_treedef"),
        ),
    }.get(name, (len(inputs), ()))  # fmt: skip
    refs, leaves = inputs[: trees[0]], inputs[trees[0] + (name == "swap") :]
    slots = []
    for key in trees[1]:
        number = params[key].num_leaves if params[key] else 0
        slots.append(_hashable(leaves[0]) if number else None)
        leaves = leaves[number:]
    return Event(name, tuple(refs), tuple(slots), loop)


def kernels(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the jaxpr of each kernel in a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map":
            yield eqn.params["name"], eqn.params["jaxprs"][0]
        for x in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
                yield from kernels(getattr(x, "jaxpr", x))


def violations(jaxpr: Any) -> list[str]:
    """Return the rules that a kernel breaks."""
    walk = _Walk()
    walk.walk(jaxpr, [walk.new() for _ in (*jaxpr.constvars, *jaxpr.invars)])
    split = max(n for n, e in enumerate(walk.events) if e.name.startswith("wgmma")) + 1
    while walk.events[split : split + 1] and walk.events[split].name == "barrier_arrive":
        split += 1
    consumer, producer = walk.events[:split], walk.events[split:]
    found, ready, free = _producer(producer)
    return found + _consumer(consumer, ready, free)


def _producer(events: Sequence[Event]) -> tuple[list[str], dict[Any, Any], dict[Any, Any]]:
    """Return broken rules, and the buffers of the barriers that tell them filled and free."""
    found, ready, free = [], {}, {}
    for before, event in zip([None, *events], events, strict=False):
        if event.name != "copy_gmem_to_smem":
            continue
        _, buffer, barrier = event.refs
        _, slot, arrives_at = event.slots
        ready[barrier] = buffer
        if before is None or before.name != "barrier_wait":
            found.append("a buffer is filled before it is free")
            continue
        free[before.refs[0]] = buffer
        if not slot == arrives_at == before.slots[0]:
            found.append("a buffer is filled under the barrier of another slot")
    return found, ready, free


def _consumer(
    events: Sequence[Event], ready: dict[Any, Any], free: dict[Any, Any]
) -> list[str]:  # fmt: skip
    found: list[str] = []
    loaded: dict[Any, Any] = {}
    held: dict[Any, Any] = {}  # the slot of each buffer, and the loop that waits for it
    running: dict[Any, tuple[Any, ...]] = {}
    stored: dict[Any, bool] = {}
    loop = 0
    for event in (*events, Event("end", (), (), -1)):
        if event.loop != loop:
            found += ["a buffer is not released" for _, at in held.values() if at == loop]
            loop = event.loop
        if event.name == "copy_gmem_to_smem":
            loaded.setdefault(event.refs[2], []).append(event.refs[1])
        elif event.name == "barrier_wait":
            barrier, slot = event.refs[0], event.slots[0]
            if barrier in ready:
                held[ready[barrier]] = slot, event.loop
            for buffer in loaded.get(barrier, ()):
                stored[buffer] = True
        elif event.name == "swap":
            if any(event.refs[0] in factors for factors in running.values()):
                found.append("a buffer is stored to while a matmul reads it")
            stored[event.refs[0]] = False
        elif event.name == "commit_smem":
            stored = dict.fromkeys(stored, True)
        elif event.name == "wgmma_ref":
            acc, *factors = event.refs
            for factor, slot in zip(factors, event.slots[1:], strict=True):
                if factor in ready.values():
                    if held.get(factor, (None,))[0] != slot:
                        found.append("a matmul reads a buffer that is not filled")
                elif not stored.get(factor):
                    found.append("a matmul reads a store that is not committed")
            running[acc] = tuple(factors)
        elif event.name == "wgmma_accumulator_deref":
            running.pop(event.refs[0], None)
        elif event.name == "barrier_arrive":
            buffer = free.get(event.refs[0])
            if held.get(buffer, (None,))[0] != event.slots[0]:
                found.append("a slot is released that is not held")
            if any(buffer in factors for factors in running.values()):
                found.append("a buffer is released while a matmul reads it")
            held.pop(buffer, None)
    return found
