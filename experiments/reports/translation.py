"""The report on translation: exact matches, and a picture of the alignment."""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import plots
from experiments.reports import base
from experiments.tasks import dates
from experiments.tasks.dates import Pair
from experiments.tasks.task import Params

DRAWN = 6  # test pairs in the picture


class Report(base.Report):
    """The report on `experiments.tasks.translation.Translation`."""

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Return the exact matches among held-out pairs, and in the style not trained on."""
        text = f"exact match: {self.score(metrics['exact'].mean())} of held-out pairs"
        if "exact_unseen" in metrics:
            style = " ".join(dates.UNSEEN)
            text += f", {self.score(metrics['exact_unseen'].mean())} in the unseen style {style}"
        return text

    def draw(self, params: Params, workdir: Path) -> None:
        """Draw `alignment.png`: the weights of each output's characters over their sources."""
        task, pairs = self.task, drawn(self.task.split.test)
        batch = task.arrays(pairs)

        @jax.jit
        def observe(params: Params) -> tuple[jax.Array, Any]:
            found = task.translate(params, batch["source"], batch["length"]).tokens
            observed = {**batch, "target": found}
            return found, task.logits(params, observed, sow_weights=True, mutable="intermediates")

        found, (_, sown) = jax.device_get(observe(params))
        last = sown["intermediates"]["decoder"]["decoder"]
        last = last[f"layers_{task.config.model.decoder_layers - 1}"]["cross_attention"]
        weights = last["attention_weights"][0].mean(axis=1)  # [n, T, S], over the heads
        plots.alignment(
            workdir / "alignment.png",
            [source for source, _ in pairs],
            [task.vocabulary.decode(tokens) for tokens in found],
            [target for _, target in pairs],
            weights, "weight, mean over the heads of the last layer",
        )  # fmt: skip


def drawn(pairs: Sequence[Pair]) -> list[Pair]:
    """Return pairs in various scripts for a picture, scripts of its font first."""
    first: dict[str, Pair] = {}
    for pair in pairs:
        letter = next(filter(str.isalpha, pair[0]), None)
        if letter:
            first.setdefault(unicodedata.name(letter, "").split(" ")[0], pair)
    various = dict.fromkeys([*first.values(), *pairs])
    return sorted(various, key=lambda pair: not plots.drawable(pair[0]))[:DRAWN]
