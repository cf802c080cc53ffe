"""The table of kernels, and the choice of a kernel for a call.

A kernel is a module with a function `lower(q, k, v, spec, platform) -> Lowered | Refusal`. It
returns a function that computes the call, or the reason why it cannot. A module is loaded when a
call first asks for it on its platform.
"""

import functools
import importlib
import math
from typing import Any, Literal, NamedTuple

import jax
from typing_extensions import TypeAliasType

from flax_mha.base import private_jax, symbols
from flax_mha.kernels.call import derivatives
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.spec import AttentionSpec, Lowered, Platform, Refusal, Result, Tiled
from flax_mha.kernels.call.stored import Stored, dequantize
from flax_mha.kernels.chips import gpus
from flax_mha.kernels.chips.cpus import computes_in_bfloat16
from flax_mha.kernels.chips.tpus import SHORTEST
from flax_mha.kernels.xla import softmax

# The compute capabilities of GPUs on which the contract of flex has run. `auto` takes it on these
# only. On an H100 its attention of 1,024 tokens took 0.2 to 0.3 of the time of `reference`, but 0.9
# with a `RelativeBias`, and 1.1 with its gradients.
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
# The names of kernels and strategies, for type checkers. `help` shows the name of the type.
KernelName = TypeAliasType("KernelName", Literal[
    "auto", "cudnn", "short", "flex", "splash", "blockwise", "checkpointed", "reference", "decode",
    "ulysses", "usp", "ring", "all_gather",
    "ulysses:cudnn", "ulysses:short", "ulysses:flex", "ulysses:splash",
    "ulysses:blockwise", "ulysses:checkpointed", "ulysses:reference", "ulysses:decode",
    "usp:cudnn", "usp:short", "usp:flex", "usp:splash",
    "usp:blockwise", "usp:checkpointed", "usp:reference", "usp:decode",
    "ring:cudnn", "ring:short", "ring:flex", "ring:splash",
    "ring:blockwise", "ring:checkpointed", "ring:reference", "ring:decode",
    "all_gather:cudnn", "all_gather:short", "all_gather:flex", "all_gather:splash",
    "all_gather:blockwise", "all_gather:checkpointed", "all_gather:reference", "all_gather:decode",
])  # fmt: skip


# The platforms' names in errors.
_CALLED = {"gpu": "NVIDIA GPUs", "tpu": "TPU"}


class Kernel(NamedTuple):
    """A kernel module, and the features that `choose` checks for it.

    Attributes:
      name: the kernel's name.
      module: the module in this folder that has `lower`.
      platforms: JAX's names of its platforms; empty for all.
      takes_result: True if it can compute the gradients from a precomputed result of these and
        other keys, without sinks.
      stored: True if it reads `Stored` keys and values.
      normalizes: True if it supports other normalizers than the softmax.
      vectors: True if it supports scores of query and key vectors, or the platforms where it does.
      turns: True if it takes queries and keys that are yet to be rotated.
      symbolic: True if it supports symbolic sizes of `jax.export`.
      blocks: True if the caller may set the sizes of tiles.
      limit: the derivatives it supports, see `derivatives.Limit`; None for all.
    """

    name: str
    module: str
    platforms: tuple[str, ...] = ()
    takes_result: bool = False
    stored: bool = False
    normalizes: bool = False
    vectors: bool | tuple[str, ...] = False
    turns: bool = False
    symbolic: bool = False
    blocks: bool = False
    limit: derivatives.Limit | None = None

    def lower(
        self, q: jax.Array, k: Any, v: Any, spec: AttentionSpec, platform: Platform
    ) -> Lowered | Refusal:
        """Return a function that computes the call, or the reason why the kernel cannot."""
        if self.platforms and platform.name not in self.platforms:
            called = " and ".join(_CALLED[name] for name in self.platforms)
            return Refusal(f"runs on {called} only, this is {platform.name}")
        if reason := private_jax.missing(self.name):
            return Refusal(reason)
        if self.limit and derivatives.all_asked():
            return Refusal("has not every derivative, which any_derivative() asks for")
        if spec.normalizer != SOFTMAX and not self.normalizes:
            return Refusal(f"has the softmax alone, got normalizer={spec.normalizer!r}")
        has_vectors = self.vectors is True or (self.vectors and platform.name in self.vectors)
        if spec.vectors and not has_vectors:
            names = ", ".join(type(mod).__name__ for mod in spec.scores if mod.vectors)
            return Refusal(f"has no scores that see queries and keys, got {names}")
        if any(spec.blocks) and not self.blocks:
            return Refusal(f"has no blocks to set, got {spec.blocks}")
        if not self.symbolic and symbols.is_symbolic(*q.shape, *k.shape):
            return Refusal(f"needs static sizes, got q {q.shape} and k {k.shape}")
        if not self.stored:
            k, v = dequantize(k), dequantize(v)
        if not self.turns:
            q, k, spec = spec.turned(q, k)
        if self.limit:
            q, k, v, spec = derivatives.limit(self.limit, self.name, (q, k, v, spec))
        return _load(self.module).lower(q, k, v, spec, platform)


@functools.cache
def _load(module: str) -> Any:
    return importlib.import_module(f"flax_mha.kernels.{module}")


_TABLE = (
    Kernel("cudnn", "cudnn", ("gpu",), takes_result=True, stored=True, limit="first"),
    Kernel("short", "flex.short", ("tpu",), turns=True, limit="first"),
    Kernel("flex", "flex", ("tpu", "gpu"), takes_result=True, turns=True,
           blocks=True, limit="first"),
    Kernel("splash", "splash", ("tpu",), limit="first"),
    Kernel("blockwise", "xla.blockwise", takes_result=True, vectors=True, symbolic=True,
           blocks=True, limit="inner"),
    Kernel("checkpointed", "xla.checkpointed", vectors=True, symbolic=True, blocks=True),
    Kernel("reference", "xla.reference", normalizes=True, vectors=True, symbolic=True),
    Kernel("decode", "xla.decode", stored=True, vectors=True, symbolic=True, limit="reverse"),
)  # fmt: skip
# kernel="auto" takes the first that supports the call, in the order of `preference`.
KERNELS = {kernel.name: kernel for kernel in _TABLE}


@jax.tree_util.register_static
class Explanation(NamedTuple):
    """The kernel of a call, and the reasons against other kernels. Prints as a table.

    Attributes:
      chosen: the kernel's name; None if no kernel supports the call.
      refused: the reasons against other kernels and strategies.
      strategy: the context-parallel strategy; None if the sequence is not sharded.
      tile: the queries and keys of a tile of `flex`; None for other kernels.
      why: the reason for these sizes.
    """

    chosen: str | None
    refused: dict[str, str]
    strategy: str | None = None
    tile: tuple[int, int] | None = None
    why: str | None = None

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
            if self.tile and name == self.chosen:
                status += ", in tiles of {} queries × {} keys, {}".format(*self.tile, self.why)
            rows.append(f"{name:<{width}}  {status}")
        return "\n".join(rows)


def run(
    kernel: str, platform: Platform, q: jax.Array, k: Any, v: Any, spec: AttentionSpec,
    result: Result | None = None,
) -> Result:  # fmt: skip
    """Compute a call by the first kernel that supports it. See `decide` for the arguments.

    Given a precomputed result of these and other keys, compute only its gradients.

    Raises:
      ValueError: if the named kernel does not support the call.
    """
    explanation, lowered = decide(kernel, q, k, v, spec, platform)
    if explanation.chosen is None or lowered is None:
        raise refusal(kernel, explanation.refused[kernel])
    if result is None:
        return lowered()
    if KERNELS[explanation.chosen].takes_result:
        return lowered(result)
    return softmax.part_of_result(lowered(), result)


def explain(
    kernel: str, platform: Platform, q: jax.Array, k: Any, v: Any, spec: AttentionSpec
) -> Explanation:
    """Return the kernel for a call, and the reasons against the others."""
    return decide(kernel, q, k, v, spec, platform, ask_all=True)[0]


def decide(
    kernel: str, q: jax.Array, k: Any, v: Any, spec: AttentionSpec, platform: Platform,
    ask_all: bool = False,
) -> tuple[Explanation, Lowered | None]:  # fmt: skip
    """Choose the first kernel that supports a call.

    `kernel` is the name of the only kernel to try, or "auto". q is [*B, T, N, H], k and v are [*B,
    S, K, ·]. `platform` will run the call. With `ask_all`, the other kernels are tried too, for
    their reasons. Returns the choice with the reasons against the tried kernels, and the function
    that computes the call; None if no kernel supports it.
    """
    names = preference(q, k, platform) if kernel == "auto" else [kernel]
    others = [name for name in KERNELS if name not in names] if ask_all else []
    chosen, chosen_call, refused = None, None, {}
    for name in names + others:
        if chosen and not ask_all:
            break
        lowered = KERNELS[name].lower(q, k, v, spec, platform)
        if isinstance(lowered, Refusal):
            refused[name] = lowered.reason
        elif name not in names:
            if kernel == "auto":
                refused[name] = (
                    f"auto takes it only on kinds of GPUs that have run its contract, this is "
                    f"{platform.device}; name it to run it"
                )
        elif chosen is None:
            chosen, chosen_call = name, lowered
    sizes = (chosen_call.tile, chosen_call.why) if isinstance(chosen_call, Tiled) else (None, None)
    return Explanation(chosen, refused, None, *sizes), chosen_call


def preference(q: jax.Array, k: jax.Array | Stored, platform: Platform) -> list[str]:
    """Return the kernels, best first, for a call of this size.

    | platform | the first of these that supports the call |
    |---|---|
    | TPU | `short` for 32 to 512 queries and keys, `reference` up to 256², then the others |
    | CPU | `reference` up to 256², then the others in order |
    | CPU, bfloat16 | the same, but only with fewer than 64 queries or keys |
    | GPU | `cudnn`, `flex` above 256², `reference` up to 2,048² and 2²⁸ scores, then the others |

    With keys of a cache, `decode` comes first. On GPUs it comes after `cudnn` where it would write
    many scores: for several tokens, more than 4 queries of a key/value head, and `LEAST_HEADS`
    heads of all rows, unless keys are quantized. `flex` is left out on GPUs not in `FLEX_GPUS`.
    """
    scores, rows = q.shape[-3] * k.shape[-3], math.prod(q.shape[:-3]) * q.shape[-2]
    if platform.name == "cpu" and computes_in_bfloat16(q.dtype, q.shape[-3], k.shape[-3]):
        first = []
    elif platform.name in ("cpu", "tpu"):
        # Up to this size, `reference` is as fast on CPU, and compiles faster. On TPU, flex's
        # blocks would be mostly empty.
        first = ["reference"] if symbols.at_most(scores, 256**2) else []
        lengths = q.shape[-3], k.shape[-3]
        if platform.name == "tpu" and not any(symbols.at_most(n, SHORTEST - 1) for n in lengths):
            first = ["short", *first]
    else:
        # `reference` runs large matmuls, but stores the scores two or three times.
        fits = symbols.at_most(scores, 2048**2) and symbols.at_most(scores * rows, MOST_SCORES)
        first = ["cudnn", "reference"] if fits else ["cudnn"]
    if isinstance(k, Stored):
        shared = q.shape[-3] * q.shape[-2] // k.shape[-2]
        limits = (q.shape[-3], 1), (shared, 4), (rows, LEAST_HEADS - 1)
        few = any(symbols.at_most(*limit) for limit in limits)
        is_after = platform.name == "gpu" and k.scale is None and not few
        first.insert(int(is_after), "decode")
    held = platform.name == "gpu" and gpus.capability(platform.device) not in FLEX_GPUS
    if platform.name == "gpu" and not held and not symbols.at_most(scores, 256**2):
        first.insert(first.index("cudnn") + 1, "flex")
    return first + [name for name in KERNELS if name not in first and not (held and name == "flex")]


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
