"""The kernels, and the choice of a kernel for a call.

A kernel is a module with a function `lower(q, k, v, spec)`. It returns a function that computes the
call, or raises `Unsupported` with the reason why it cannot.
"""

import logging
import math
from typing import Any, NamedTuple

import jax

from flax_mha.base import symbols
from flax_mha.kernels.call.spec import (
    AttentionSpec,
    Lowered,
    Platform,
    Result,
    Unsupported,
    load,
)  # fmt: skip
from flax_mha.kernels.call.stored import Stored
from flax_mha.kernels.chips import gpus
from flax_mha.kernels.chips.cpus import computes_in_bfloat16
from flax_mha.kernels.chips.tpus import SHORT, SHORTEST
from flax_mha.kernels.xla import softmax
from flax_mha.masks.algebra import in_words

# The compute capabilities of GPUs on which the contract of flex has run. `auto` takes it on these
# only. On an H100 its attention of 1,024 tokens took 0.2 to 0.3 of the time of `reference`.
FLEX_GPUS: frozenset[tuple[int, int]] = frozenset([(9, 0)])
# The maximum number of scores for which `auto` takes `reference` on a GPU: 1 GiB of float32.
MOST_SCORES = 2**28
# The fewest heads of all rows for which `auto` takes `cudnn` for a few tokens and a cache. A head
# of a row is then the work of one multiprocessor, as in FlashAttention-2, and an H100 has 132. With
# fewer heads most would be idle. No time was measured.
LEAST_HEADS = 64

# Context-parallel strategies for a sharded sequence. "ulysses": each device takes all tokens of
# some heads. "ring": keys pass around the devices. "usp": a ring of groups of devices, "ulysses" in
# each group. "all_gather": each device gathers all keys.
STRATEGIES = ("ulysses", "usp", "ring", "all_gather")
# The platforms' names in errors.
_CALLED = {"gpu": "NVIDIA GPUs", "tpu": "TPU"}

_log = logging.getLogger("flax_mha")


class Kernel(NamedTuple):
    """A kernel.

    Attributes:
      module: its module in this folder, loaded when a call first asks for it.
      platforms: JAX's names of its platforms; empty for all.
      by_name: True if `auto` never takes it.
    """

    module: str
    platforms: tuple[str, ...] = ()
    by_name: bool = False


KERNELS = {
    "cudnn": Kernel("cudnn", ("gpu",)),
    "short": Kernel("flex.short", ("tpu",)),
    "flex": Kernel("flex", ("tpu", "gpu")),
    "splash": Kernel("splash", ("tpu",), by_name=True),
    "blockwise": Kernel("xla.blockwise"),
    "checkpointed": Kernel("xla.checkpointed", by_name=True),
    "reference": Kernel("xla.reference"),
    "decode": Kernel("xla.decode"),
}


# Masks that are often inverted by mistake, by their share of pairs.
_EXTREMES = {
    0.0: "no query has a key, so all outputs are 0",
    1.0: "everything may attend, so the mask changes nothing",
}


@jax.tree_util.register_static
class Explanation(NamedTuple):
    """The kernel of a call, and the reasons against other kernels. Prints as a table.

    Attributes:
      chosen: the kernel's name; None if no kernel supports the call.
      refused: the reasons against other kernels and strategies.
      strategy: the context-parallel strategy; None if the sequence is not sharded.
      tile: the queries and keys of a tile of `flex`; None for other kernels.
      why: the reason for these sizes.
      share: the share of pairs of queries and keys that the mask lets attend; None if there is no
        mask, or it is traced or has more than 2²⁶ pairs.
      no_key: the number of queries that may attend to no key; None as for `share`.
    """

    chosen: str | None
    refused: dict[str, str]
    strategy: str | None = None
    tile: tuple[int, int] | None = None
    why: str | None = None
    share: float | None = None
    no_key: int | None = None

    def __hash__(self) -> int:  # JAX hashes it as part of a tree's structure.
        return hash((self.chosen, *self.refused, self.strategy))

    def __str__(self) -> str:
        is_sharded = {self.strategy, *self.refused} & {*STRATEGIES}
        names = [*KERNELS, *(STRATEGIES if is_sharded else ())]
        width = max(map(len, names))
        rows = []
        for name in names:
            reason = self.refused.get(name)
            is_chosen = name in (self.chosen, self.strategy)
            status = f"refused: {reason}" if reason else "chosen" if is_chosen else "possible"
            if status == "possible" and name in KERNELS and KERNELS[name].by_name:
                status += " by name"
            if self.tile and name == self.chosen:
                status += ", in tiles of {} queries × {} keys, {}".format(*self.tile, self.why)
            rows.append(f"{name:<{width}}  {status}")
        if self.share is not None and self.no_key is not None:
            rows.append(f"{'mask':<{width}}  {in_words(self.share, self.no_key)}")
            if self.share in _EXTREMES:
                rows.append(
                    f"{_EXTREMES[self.share]}: True in a mask means that a query may attend"
                )
        return "\n".join(rows)


def run(
    kernel: str, q: jax.Array, k: Any, v: Any, spec: AttentionSpec, result: Result | None = None
) -> Result:
    """Compute a call by the first kernel that supports it. Arguments and errors are as in `lower`.

    Given a precomputed result of these and other keys, compute only its gradients.
    """
    lowered = lower(kernel, q, k, v, spec)
    if result is None:
        return lowered.run()
    if lowered.takes_result:
        return lowered.run(result)
    return softmax.part_of_result(lowered.run(), result)


def lower(kernel: str, q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Lowered:
    """Return a call by the first kernel that supports it, ready to run.

    See `decide` for the arguments.

    Raises:
      ValueError: if the named kernel does not support the call.
    """
    explanation, lowered = decide(kernel, q, k, v, spec)
    if explanation.chosen is None or lowered is None:
        raise refusal(kernel, explanation.refused[kernel])
    if isinstance(q, jax.core.Tracer):
        _log.info(
            "%s computes attention of q %s and k %s on %s (see platform= of flax_mha.kernels.use)",
            explanation.chosen, q.shape, k.shape, spec.platform.name,
        )  # fmt: skip
    return lowered


def explain(kernel: str, q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Explanation:
    """Return the kernel for a call, and the reasons against the others."""
    return decide(kernel, q, k, v, spec, ask_all=True)[0]


def decide(
    kernel: str, q: jax.Array, k: Any, v: Any, spec: AttentionSpec, ask_all: bool = False
) -> tuple[Explanation, Lowered | None]:
    """Choose the first kernel that supports a call.

    `kernel` is the name of the only kernel to try, or "auto". q is [*B, T, N, H], k and v are [*B,
    S, K, ·]. With `ask_all`, the other kernels are tried too, for their reasons. Returns the choice
    with the reasons against the tried kernels, and the function that computes the call; None if no
    kernel supports it.
    """
    names = preference(q, k, spec.platform) if kernel == "auto" else (kernel,)
    chosen, chosen_call, refused = None, None, {}
    for name in (*names, *(other for other in KERNELS if ask_all and other not in names)):
        try:
            lowered = _lower(name, q, k, v, spec)
        except Unsupported as reason:
            refused[name] = str(reason)
            continue
        if name not in names:
            device = spec.platform.device
            if kernel == "auto" and name == "flex" and gpus.capability(device) not in FLEX_GPUS:
                refused[name] = (
                    f"auto takes it only on kinds of GPUs that have run its contract, this is "
                    f"{device}; name it to run it"
                )
        elif chosen is None:
            chosen, chosen_call = name, lowered
            if not ask_all:
                break
    sizes = (chosen_call.tile, chosen_call.why) if chosen_call else (None, None)
    return Explanation(chosen, refused, None, *sizes), chosen_call


def _lower(name: str, q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Lowered:
    kernel = KERNELS[name]
    if kernel.platforms and spec.platform.name not in kernel.platforms:
        called = " and ".join(_CALLED[platform] for platform in kernel.platforms)
        raise Unsupported(f"runs on {called} only, this is {spec.platform.name}")
    if kernel.platforms:
        q = load("call.only_on").only_on.bind(q, platform=spec.platform.name)
    lowered: Lowered = load(kernel.module).lower(q, k, v, spec)
    return lowered


def preference(q: jax.Array, k: jax.Array | Stored, platform: Platform) -> tuple[str, ...]:
    """Return the kernels that "auto" tries, best first, for a call of this size.

    | platform | the first of these that supports the call |
    |---|---|
    | TPU | `short` for 32 to 512 queries and keys, `reference` up to 256², `flex` |
    | TPU, from 32 queries and 513 keys on | `flex` |
    | CPU | `reference` up to 256² |
    | CPU, bfloat16 | the same, but only with fewer than 64 queries or keys |
    | GPU | `cudnn`, `flex` above 256², `reference` up to 2,048² and 2²⁸ scores |

    After these come `blockwise`, and `reference`, which supports every call. With keys of a cache,
    `decode` comes first. On GPUs it comes after `cudnn` where it would write many scores: for
    several tokens, more than 4 queries of a key/value head, and `LEAST_HEADS` heads of all rows,
    unless keys are quantized. `flex` is left out on GPUs not in `FLEX_GPUS`.
    """
    T, S = q.shape[-3], k.shape[-3]
    rows = math.prod(q.shape[:-3]) * q.shape[-2]
    # Up to this size, `reference` is as fast on CPU, and compiles faster. On TPU, flex's blocks
    # would be mostly empty.
    is_small = symbols.at_most(T * S, 256**2)
    best: tuple[str, ...]
    if platform.name == "cpu":
        best = ("reference",) if is_small and not computes_in_bfloat16(q.dtype, T, S) else ()
    elif platform.name == "tpu":
        is_long = not any(symbols.at_most(n, SHORTEST - 1) for n in (T, S))
        # For more keys `reference` would write the scores of many rows to main memory.
        is_small = is_small and not (is_long and not symbols.at_most(S, SHORT))
        best = (*["short"] * is_long, *["reference"] * is_small, "flex")
    else:
        takes_flex = not is_small and gpus.capability(platform.device) in FLEX_GPUS
        # `reference` runs large matmuls, but stores the scores two or three times.
        fits = symbols.at_most(T * S, 2048**2) and symbols.at_most(T * S * rows, MOST_SCORES)
        best = ("cudnn", *["flex"] * takes_flex, *["reference"] * fits)
    if isinstance(k, Stored):
        limits = (T, 1), (T * q.shape[-2] // k.shape[-2], 4), (rows, LEAST_HEADS - 1)
        is_many = not any(symbols.at_most(*limit) for limit in limits)
        if platform.name == "gpu" and k.scale is None and is_many:
            best = ("cudnn", "decode", *best[1:])
        else:
            best = ("decode", *best)
    return tuple(dict.fromkeys((*best, "blockwise", "reference")))


def refusal(name: str, reason: str) -> ValueError:
    """Return the error for a named kernel or strategy that does not support a call."""
    return ValueError(
        f"kernel={name!r} can't run this call: {reason}; "
        f"choose kernel='auto', or see flax_mha.explain"
    )


def parse_kernel(kernel: str) -> tuple[str | None, str]:
    """Split a name such as "ring:blockwise" into a strategy, or None, and a kernel."""
    strategy, _, name = str(kernel).rpartition(":")
    if not strategy and name in STRATEGIES:
        strategy, name = name, "auto"
    if name not in ("auto", *KERNELS) or strategy not in ("", *STRATEGIES):
        raise ValueError(
            f"kernel must be 'auto' or one of {list(KERNELS)}, for a sequence sharded over a mesh "
            f"one of {list(STRATEGIES)} too, alone or as in 'ring:blockwise', got {kernel!r}"
        )
    return strategy or None, name
