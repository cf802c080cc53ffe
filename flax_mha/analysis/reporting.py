"""A page of HTML that shows the attention heads of a model on a prompt."""

import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from flax_mha.taps.sown import find, find_weights

Layers: TypeAlias = Mapping[str, np.ndarray]


def report(
    path: str | Path, runs: Mapping[str, Any],
    tokens: Sequence[str] | Mapping[str, Sequence[str]] | None = None, *,
    scores: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a page that shows the attention weights of every head, in one run or in two.

    Any browser opens the page, without a network. It stores each weight w in 8 bits (1.3 bytes of
    the file), with an error of at most about √w/255. A head's entropy is the mean over its queries.

    Args:
      path: the file to write.
      runs: one or two runs by name. Each is the weights [*B, N, T, S] of one example (every B = 1),
        or a tree such as all `intermediates`, perhaps with `attention_max_logit`.
      tokens: names of the tokens, or a dict of them by run. Queries or keys of another number, as
        in cross-attention, are numbered.
      scores: numbers by name, each [layers, heads] or a list by layer; and the result of `detect`.

    Raises:
      ValueError: if weights are missing, negative, not finite or of several examples, or if runs or
        numbers do not fit each other.
    """
    weights = [find_weights(tree) for tree in runs.values()]
    shapes = [{layer: x.shape for layer, x in layers.items()} for layers in weights]
    if len(runs) not in (1, 2) or shapes[0] != shapes[-1]:
        raise ValueError(
            f"runs must be one, or two with the same layers, heads and numbers of tokens, got "
            f"{dict(zip(runs, shapes, strict=True))}; choose prompts of the same number of tokens"
        )
    measures = _measures([*runs.values()], weights, scores or {})
    heads = sum(N for N, *_ in shapes[0].values())
    for name, (numbers, *_) in measures.items():
        if len(numbers) != heads:
            raise ValueError(
                f"{name} must have a number for each of the {heads} heads, got {len(numbers)}; "
                f"give [layers, heads] or a list by layer"
            )
    flat = [np.concatenate([x.ravel() for x in layers.values()]) for layers in weights]
    if not all(np.isfinite(x).all() and x.min(initial=0) >= 0 for x in flat):
        raise ValueError("weights must be finite and not negative, got others; leave them out")
    largest = max(1.0, *(float(x.max(initial=0)) for x in flat))
    # Small weights are the more exact: a byte is 255·√(w/largest).
    stored = np.rint(255 * np.sqrt(np.stack(flat) / largest)).astype(np.uint8)
    data = {
        "runs": [*runs],
        "tokens": [tokens[run] if isinstance(tokens, Mapping) else tokens for run in runs],
        "layers": [{"name": layer, "shape": shape} for layer, shape in shapes[0].items()],
        "scale": largest, "stored": base64.b64encode(stored.tobytes()).decode(),
        "measures": [{"name": name, "values": _by_view(x)} for name, x in measures.items()],
    }  # fmt: skip
    # Without "<", no token can end the script that holds the data.
    text = json.dumps(data, default=list).replace("<", r"\u003c")
    page = resources.files("flax_mha.analysis").joinpath("report.html").read_text("utf-8")
    Path(path).write_text(page.replace("%DATA%", text), "utf-8")


def _measures(
    trees: Sequence[Any], weights: Sequence[Layers], scores: Mapping[str, Any]
) -> dict[str, list[np.ndarray]]:
    """Return numbers of all heads by name: in each run, or one array for all runs.

    The result of `detect` in scores is by the path of a layer first.
    """

    def entropy(w: np.ndarray) -> np.ndarray:
        return -(w * np.log(np.where(w > 0, w, 1))).sum(-1).mean(-1)

    measures: dict[str, Any] = {"entropy": [map(entropy, layers.values()) for layers in weights]}
    logits = [find(tree, "attention_max_logit", 2) for tree in trees]
    if all(layers.keys() == weights[0].keys() for layers in logits):
        measures["max logit"] = [[x.max(-1) for x in layers.values()] for layers in logits]
    detected = {path: x for path, x in scores.items() if isinstance(x, Mapping)}
    measures |= {name: [x] for name, x in scores.items() if name not in detected}
    # An axis for the batch, so that a leading axis is that of a scan.
    tree = jax.tree.map(lambda x: x[..., None, :], detected)
    for pair in dict.fromkeys(itertools.chain(*detected.values())):
        found = find(tree, pair, 1)
        layers = weights[0].items()
        measures[pair] = [[found.get(name, np.nan * x[:, 0, 0]) for name, x in layers]]
    return {
        name: [np.concatenate([*map(np.ravel, layers), []]) for layers in runs]
        for name, runs in measures.items()
    }


def _by_view(runs: Sequence[np.ndarray]) -> list[Any]:
    """Return numbers in each run and their difference, None for NaN and ∞, which JSON lacks.

    Numbers that are not of a run are the same in all views.
    """
    with np.errstate(invalid="ignore"):
        views = [*runs, runs[1] - runs[0]] if len(runs) > 1 else [*runs] * 3
    return [np.where(np.isfinite(x), x, None).tolist() for x in views]
