"""A page of HTML that shows the attention heads of a model on a prompt."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from flax_mha.taps.sown import find, find_weights

Names: TypeAlias = Sequence[str] | Mapping[str, Sequence[str]]
_LIMIT = 2_000_000  # bytes


def report(
    path: str | Path, runs: Mapping[str, Any], tokens: Names | None = None,
    kv_tokens: Names | None = None, *, scores: Mapping[str, Any] | None = None,
    title: str = "Attention heads",
) -> None:  # fmt: skip
    """Write a page that shows the attention weights of every head, in one run or in two.

    The page is one file, for any browser, without a network. It stores each weight w in 8 bits,
    with an error of about √w/255 at most. The entropy of a head is the mean over its queries.

    Args:
      path: the file to write.
      runs: one or two runs by name, such as an original and an edited one. Each is the weights of
        one example [*B, N, T, S] with every B = 1, or a tree of them, such as all `intermediates`.
        The largest `attention_max_logit` of each head is shown if the tree has them.
      tokens: T names of the queries, or a dict of them by run.
      kv_tokens: S names of the keys, or a dict of them by run (default: `tokens`).
      scores: a number for each head, [layers, heads] or a list by layer, by name; and those that
        `detect` returns.
      title: the title of the page.

    Raises:
      ValueError: if there are no weights, they are of several examples, not finite or negative,
        the runs have different shapes, names or numbers do not fit, or the page passes 2 MB.
    """
    found = [find_weights(tree) for tree in runs.values()]
    shapes = [{layer: x.shape for layer, x in layers.items()} for layers in found]
    if len(runs) not in (1, 2) or shapes[0] != shapes[-1]:
        raise ValueError(
            f"runs must be one, or two with the same layers, heads and numbers of tokens, got "
            f"{dict(zip(runs, shapes, strict=True))}; choose prompts of the same number of tokens"
        )
    given = (tokens, tokens if kv_tokens is None else kv_tokens)
    names = [[x[run] if isinstance(x, Mapping) else x for x in given] for run in runs]
    layers = [
        {"name": layer, "shape": shape, "sides": [_sides(layer, shape, each) for each in names]}
        for layer, shape in shapes[0].items()
    ]
    scale, weights = _pack(found)
    data = {"title": title, "runs": [*runs], "tokens": names, "layers": layers, "scale": scale}
    data |= {"measures": _measures([*runs.values()], found, scores or {}), "weights": weights}
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


def _sides(layer: str, shape: Sequence[int], names: Sequence[Names | None]) -> list[int]:
    """Return which names a layer's queries and keys have: 0 for tokens, 1 for kv_tokens."""
    counts = [None if x is None else len(x) for x in names]
    if counts[0] is None:
        return [0, 1]
    if not {*shape[1:]} <= {*counts}:
        raise ValueError(
            f"tokens and kv_tokens must name the {shape[1]} queries and {shape[2]} keys of "
            f"{layer or 'the layer'}, got {counts} names; give one for each"
        )
    return [int(shape[1] != counts[0]), int(shape[2] == counts[1])]


def _measures(
    trees: Sequence[Any], found: Sequence[Mapping[str, np.ndarray]], scores: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return all numbers of the heads: lists by layer for each run, or one list for both."""
    numbers = {"entropy": [[*map(_entropy, layers.values())] for layers in found]}
    sown = [find(tree, "attention_max_logit", 2) for tree in trees]
    if all(each.keys() == found[0].keys() for each in sown):
        numbers["max logit"] = [[x.max(-1) for x in each.values()] for each in sown]
    given = _by_name(scores, found[0])
    numbers |= {name: [[np.asarray(x, float) for x in values]] for name, values in given.items()}
    heads = [x.shape[:1] for x in found[0].values()]
    for name, (first, *_) in numbers.items():
        if [x.shape for x in first] != heads:
            raise ValueError(
                f"{name} must have a number for each head, in arrays {heads} by layer, got "
                f"{[x.shape for x in first]}; give [layers, heads] or a list by layer"
            )

    def plain(x: np.ndarray) -> list[float | None]:
        return np.where(np.isfinite(x), x, None).tolist()  # JSON has no infinity.

    return [
        {"name": name, "values": [[*map(plain, layers)] for layers in each]}
        for name, each in numbers.items()
    ]


def _by_name(scores: Mapping[str, Any], layers: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return scores by name, also if they are by layer and name, as `detect` returns them."""
    detected = {layer: x for layer, x in scores.items() if isinstance(x, Mapping)}
    by_name = {name: x for name, x in scores.items() if name not in detected}
    for pair in dict.fromkeys(name for each in detected.values() for name in each):
        # An axis for the batch, so that a leading one is that of a scan.
        tree = {layer: {f"pairs {pair}": x[pair][..., None, :]} for layer, x in detected.items()}
        by_layer = find(tree, f"pairs {pair}", 1)
        by_name[pair] = [by_layer.get(name, np.nan * x[:, 0, 0]) for name, x in layers.items()]
    return by_name


def _entropy(weights: np.ndarray) -> np.ndarray:
    """Return the entropy of each head [N], the mean over its queries."""
    logs = np.log(weights, where=weights > 0, out=np.zeros_like(weights))
    return -(weights * logs).sum(-1).mean(-1)


def _pack(runs: Sequence[Mapping[str, np.ndarray]]) -> tuple[float, str]:
    """Return the largest weight, and all as bytes 255·√(w/largest), compressed, in base64.

    A second run is stored as its difference from the first, which after an edit is mostly 0.
    """
    flat = [np.concatenate([x.ravel() for x in layers.values()]) for layers in runs]
    if not all(np.isfinite(x).all() and x.min(initial=0) >= 0 for x in flat):
        raise ValueError("weights must be finite and not negative, got others; leave them out")
    scale = max(1.0, *(float(x.max(initial=0)) for x in flat))
    stored = [np.rint(255 * np.sqrt(x / scale)).astype(np.uint8) for x in flat]
    stored[1:] = [x - stored[0] for x in stored[1:]]
    return scale, base64.b64encode(gzip.compress(b"".join(stored), mtime=0)).decode()
