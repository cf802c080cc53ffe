"""Which kernel takes a call: the order of preference, and who refuses."""

from typing import Any

import jax

from flax_mha import shapes, sharding
from flax_mha.kernels import blockwise, shards
from flax_mha.kernels.registry import KERNELS
from flax_mha.kernels.spec import AttentionSpec
from flax_mha.kernels.stored import Stored

# Those that can compute the gradients of a known result without computing it again.
RECALLING = ("flex", "blockwise")


def refusals(q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> dict[str, str]:
    """The reasons of those kernels that can't run a call."""
    platform = sharding.platform()
    reasons = {name: kernel.refuses(q, k, v, spec, platform) for name, kernel in KERNELS.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def preference(q: jax.Array, k: jax.Array | Stored) -> list[str]:
    """The kernels, best first, for a call of this size.

    | platform | first of those that do not refuse |
    |---|---|
    | TPU | `reference` up to T·S = 256², the others in their order |
    | CPU | likewise; bfloat16 only with fewer than 64 queries or keys |
    | GPU | `cudnn`, `reference` up to 2,048², the others in their order |

    For keys of a cache `decode` comes before all of these.
    """
    scores, platform = q.shape[-3] * k.shape[-3], sharding.platform()
    if platform == "cpu" and blockwise.as_it_is(q, k):
        first = []
    elif platform in ("cpu", "tpu"):
        # On CPU plain einsums are as fast up to this size, and compile sooner; on TPU the blocks
        # of splash would be mostly empty.
        first = ["reference"] if scores <= 256**2 else []
    else:
        # Plain einsums are one large product each, until the scores no longer fit.
        first = ["cudnn", "reference"] if scores <= 2048**2 else ["cudnn"]
    first = ["decode", *first] if isinstance(k, Stored) else first
    return first + [name for name in KERNELS if name not in first]


def choose(kernel: str, preference: list[str], refused: dict[str, str]) -> str:
    """The kernel of that name, or the best; raises a ValueError if it refuses."""
    if kernel == "auto":
        # The reference kernel refuses nothing, so there is always one.
        return next(name for name in preference if name not in refused)
    _check_not_refused(kernel, refused)
    return kernel


def take_way(way: str | None, layout: shards.Layout, dims: shapes.Dims) -> str:
    """The way to take to the keys of other devices."""
    refused = shards.refusals(layout, dims)
    if way is None:
        return next(name for name in shards.preference(layout, dims) if name not in refused)
    _check_not_refused(way, refused)
    return way


def _check_not_refused(kernel: str, refused: dict[str, str]) -> None:
    if kernel in refused:
        raise ValueError(
            f"kernel={kernel!r} can't run this call: {refused[kernel]}; "
            f"choose kernel='auto', or see flax_mha.explain"
        )


def parsed(kernel: str) -> tuple[str | None, str]:
    """A way, or None for any, and a kernel, of a name such as "ring:blockwise"."""
    way, _, local = str(kernel).rpartition(":")
    if not way and local in shards.WAYS:
        way, local = local, "auto"
    if local not in ("auto", *KERNELS) or way not in ("", *shards.WAYS):
        raise ValueError(
            f"kernel must be 'auto' or one of {list(KERNELS)}, for a sequence divided over a mesh "
            f"one of {list(shards.WAYS)} too, alone or as in 'ring:blockwise', got {kernel!r}"
        )
    return way or None, local
