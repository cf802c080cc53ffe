"""The races: contestants that run against each other, with their cases."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from experiments.benchmark import cases
from experiments.benchmark.cases import Case
from experiments.benchmark.contestants import BASELINES, CONTESTANTS

CANONICAL = (128, 1024, 4096)
QUICK = {"layer": ("ours", "linen", "torch-sdpa"), "core": ("ours", "jax-xla", "torch-sdpa")}
QUICK_MEMORY = ("layer", "backward")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings from the flags.

    Attributes:
      parts: the parts to time, from `cases.PARTS`.
      passes: the passes to time, from `cases.PASSES`.
      masks: the masks, from `cases.MASKS`.
      dtypes: the dtypes, from `cases.DTYPES`.
      lengths: the sequence lengths T.
      batch: the batch size B; None to derive it from tokens.
      tokens: the tokens per batch; None for 2,048.
      heads: the number of attention heads.
      features: the number of model features.
      window: the number of near tokens that a query sees; 0 for all.
      documents: the documents packed into each sequence of the mask "packed".
      kv_heads: the key/value heads of cores; 0 for all heads.
      contestants: the names of the contestants; None for all.
      memory: the lengths at which peak memory and compile time are measured.
      quick: True for long cores only, and memory only of whole layers' backward pass.
      extras: True for further races: a window, bfloat16, a long sequence.
    """

    parts: Sequence[str] = cases.PARTS
    passes: Sequence[str] = cases.PASSES
    masks: Sequence[str] = ("causal", "full")
    dtypes: Sequence[str] = ("float32", "bfloat16")
    lengths: Sequence[int] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    batch: int | None = None
    tokens: int | None = None
    heads: int = 8
    features: int = 512
    window: int = 0
    documents: int = 8
    kv_heads: int = 0
    contestants: Sequence[str] | None = None
    memory: Sequence[int] = (128, 1024, 4096, 16384)
    quick: bool = False
    extras: bool = True


class Entry(NamedTuple):
    """A contestant with its case and its label in the tables."""

    label: str
    contestant: str
    case: Case


class Race(NamedTuple):
    """Entries that run in turns.

    Attributes:
      title: the table's title.
      entries: the contestants.
      baseline: the label of the entry that the others are compared with.
      weigh: True to measure memory and compile time too.
      extra: True for a race beyond the cases of the flags.
    """

    title: str
    entries: tuple[Entry, ...]
    baseline: str
    weigh: bool = False
    extra: bool = False


def plan(settings: Settings) -> list[Race]:
    """Return the races, short ones first."""
    found = [
        Race(
            str(case),
            tuple(Entry(name, name, case) for name in _names(settings, part)),
            BASELINES[part],
            T in settings.memory and not (settings.quick and (part, passes) != QUICK_MEMORY),
        )
        for T in sorted(settings.lengths)
        for part in settings.parts
        for dtype in settings.dtypes
        for mask in settings.masks
        for passes in settings.passes
        if _names(settings, part) and not (settings.quick and part == "core" and T < 1024)
        for case in [_case(settings, part, passes, T, mask, dtype)]
    ]
    return found + (_extras(settings) if settings.extras else [])


def _names(settings: Settings, part: str) -> list[str]:
    names = list(CONTESTANTS[part])
    if settings.contestants:
        names = [name for name in names if name in settings.contestants]
    elif settings.quick:
        names = [name for name in names if name in QUICK[part]]
    return names


def _case(
    settings: Settings,
    part: str,
    passes: str,
    T: int,
    mask: str = "causal",
    dtype: str = "float32",
    window: int | None = None,
) -> Case:
    return Case(
        part=part,
        backward=passes == "backward",
        causal=mask != "full",
        B=settings.batch or cases.batch_for(T, settings.tokens),
        T=T,
        dtype=dtype,
        N=settings.heads,
        D=settings.features,
        window=settings.window if window is None else window,
        documents=settings.documents if mask == "packed" else 0,
        K=settings.kv_heads,
    )


def _extras(settings: Settings) -> list[Race]:
    """Return the races beside the comparison with peers."""
    races = []
    longest = max(CANONICAL)
    for passes in settings.passes:
        alone, window = (
            Entry(label, "ours-blockwise", _case(settings, "core", passes, longest, window=w))
            for label, w in (("causal", 0), ("window 256", 256))
        )
        races.append(_extra("a window against causal alone", (alone, window)))
        for T in CANONICAL:
            entries = tuple(
                Entry(dtype, "ours", _case(settings, "layer", passes, T, dtype=dtype, window=0))
                for dtype in ("float32", "bfloat16")
            )
            races.append(_extra("ours in bfloat16", entries))
    case = _case(settings, "core", "forward", 8 * longest, window=0)
    races.append(_extra("a long sequence", (Entry("ours", "ours", case),)))
    return races


def _extra(title: str, entries: tuple[Entry, ...]) -> Race:
    case = entries[0].case
    name = f"{title}: {case.part}, {case.passes}, B={case.B} T={case.T}"
    return Race(name, entries, entries[0].label, weigh=True, extra=True)
