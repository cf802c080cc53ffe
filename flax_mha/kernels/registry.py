"""The kernels by name, each loaded when it is first asked on a platform that it runs on.

A kernel is a module with one function, `lower(q, k, v, spec, platform) -> Lowered | Refusal`:
either a function that computes the call, or the reason why it can't. What it finds out on the way
it keeps for the computation.
"""

import functools
import importlib
from typing import Any, NamedTuple

import jax

from flax_mha.base import private_jax
from flax_mha.base.symbols import is_symbolic
from flax_mha.kernels import derivatives
from flax_mha.kernels.normalizers import SOFTMAX
from flax_mha.kernels.options import Platform
from flax_mha.kernels.spec import AttentionSpec, Lowered, Refusal
from flax_mha.kernels.stored import Stored, dequantize


class Kernel(NamedTuple):
    """A module with `lower`.

    Attributes:
      name: of the module.
      platform: JAX's name of the only one that it runs on; None for all.
      called: what that platform is called in errors.
      recalls: whether, given a result known already, of these keys and others and without sinks, it
        computes the gradients without computing the result again.
      stored: whether it reads `Stored` keys and values as they are.
      normalizes: whether it has other normalizers than the softmax.
      vectors: whether it shows scores the vectors of queries and keys.
      symbolic: whether it takes sizes that are symbols of `jax.export`.
      limit: its derivatives, see `derivatives.limit`; None if it has every one.
    """

    name: str
    platform: str | None = None
    called: str = ""
    recalls: bool = False
    stored: bool = False
    normalizes: bool = False
    vectors: bool = False
    symbolic: bool = False
    limit: derivatives.Limit | None = None

    def lower(
        self,
        q: jax.Array,
        k: jax.Array | Stored,
        v: jax.Array | Stored,
        spec: AttentionSpec,
        platform: Platform,
    ) -> Lowered | Refusal:
        """The call made ready, or the reason why the kernel can't run it."""
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
        if not self.symbolic and is_symbolic(*q.shape, *k.shape):
            return Refusal(f"needs sizes that are known, got q {q.shape} and k {k.shape}")
        if not self.stored:
            k, v = dequantize(k), dequantize(v)
        if self.limit:
            q, k, v, spec = derivatives.limit(self.limit, self.name, (q, k, v, spec))
        return _module(self.name).lower(q, k, v, spec, platform)


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(f"flax_mha.kernels.{name}")


# In order of preference: kernel="auto" takes the first that does not refuse, see `choice`.
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("cudnn", "gpu", "NVIDIA GPUs", recalls=True, limit="first"),
        Kernel("splash", "tpu", "TPU", limit="first"),
        Kernel("flex", "tpu", "TPU", recalls=True, limit="first"),
        Kernel("blockwise", recalls=True, vectors=True, symbolic=True, limit="inner"),
        Kernel("checkpointed", vectors=True, symbolic=True),
        Kernel("reference", normalizes=True, vectors=True, symbolic=True),
        Kernel("decode", stored=True, vectors=True, symbolic=True, limit="reverse"),
    )
}
