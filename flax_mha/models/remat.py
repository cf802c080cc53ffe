"""Rematerialization: the activations that a block stores for the backward pass."""

from collections.abc import Callable
from typing import Any, TypeAlias

import flax.linen as nn
import jax

from flax_mha.base import checks

# The names of activations, which `jax.ad_checkpoint.checkpoint_name` marks.
NAMES = ("q", "k", "v", "z", "lse", "out", "mlp_pre", "mlp_hidden", "mlp_out")
# A prefix of names, for activations that wait in the host's memory.
OFFLOAD = "offload:"
Policy: TypeAlias = Callable[..., Any]
Remat: TypeAlias = bool | tuple[str, ...] | Policy


def apply(remat: Remat, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return fn(module, *arrays), which recomputes activations by the rule of `Block.remat`."""
    if isinstance(remat, bool):
        return nn.remat(fn) if remat else fn
    return nn.remat(fn, policy=as_policy(remat))


def as_policy(remat: tuple[str, ...] | Policy) -> Policy:
    """Return the policy of `jax.checkpoint` that stores these names, or a policy itself."""
    if callable(remat):
        return remat
    names = remat if isinstance(remat, tuple) else ()
    plain = [str(name).removeprefix(OFFLOAD) for name in names]
    if not isinstance(remat, tuple) or len({*plain} & {*NAMES}) < len(names):
        raise ValueError(
            f"remat must be a bool, a policy of jax.checkpoint_policies, or a tuple of different "
            f"names among {', '.join(NAMES)}, each perhaps after {OFFLOAD!r}, got "
            f"{checks.describe(remat)}; give ('z', 'lse'), for example"
        )
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name in names if not name.startswith(OFFLOAD)],
        names_which_can_be_offloaded=[
            name.removeprefix(OFFLOAD) for name in names if name.startswith(OFFLOAD)
        ],
        offload_src="device",
        offload_dst="pinned_host",
    )
