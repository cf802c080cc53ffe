"""Remedies of a run that does not fit: changes of its config, in order of their cost."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from experiments import tasks
from experiments.phases import Phase
from experiments.plan import search
from experiments.plan.search import Layout
from experiments.runs import fields
from experiments.runs.checks import shard_bytes
from experiments.trainer import loop, mesh

# Names of activations that a block stores, from less recomputation to less memory.
POLICIES = ("q,k,v,z,lse,mlp_pre", "q,k,v,z,lse", "z,lse", True)


class Remedy(NamedTuple):
    """A change of a config, on top of the changes before it.

    Attributes:
      name: the change in words.
      flags: the command's flags that make it.
      needs: the bytes on one device.
      layout: the compiled step, or None if `needs` is an estimate.
    """

    name: str
    flags: str
    needs: float
    layout: Layout | None = None


def find(
    config: ConfigDict, devices: Sequence[jax.Device], tight: Layout, whole: bool = False
) -> list[Remedy]:
    """Return remedies in order, until a compiled one fits.

    Each is estimated first, and compiled if the estimate is at most a quarter too large. An
    estimate follows the last compiled step: the state by its shapes, the rest by the bytes of the
    layers' activations. `tight` is a layout that does not fit, in place of the config's mesh.
    """
    needs, has = tight.needs or 0.0, tight.has or 0.0
    config = search.divided(config, {axis: tight.sizes[axis] for axis in mesh.AXES})
    found: list[Remedy] = []
    known = config, needs
    for name, changes in _changes(config):
        changed = config.copy_and_resolve_references()
        with changed.ignore_type():  # `model.remat` is a bool or names.
            changed.update_from_flattened_dict(changes)
        try:
            now = _estimate(changed, devices, *known)
            if now > 0.99 * (found[-1].needs if found else needs):
                continue  # It brings nothing.
            layout = None
            if now <= 1.25 * has:
                with Phase(f"trying {_flags(changes)}"):
                    layout = search.plan(changed, devices, whole)
        except ValueError:
            continue  # The model or the mesh refuses it.
        if layout is not None:
            now = layout.needs or now
            known = changed, now
        found.append(Remedy(name, _flags(changes), now, layout))
        if layout is not None and not layout.reason:
            break
    return found


def _changes(config: ConfigDict) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield remedies, and the changed values by key: each contains the changes before it."""
    rows, accumulate = config.batch_size, config.optimizer.accumulate
    data, fsdp, context = config.mesh.data, config.mesh.fsdp, config.mesh.context
    total: dict[str, object] = {}
    if data > 1:
        data, fsdp = 1, data * fsdp
        total |= {"mesh.data": 1, "mesh.fsdp": fsdp}
        yield "shard parameters over data too", dict(total)
    if "remat" in config.model:
        field = fields.of("model.remat", config.model.remat)
        current = config.model.remat
        start = POLICIES.index(current) + 1 if current in POLICIES else 0
        for policy in POLICIES[start:] if current is not True else ():
            if field.takes(policy):
                total |= {"model.remat": policy}
                stored = "only layers' inputs" if policy is True else f"only {policy}"
                yield f"store {stored}, recompute the rest", dict(total)
    if "length" in config and fsdp % 2 == 0 and config.length % (2 * context) == 0:
        fsdp, context, rows = fsdp // 2, 2 * context, rows // 2
        accumulate *= 2
        total |= {
            "mesh.fsdp": fsdp, "mesh.context": context, "batch_size": rows,
            "optimizer.accumulate": accumulate,
        }  # fmt: skip
        yield "shard positions, half the rows at a time", dict(total)
    while rows % (2 * data * fsdp) == 0:
        rows, accumulate = rows // 2, 2 * accumulate
        total |= {"batch_size": rows, "optimizer.accumulate": accumulate}
        yield f"accumulate {accumulate} batches", dict(total)


def _estimate(
    config: ConfigDict, devices: Sequence[jax.Device], known: ConfigDict, needs: float
) -> float:
    """Return the bytes on one device, from the bytes that a known config of the run needs."""
    (state, tokens), (before, tokens_before) = (_held(x, devices) for x in (config, known))
    grown = tokens * _stored(config) / (tokens_before * _stored(known))
    return state + max(0.0, needs - before) * grown


def _held(config: ConfigDict, devices: Sequence[jax.Device]) -> tuple[int, float]:
    """Return the bytes of a device's state, and its tokens."""
    program = loop.build(config, tasks.make(config), devices)
    state, used = program.abstract_state(), program.mesh.size // program.mesh.shape["model"]
    tokens = config.batch_size * config.get("length", 1) / used
    return shard_bytes((state.params, state.opt_state)), tokens


def _stored(config: ConfigDict) -> float:
    """Estimate the stored features of a token, in units of the model's: all layers and logits."""
    m = config.model
    mlp = (3 if m.get("gated", False) else 2) * m.mlp_dim / m.features
    shared = 1 + 2 * m.num_kv_heads / m.num_heads  # queries, keys and values
    one = 4 + 2 * shared + mlp  # norms, residuals, attention and the MLP of a layer
    remat = m.get("remat", False)
    names = remat.split(",") if isinstance(remat, str) else []
    products = "products" in names
    kept = 1 + (products or "q" in names) * shared + ("z" in names)
    kept += (products or "mlp_pre" in names) * (mlp - m.mlp_dim / m.features)
    layers = m.get("num_layers", 1)
    return layers * kept + one if remat else (layers + 1) * one


def _flags(changes: dict[str, object]) -> str:
    return " ".join(f"--config.{key}={value}" for key, value in changes.items())
