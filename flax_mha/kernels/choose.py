"""The kernels by name, and the one that takes a call: asked by the call and by `explain`.

A kernel is a module with one function, `lower(q, k, v, spec, platform) -> Lowered | Refusal`:
either a function that computes the call, or the reason why it can't. What it finds out on the way
it keeps for the computation. It is loaded when it is first asked on a platform that it runs on.
"""

import functools
import importlib
import math
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from flax_mha.base import private_jax, symbols
from flax_mha.kernels import derivatives, softmax
from flax_mha.kernels.normalizers import SOFTMAX
from flax_mha.kernels.spec import AttentionSpec, Lowered, Platform, Refusal, Result
from flax_mha.kernels.stored import Stored, dequantize
from flax_mha.kernels.tile_plan import computes_in_bfloat16

# Of all rows and heads, that `auto` lets plain einsums keep on a GPU: 1 GiB of float32.
MOST_SCORES = 2**28
# On a CPU under a traced mask: 64 MiB. With twice as many JAX 0.10 was slower forward.
FEW_SCORES = 2**24

# How the devices that a sequence is divided over come by the keys: each takes all tokens of some
# heads; the keys go round; or each gathers all of them.
STRATEGIES = ("ulysses", "ring", "all_gather")
# The names of kernels, for type checkers: alone, of strategies, and of both.
KernelName: TypeAlias = Literal[
    "auto", "cudnn", "splash", "flex", "blockwise", "checkpointed", "reference", "decode",
    "ulysses", "ring", "all_gather",
    "ulysses:cudnn", "ulysses:splash", "ulysses:flex",
    "ulysses:blockwise", "ulysses:checkpointed", "ulysses:reference", "ulysses:decode",
    "ring:cudnn", "ring:splash", "ring:flex",
    "ring:blockwise", "ring:checkpointed", "ring:reference", "ring:decode",
    "all_gather:cudnn", "all_gather:splash", "all_gather:flex",
    "all_gather:blockwise", "all_gather:checkpointed", "all_gather:reference", "all_gather:decode",
]  # fmt: skip


class Kernel(NamedTuple):
    """A module with `lower`.

    Attributes:
      name: of the module.
      platform: JAX's name of the only one that it runs on; None for all.
      called: what that platform is called in errors.
      takes_result: whether, given the result of these keys and others without sinks, it computes
        the gradients without computing the result again.
      stored: whether it reads `Stored` keys and values as they are.
      normalizes: whether it has other normalizers than the softmax.
      vectors: whether it shows scores the vectors of queries and keys.
      symbolic: whether it takes sizes that are symbols of `jax.export`.
      limit: its derivatives, see `derivatives.limit`; None if it has every one.
    """

    name: str
    platform: str | None = None
    called: str = ""
    takes_result: bool = False
    stored: bool = False
    normalizes: bool = False
    vectors: bool = False
    symbolic: bool = False
    limit: derivatives.Limit | None = None

    def lower(
        self, q: jax.Array, k: Any, v: Any, spec: AttentionSpec, platform: Platform
    ) -> Lowered | Refusal:
        """Prepare the call, or return the reason why the kernel can't run it."""
        if self.platform not in (None, platform.name):
            return Refusal(f"runs on {self.called} only, this is {platform.name}")
        if reason := private_jax.missing(self.name):
            return Refusal(reason)
        if self.limit and derivatives.all_asked():
            return Refusal("has not every derivative, which any_derivative() asks for")
        if spec.normalizer != SOFTMAX and not self.normalizes:
            return Refusal(f"has the softmax alone, got normalizer={spec.normalizer!r}")
        if spec.vectors and not self.vectors:
            names = ", ".join(type(mod).__name__ for mod in spec.scores if mod.vectors)
            return Refusal(f"has no scores that see queries and keys, got {names}")
        if not self.symbolic and symbols.is_symbolic(*q.shape, *k.shape):
            return Refusal(f"needs sizes that are known, got q {q.shape} and k {k.shape}")
        if not self.stored:
            k, v = dequantize(k), dequantize(v)
        if self.limit:
            q, k, v, spec = derivatives.limit(self.limit, self.name, (q, k, v, spec))
        return _module(self.name).lower(q, k, v, spec, platform)


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(f"flax_mha.kernels.{name}")


# In order of preference: kernel="auto" takes the first that does not refuse, see `preference`.
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("cudnn", "gpu", "NVIDIA GPUs", takes_result=True, limit="first"),
        Kernel("splash", "tpu", "TPU", limit="first"),
        Kernel("flex", "tpu", "TPU", takes_result=True, limit="first"),
        Kernel("blockwise", takes_result=True, vectors=True, symbolic=True, limit="inner"),
        Kernel("checkpointed", vectors=True, symbolic=True),
        Kernel("reference", normalizes=True, vectors=True, symbolic=True),
        Kernel("decode", stored=True, vectors=True, symbolic=True, limit="reverse"),
    )
}


@jax.tree_util.register_static
class Explanation(NamedTuple):
    """The kernel that a call takes, and the reasons against others. Prints as a table.

    Attributes:
      chosen: the kernel; None if all that may be taken refuse.
      refused: why the others can't, and why not another strategy.
      strategy: how a sequence divided over a mesh comes by its keys; None if it is not divided.
    """

    chosen: str | None
    refused: dict[str, str]
    strategy: str | None = None

    @property
    def way(self) -> str | None:
        """The strategy, by its name in 0.3."""
        return self.strategy

    def __hash__(self) -> int:  # As part of a tree's structure, which JAX hashes.
        return hash((self.chosen, *self.refused, self.strategy))

    def __str__(self) -> str:
        of_mesh = {self.strategy, *self.refused} & {*STRATEGIES}
        names = [*KERNELS, *(STRATEGIES if of_mesh else ())]
        width = max(map(len, names))
        rows = []
        for name in names:
            why = self.refused.get(name)
            chosen = name in (self.chosen, self.strategy)
            verdict = f"refused: {why}" if why else "chosen" if chosen else "possible"
            rows.append(f"{name:<{width}}  {verdict}")
        return "\n".join(rows)


def run(
    kernel: str, platform: Platform, q: jax.Array, k: Any, v: Any, spec: AttentionSpec,
    result: Result | None = None,
) -> Result:  # fmt: skip
    """Compute a call by the first kernel that takes it; arguments as for `decide`.

    Of a result known already, of these keys and others, compute the gradients alone.

    Raises:
      ValueError: if the kernel that was named refuses.
    """
    explanation, lowered = decide(kernel, q, k, v, spec, platform)
    if explanation.chosen is None or lowered is None:
        raise refusal(kernel, explanation.refused[kernel])
    if result is None:
        return lowered()
    if KERNELS[explanation.chosen].takes_result:
        return lowered(result)
    return softmax.of_part(lowered(), result)


def explain(
    kernel: str, platform: Platform, q: jax.Array, k: Any, v: Any, spec: AttentionSpec
) -> Explanation:
    """Tell which kernel takes a call, and why each of the others can't."""
    return decide(kernel, q, k, v, spec, platform, ask_all=True)[0]


def decide(
    kernel: str, q: jax.Array, k: Any, v: Any, spec: AttentionSpec, platform: Platform,
    ask_all: bool = False,
) -> tuple[Explanation, Lowered | None]:  # fmt: skip
    """Ask one kernel after the other, until one takes the call.

    Args:
      kernel: the name of the only one to ask, or "auto".
      q: [*B, T, N, H].
      k: [*B, S, K, H].
      v: [*B, S, K, Hv].
      spec: the rest of the call.
      platform: what it will run on.
      ask_all: whether to ask the others too, for their reasons.

    Returns:
      The choice, with the refusals of those that were asked; and the call as the chosen one made it
      ready, None if all that may take it refuse.
    """
    of_mask = () if spec.mask is None else (spec.mask, spec.q_pos, spec.k_pos)
    traced = any(isinstance(x, jax.Array) for x in jax.tree.leaves(of_mask))
    names = preference(q, k, platform, traced) if kernel == "auto" else [kernel]
    others = [name for name in KERNELS if name not in names] if ask_all else []
    chosen, taken, refused = None, None, {}
    for name in names + others:
        if chosen and not ask_all:
            break
        lowered = KERNELS[name].lower(q, k, v, spec, platform)
        if isinstance(lowered, Refusal):
            refused[name] = lowered.reason
        elif chosen is None and name in names:
            chosen, taken = name, lowered
    return Explanation(chosen, refused), taken


def preference(
    q: jax.Array, k: jax.Array | Stored, platform: Platform, traced: bool = False
) -> list[str]:
    """Return the kernels, best first, for a call of this size.

    | platform | first of those that do not refuse |
    |---|---|
    | TPU | `reference` up to T·S = 256², the others in their order |
    | CPU | likewise; under a traced mask up to 512² and 2²⁴ for all rows and heads |
    | CPU, bfloat16 | likewise, but only with fewer than 64 queries or keys |
    | GPU | `cudnn`, `reference` up to 2,048² and 2²⁸ for all rows and heads, the others in order |

    For keys of a cache `decode` comes before all of these.
    """
    scores, rows = q.shape[-3] * k.shape[-3], math.prod(q.shape[:-3]) * q.shape[-2]
    if platform.name == "cpu" and computes_in_bfloat16(q.dtype, q.shape[-3], k.shape[-3]):
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


def refusal(name: str, reason: str) -> ValueError:
    """Return the error of a kernel, or a strategy, that was asked for and can't run a call."""
    return ValueError(
        f"kernel={name!r} can't run this call: {reason}; "
        f"choose kernel='auto', or see flax_mha.explain"
    )


def parse_kernel(kernel: str) -> tuple[str | None, str]:
    """Split a name such as "ring:blockwise" into a strategy, None for any, and a kernel."""
    strategy, _, name = str(kernel).rpartition(":")
    if not strategy and name in STRATEGIES:
        strategy, name = name, "auto"
    if name not in ("auto", *KERNELS) or strategy not in ("", *STRATEGIES):
        raise ValueError(
            f"kernel must be 'auto' or one of {list(KERNELS)}, for a sequence divided over a mesh "
            f"one of {list(STRATEGIES)} too, alone or as in 'ring:blockwise', got {kernel!r}"
        )
    return strategy or None, name
