"""A page of HTML that shows the attention heads of a model on a prompt."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from flax_mha.taps.sown import find, find_weights

_LIMIT = 2_000_000  # bytes


def report(
    path: str | Path, runs: Mapping[str, Any],
    tokens: Sequence[str] | Mapping[str, Sequence[str]] | None = None, *,
    scores: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a page that shows the attention weights of every head, in one run or in two.

    Any browser opens the page, without a network. It stores each weight w in 8 bits, with an error
    of at most about √w/255. A head's entropy is the mean over its queries.

    Args:
      path: the file to write.
      runs: one or two runs by name. Each is the weights [*B, N, T, S] of one example (every B = 1),
        or a tree of them, such as all `intermediates`. If it has `attention_max_logit`, the page
        shows the largest one of each head.
      tokens: names of the tokens, or a dict of them by run. Queries or keys of another number, as
        in cross-attention, have numbers.
      scores: numbers by name, each [layers, heads] or a list by layer; and the result of `detect`.

    Raises:
      ValueError: if weights are missing, negative, not finite or of several examples, if runs,
        names or numbers do not fit each other, or if the page would exceed 2 MB.
    """
    weights = [find_weights(tree) for tree in runs.values()]
    shapes = [{layer: x.shape for layer, x in layers.items()} for layers in weights]
    if len(runs) not in (1, 2) or shapes[0] != shapes[-1]:
        raise ValueError(
            f"runs must be one, or two with the same layers, heads and numbers of tokens, got "
            f"{dict(zip(runs, shapes, strict=True))}; choose prompts of the same number of tokens"
        )
    names = [tokens[run] if isinstance(tokens, Mapping) else tokens for run in runs]
    for layer, (_, *counts) in shapes[0].items():
        if wrong := [len(x) for x in names if x is not None and len(x) not in counts]:
            raise ValueError(
                f"tokens must name the {counts[0]} queries or {counts[1]} keys of "
                f"{layer or 'the layer'}, got {wrong[0]} names; give one for each"
            )
    layers = [{"name": layer, "shape": shape} for layer, shape in shapes[0].items()]
    numbers = _of_runs([*runs.values()], weights) | _of_scores(scores or {}, weights[0])
    for name, (first, *_) in numbers.items():
        heads, counts = ([x.shape[:1] for x in xs] for xs in (weights[0].values(), first))
        if counts != heads:
            raise ValueError(
                f"{name} must have a number for each head, in arrays {heads} by layer, got "
                f"{counts}; give [layers, heads] or a list by layer"
            )
    scale, packed = _pack(weights)
    data = {
        "runs": [*runs], "tokens": names, "layers": layers, "scale": scale, "weights": packed,
        "measures": [{"name": name, "values": _plain(x)} for name, x in numbers.items()],
    }  # fmt: skip
    # Without "<", no token can end the script that holds the data.
    text = json.dumps(data, default=list).replace("<", r"\u003c")
    template = resources.files("flax_mha.analysis").joinpath("report.html").read_text("utf-8")
    page = template.replace("%DATA%", text).encode()
    if len(page) > _LIMIT:
        raise ValueError(
            f"a page must have at most {_LIMIT:,} bytes, got {len(page):,}; give fewer heads, by "
            f"Capture(heads=…), or a shorter prompt"
        )
    Path(path).write_bytes(page)


def _of_runs(trees: Sequence[Any], weights: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Return the entropy and the largest logit of the heads by run and layer."""

    def entropy(w: np.ndarray) -> np.ndarray:
        logs = np.log(w, where=w > 0, out=np.zeros_like(w))
        return -(w * logs).sum(-1).mean(-1)

    numbers = {"entropy": [[*map(entropy, layers.values())] for layers in weights]}
    logits = [find(tree, "attention_max_logit", 2) for tree in trees]
    if all(layers.keys() == weights[0].keys() for layers in logits):
        numbers["max logit"] = [[x.max(-1) for x in layers.values()] for layers in logits]
    return numbers


def _of_scores(scores: Mapping[str, Any], layers: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return scores of both runs by layer. Those of `detect` are by the path of a layer first."""
    detected = {path: x for path, x in scores.items() if isinstance(x, Mapping)}
    numbers = {
        name: [[np.asarray(x, float) for x in xs]]
        for name, xs in scores.items()
        if name not in detected
    }
    for pair in dict.fromkeys(pair for xs in detected.values() for pair in xs):
        # An axis for the batch, so that a leading axis is that of a scan.
        tree = {path: {f"pairs {pair}": xs[pair][..., None, :]} for path, xs in detected.items()}
        by_layer = find(tree, f"pairs {pair}", 1)
        numbers[pair] = [[by_layer.get(name, np.nan * x[:, 0, 0]) for name, x in layers.items()]]
    return numbers


def _plain(x: Any) -> Any:
    """Return lists of numbers, with None for NaN and infinity, which JSON lacks."""
    if isinstance(x, list):
        return [*map(_plain, x)]
    return np.where(np.isfinite(x), x, None).tolist()


def _pack(runs: Sequence[Mapping[str, np.ndarray]]) -> tuple[float, str]:
    """Return the largest weight, and all as bytes 255·√(w/largest), compressed, in base64.

    A second run is stored as its difference from the first, which is mostly 0 after an edit.
    """
    flat = [np.concatenate([x.ravel() for x in layers.values()]) for layers in runs]
    if not all(np.isfinite(x).all() and x.min(initial=0) >= 0 for x in flat):
        raise ValueError("weights must be finite and not negative, got others; leave them out")
    scale = max(1.0, *(float(x.max(initial=0)) for x in flat))
    stored = [np.rint(255 * np.sqrt(x / scale)).astype(np.uint8) for x in flat]
    stored[1:] = [x - stored[0] for x in stored[1:]]
    return scale, base64.b64encode(gzip.compress(b"".join(stored), mtime=0)).decode()
