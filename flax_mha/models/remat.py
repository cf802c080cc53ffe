"""Rematerialization: the activations that a block stores for the backward pass."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import flax.linen as nn
import jax

from flax_mha.base import checks
from flax_mha.base.tensors import STORED as NAMES

# The name of the results of all matrix products.
PRODUCTS = "products"
# A prefix of names, for activations that wait in the host's memory.
OFFLOAD = "offload:"
# The default of a scan. With q and k stored, the products that rotate them on TPUs are not.
IN_SCAN = (PRODUCTS, "q", "k", "v", "z", "lse")
Policy: TypeAlias = Callable[..., Any]
Remat: TypeAlias = bool | tuple[str, ...] | Policy | None


def apply(remat: Remat, fn: Callable[..., Any], in_scan: bool = False) -> Callable[..., Any]:
    """Return fn(module, *arrays), which recomputes activations by the rule of `Block.remat`."""
    remat = IN_SCAN if remat is None and in_scan else remat
    if remat is None or remat is False:
        return fn
    # A scan already keeps XLA from merging what is recomputed with the forward pass. Barriers would
    # only keep it from fusing.
    return nn.remat(fn, policy=None if remat is True else as_policy(remat), prevent_cse=not in_scan)


def as_policy(remat: Any) -> Policy:
    """Return the policy of `jax.checkpoint` that stores these names, or a policy itself."""
    if callable(remat):
        return remat
    names = remat if isinstance(remat, tuple) else ()
    plain = [str(name).removeprefix(OFFLOAD) for name in names]
    if not isinstance(remat, tuple) or len({*plain} & {*NAMES, PRODUCTS}) < len(names):
        raise ValueError(
            f"remat must be a bool, a policy of jax.checkpoint_policies, or a tuple of different "
            f"names among {', '.join(NAMES)}, each perhaps after {OFFLOAD!r}, and {PRODUCTS}, got "
            f"{checks.describe(remat)}; give ('z', 'lse'), for example"
        )
    return _of_names(names)


@functools.cache
def _of_names(names: tuple[str, ...]) -> Policy:
    """Return the policy of these names, one object for the caches of JAX."""
    offloaded = [name.removeprefix(OFFLOAD) for name in names if name.startswith(OFFLOAD)]
    stored = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=names, names_which_can_be_offloaded=offloaded,
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        is_product = primitive.name in ("dot_general", "ragged_dot_general")
        return is_product or stored(primitive, *avals, **params)

    return policy if PRODUCTS in names else stored
