"""Traced and compiled programs, read."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax


def count_equations(jaxpr: Any, name: str) -> int:
    """Return the number of equations, inner ones included, whose primitive or kernel has a name.

    Equations without use do not count: JAX 0.10 leaves those of Pallas for XLA to remove.
    """
    jaxpr, total = getattr(jaxpr, "jaxpr", jaxpr), 0
    used = {id(x) for x in jaxpr.outvars}.union(*(map(id, eqn.invars) for eqn in jaxpr.eqns))
    for eqn in jaxpr.eqns:
        is_used = any(id(x) in used for x in eqn.outvars)
        total += is_used and name in f"{eqn.primitive.name} {eqn.params.get('name')}"
        inner = jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns"))
        total += sum(count_equations(x, name) for x in inner if hasattr(x, "eqns"))
    return total


def instructions(compiled: jax.stages.Compiled) -> list[str]:
    """Return the instructions of a compiled program, without their places in the source."""
    lines = re.findall(r"^ +(?:ROOT )?%\S+ = .*$", compiled.as_text() or "", re.MULTILINE)
    return [re.sub(r", metadata=\{[^}]*\}", "", line) for line in lines]


_compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _compiled.append(event) if "backend_compile" in event else None
)


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
    """List the compilations within the context."""
    _compiled.clear()
    yield _compiled
