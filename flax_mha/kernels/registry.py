"""The kernels by name, each loaded when it is first asked on a platform that it runs on."""

import functools
import importlib
from typing import Any, NamedTuple

import jax

from flax_mha import private
from flax_mha.kernels.spec import AttentionSpec, Result


class Kernel(NamedTuple):
    """A module with `refuses` and `attend`, see `flax_mha.kernels`.

    Attributes:
      name: of the module.
      platform: JAX's name of the only one that it runs on; None for all.
      called: what that platform is called in errors.
    """

    name: str
    platform: str | None = None
    called: str = ""

    def refuses(
        self, q: jax.Array, k: Any, v: Any, spec: AttentionSpec, platform: str
    ) -> str | None:
        """The reason why the kernel can't run the call, or None."""
        if self.platform not in (None, platform):
            return f"runs on {self.called} only, this is {platform}"
        reason = private.missing(self.name)
        return reason or _module(self.name).refuses(q, k, v, spec)

    def attend(self, q: jax.Array, k: Any, v: Any, spec: AttentionSpec, *known: Result) -> Result:
        """What the kernel computes, of a call that it does not refuse."""
        return _module(self.name).attend(q, k, v, spec, *known)


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(f"flax_mha.kernels.{name}")


# In order of preference: kernel="auto" takes the first that does not refuse, see `choice`.
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("cudnn", "gpu", "NVIDIA GPUs"),
        Kernel("splash", "tpu", "TPU"),
        Kernel("flex", "tpu", "TPU"),
        Kernel("blockwise"),
        Kernel("reference"),
        Kernel("decode"),
    )
}
