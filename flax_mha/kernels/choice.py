"""Which kernel takes a call: asked once, by the call itself and by `explain`."""

import math
from typing import Any, NamedTuple

import jax

from flax_mha.base import shapes, symbols
from flax_mha.kernels import blockwise, derivatives, softmax
from flax_mha.kernels.mesh import shards
from flax_mha.kernels.options import Platform
from flax_mha.kernels.registry import KERNELS
from flax_mha.kernels.spec import AttentionSpec, Lowered, Refusal, Result
from flax_mha.kernels.stored import Stored

# Of all rows and heads, that `auto` lets plain einsums keep on a GPU: 1 GiB of float32.
MOST_SCORES = 2**28
# On a CPU under a traced mask: 64 MiB. With twice as many JAX 0.10 was slower forward.
FEW_SCORES = 2**24


class Choice(NamedTuple):
    """Which kernel takes a call.

    Attributes:
      kernel: its name; None if all that may take it refuse.
      lowered: the call as that kernel made it ready.
      refused: why others can't, of those that were asked.
    """

    kernel: str | None
    lowered: Lowered | None
    refused: dict[str, str]

    def run(self, *recalled: Result) -> Result:
        """The result of the call. Of one known already, of these keys and others, the gradients.

        Raises:
          ValueError: if the kernel that was named refuses.
        """
        if self.kernel is None or self.lowered is None:
            (name,) = self.refused
            raise refusal(name, self.refused[name])
        if not recalled or KERNELS[self.kernel].recalls:
            return self.lowered(*recalled)
        return softmax.of_part(self.lowered(), *recalled)


def decide(
    kernel: str, q: jax.Array, k: Any, v: Any, spec: AttentionSpec, platform: Platform,
    ask_all: bool = False,
) -> Choice:  # fmt: skip
    """Asks one kernel after the other, until one takes the call.

    Args:
      kernel: the name of the only one to ask, or "auto".
      q: [*B, T, N, H].
      k: [*B, S, K, H].
      v: [*B, S, K, Hv].
      spec: the rest of the call.
      platform: what it will run on.
      ask_all: whether to ask the others too, for their reasons.
    """
    of_mask = () if spec.mask is None else (spec.mask, spec.q_pos, spec.k_pos)
    traced = any(isinstance(x, jax.Array) for x in jax.tree.leaves(of_mask))
    names = preference(q, k, platform, traced) if kernel == "auto" else [kernel]
    others = [name for name in KERNELS if name not in names] if ask_all else []
    choice, refused = Choice(None, None, {}), {}
    for name in names + others:
        if choice.kernel and not ask_all:
            break
        found = KERNELS[name].lower(q, k, v, spec, platform)
        if isinstance(found, Refusal):
            refused[name] = found.reason
        elif choice.kernel is None and name in names:
            choice = Choice(name, found, {})
    return choice._replace(refused=refused)


def preference(
    q: jax.Array, k: jax.Array | Stored, platform: Platform, traced: bool = False
) -> list[str]:
    """The kernels, best first, for a call of this size.

    | platform | first of those that do not refuse |
    |---|---|
    | TPU | `reference` up to T·S = 256², the others in their order |
    | CPU | likewise; under a traced mask up to 512² and 2²⁴ for all rows and heads |
    | CPU, bfloat16 | likewise, but only with fewer than 64 queries or keys |
    | GPU | `cudnn`, `reference` up to 2,048² and 2²⁸ for all rows and heads, the others in order |

    For keys of a cache `decode` comes before all of these.
    """
    scores, rows = q.shape[-3] * k.shape[-3], math.prod(q.shape[:-3]) * q.shape[-2]
    if platform.name == "cpu" and blockwise.as_it_is(q, k):
        first = []
    elif platform.name in ("cpu", "tpu"):
        # On CPU plain einsums are as fast up to this size, and compile sooner; on TPU the blocks
        # of splash would be mostly empty.
        most = 256**2
        if platform.name == "cpu" and traced and symbols.at_most(scores * rows, FEW_SCORES):
            # So short, blocks skip nothing of a mask that is not known when they are planned.
            most = 512**2
        first = ["reference"] if symbols.at_most(scores, most) else []
    else:
        # Plain einsums are one large product each, but they take memory for twice the scores, and
        # keep them until the gradient.
        fits = symbols.at_most(scores, 2048**2) and symbols.at_most(scores * rows, MOST_SCORES)
        first = ["cudnn", "reference"] if fits else ["cudnn"]
    first = ["decode", *first] if isinstance(k, Stored) else first
    return first + [name for name in KERNELS if name not in first]


def refused_ways(
    kernel: str, normalizer: str, division: shards.Division, dims: shapes.Dims
) -> dict[str, str]:
    """Return the reasons why a call can't go some of the ways."""
    every = derivatives.all_asked() or kernel == "checkpointed"
    return shards.refusals(division, dims, normalizer, every)


def take_way(
    way: str | None, kernel: str, normalizer: str, division: shards.Division, dims: shapes.Dims
) -> str:
    """The way to take to the keys of other devices."""
    refused = refused_ways(kernel, normalizer, division, dims)
    if way is None:
        return next(name for name in shards.preference(division, dims) if name not in refused)
    if way in refused:
        raise refusal(way, refused[way])
    return way


def refusal(kernel: str, reason: str) -> ValueError:
    """The error of a kernel, or a way, that was asked for and can't."""
    return ValueError(
        f"kernel={kernel!r} can't run this call: {reason}; "
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
