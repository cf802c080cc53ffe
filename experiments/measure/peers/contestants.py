"""The contestants of the races: layers, and attention alone."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax

from experiments.measure.peers import cores, layers, torch_peers
from experiments.measure.peers.cases import Case
from experiments.measure.timing import RefusalError, Work
from flax_mha.kernels import KERNELS


class Contestant(NamedTuple):
    """An implementation of a case.

    Attributes:
      build: a function from the case to the work, or a RefusalError.
      keeps_scores: the platforms on which memory grows with T², so that too large cases are
        refused.
      module: the module that must be installed.
    """

    build: Callable[[Case], Work]
    keeps_scores: Literal["", "cpu", "anywhere"] = ""
    module: str = "jax"


# The denominators of all ratios.
BASELINES = {"layer": "linen", "core": "jax-xla"}

CONTESTANTS: dict[str, dict[str, Contestant]] = {
    "layer": {
        "ours": Contestant(layers.ours),
        "linen": Contestant(layers.linen, keeps_scores="anywhere"),
        "nnx": Contestant(layers.flax_nnx, keeps_scores="anywhere"),
        "torch-sdpa": Contestant(torch_peers.linear_sdpa, module="torch"),
        "torch-mha": Contestant(torch_peers.multihead_attention, module="torch"),
        "equinox": Contestant(layers.equinox, keeps_scores="anywhere", module="equinox"),
        "haiku": Contestant(layers.haiku, keeps_scores="anywhere", module="haiku"),
        "keras": Contestant(layers.keras, keeps_scores="cpu", module="keras"),
    },
    "core": {
        "ours": Contestant(cores.ours),
        **{
            f"ours-{name}": Contestant(
                functools.partial(cores.ours, kernel=name),
                keeps_scores="anywhere" if name == "reference" else "",
            )
            for name in KERNELS
        },
        "jax-xla": Contestant(functools.partial(cores.jax_nn, implementation="xla"), "anywhere"),
        "jax-cudnn": Contestant(functools.partial(cores.jax_nn, implementation="cudnn")),
        "linen": Contestant(cores.linen, keeps_scores="anywhere"),
        "torch-sdpa": Contestant(torch_peers.core, module="torch"),
        "torch-flex": Contestant(torch_peers.flex, module="torch"),
        "tokamax": Contestant(cores.tokamax, keeps_scores="cpu", module="tokamax"),
        "fa4-jax": Contestant(cores.fa4, keeps_scores="cpu", module="fa4_jax"),
    },
}


def build(name: str, case: Case, free: int | None = None) -> Work:
    """Return the work of a contestant for a case.

    Args:
      name: a name in CONTESTANTS[case.part].
      case: the case to compute.
      free: the free bytes of memory; a case that needs more is refused.

    Raises:
      RefusalError: if it is not installed, does not support the case, or needs too much memory.
    """
    contestant = CONTESTANTS[case.part][name]
    if importlib.util.find_spec(contestant.module) is None:
        raise RefusalError(f"{contestant.module} is not installed")
    keeps = contestant.keeps_scores in ("anywhere", jax.default_backend())
    needs = case.score_bytes() if keeps else 0
    if free is not None and needs > free:
        raise RefusalError(f"needs about {needs / 2**30:.0f} GiB, {free / 2**30:.0f} are free")
    return contestant.build(case)


def names() -> list[str]:
    """Return the names of all contestants, without repetition."""
    return list(dict.fromkeys(name for group in CONTESTANTS.values() for name in group))
