"""The choice between context-parallel strategies, for a sequence sharded over devices.

Inside attention, `ulysses` shards heads in place of positions over all mesh axes of `length`, `usp`
over its last ones. Over the other axes, `usp` and `ring` pass keys around, `all_gather` gathers
them.

Source: Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative
AI", 2024.
"""

from typing import Any

from flax_mha.base.shapes import Dims
from flax_mha.kernels import choose
from flax_mha.kernels.call.normalizers import SOFTMAX


def refusals(kernel: str, normalizer: str, division: Any, dims: Dims) -> dict[str, str]:
    """Return the reasons against context-parallel strategies for a call, by name.

    `division` is the call's `shards.Division`.
    """
    refused: dict[str, str] = {}
    if division.devices == 1:
        return refused
    for name in ("ulysses", "usp", "ring"):
        divided = division.inside(name, dims)
        if name == "usp" and divided is division:
            refused[name] = (
                f"it needs positions over several mesh axes, such as the rule "
                f"('length', ('outer', 'inner')), got {division.length!r}"
            )
        elif divided is not division and not divided.divides_heads(dims):
            refused[name] = (
                f"it divides heads over the {divided.head_devices} devices that divide heads or "
                f"queries, and there are {dims.N} query heads and {dims.K} key/value heads"
            )
        elif name == "ulysses":
            continue
        elif dims.S % divided.devices:
            refused[name] = f"{dims.S} keys do not divide over {divided.devices} devices"
        elif normalizer != SOFTMAX:
            refused[name] = f"it merges parts of a softmax, got normalizer={normalizer!r}"
        elif kernel == "checkpointed":
            refused[name] = "it has not every derivative, which this call asks for"
    return refused


def pick_strategy(kernel: str, normalizer: str, division: Any, dims: Dims) -> str | None:
    """Return the named strategy or the best one, or None if the sequence is not sharded.

    1. `ulysses`: every device has equal work under any mask and order of tokens.
    2. `all_gather`, if all keys and values take no more memory than a device's queries. It then
       sends least, but under a causal mask the last device computes twice the mean.
    3. `usp`: r steps on r devices of the ring and u of the heads, which send (r − 1)/(r·u) of k and
       v and (u − 1)/(r·u²) of q, k, v and out. If T = S, `ring` sends at least as much.
    4. `ring`, which also shards the memory of keys and values.

    Raises:
      ValueError: if the named strategy does not support the call.
    """
    if division.devices == 1:
        return None
    refused = refusals(kernel, normalizer, division, dims)
    strategy, _ = choose.parse_kernel(kernel)
    if strategy in refused:
        raise choose.refusal(strategy, refused[strategy])
    small = dims.S * dims.K * division.devices <= dims.T * dims.N
    best = ("all_gather", "usp", "ring") if small else ("usp", "ring", "all_gather")
    return strategy or next(name for name in ("ulysses", *best) if name not in refused)
