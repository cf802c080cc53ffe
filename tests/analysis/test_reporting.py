"""The page of attention heads: its data, its size, and the errors of invalid runs."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_mha.analysis import report, reporting
from flax_mha.taps import sown

RNG = np.random.default_rng(0)


def draw(heads: int, queries: int, keys: int) -> np.ndarray:
    """Return random weights [1, heads, queries, keys]."""
    return RNG.dirichlet(np.full(keys, 0.3), (1, heads, queries)).astype(np.float32)


def tree(*layers: np.ndarray, name: str = "layers_{}") -> dict[str, Any]:
    """Return weights as a model sows them."""
    sow = {name.format(i): {"attention": {"attention_weights": (x,)}} for i, x in enumerate(layers)}
    return {"intermediates": sow}


def read(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the data of a page, and the weights of each run, as the page computes them."""
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text()
    )
    data = json.loads(text)
    stored = np.frombuffer(base64.b64decode(data["stored"]), np.uint8)
    runs = stored.reshape(len(data["runs"]), -1)
    return data, [(x / 255.0) ** 2 * data["scale"] for x in runs]


def test_weights_of_two_runs_are_stored_within_their_error(tmp_path: Path) -> None:
    first, second = [draw(2, 5, 7), draw(3, 4, 4)], [draw(2, 5, 7), 2.5 * draw(3, 4, 4)]
    report(tmp_path / "page.html", {"a": tree(*first), "b": tree(*second)})
    data, runs = read(tmp_path / "page.html")
    assert [x["shape"] for x in data["layers"]] == [[2, 5, 7], [3, 4, 4]]
    (entropy,) = data["measures"]
    one, other, difference = map(np.array, entropy["values"])
    np.testing.assert_array_equal(difference, other - one)
    for found, wanted in zip(runs, (first, second), strict=True):
        wanted = np.concatenate([x.ravel() for x in wanted])
        bound = np.sqrt(wanted * data["scale"]) / 255 + data["scale"] / 510**2 + 1e-6
        assert np.all(np.abs(found - wanted) <= bound)
        assert np.any(found > 0.9)


def test_each_head_has_its_entropy_max_logit_and_given_numbers(tmp_path: Path) -> None:
    weights = draw(2, 5, 5)
    weights[0, 0, 0] = 0  # A fully masked query, whose max logit is −∞.
    run = tree(weights)
    max_logit = RNG.normal(size=(1, 2, 5))
    max_logit[0, :, 0] = max_logit[0, 1] = -np.inf
    run["intermediates"]["layers_0"]["attention"]["attention_max_logit"] = (max_logit,)
    given = {"attribution": np.array([[-1.0, 2]]), "induction": [[0.5, 0.25]]}
    report(tmp_path / "page.html", {"a": run}, scores=given)
    data, _ = read(tmp_path / "page.html")
    found = {x["name"]: x["values"] for x in data["measures"]}
    w = weights[0].astype(np.float64)
    entropy = -(w * np.log(np.where(w > 0, w, 1))).sum(-1).mean(-1)
    np.testing.assert_allclose(found["entropy"][0], entropy, rtol=1e-5)
    assert found["max logit"][0] == [pytest.approx(max_logit[0, 0].max(), rel=1e-6), None]
    assert found["attribution"][0] == [-1, 2]
    assert found["induction"] == [[0.5, 0.25]] * 3


@pytest.mark.parametrize("scan", [False, True])
def test_detected_scores_are_those_of_their_layers(scan: bool, tmp_path: Path) -> None:
    layers = [draw(2, 3, 3) for _ in range(11)]
    pairs = {name: RNG.random((11, 2), np.float32) for name in ("previous", "induction")}
    runs = tree(np.stack(layers), name="layers") if scan else tree(*layers)
    runs["intermediates"]["other"] = {"attention_weights": (draw(1, 3, 3),)}
    detected = (
        {"layers/attention": pairs}
        if scan
        else {f"layers_{i}/attention": {name: x[i] for name, x in pairs.items()} for i in range(11)}
    )
    report(tmp_path / "page.html", {"a": runs}, scores=detected)
    data, _ = read(tmp_path / "page.html")
    found = {x["name"]: x["values"][0] for x in data["measures"]}
    for name, x in pairs.items():
        assert found[name] == [*x.ravel().tolist(), None], "the last layer has no scores"


def test_scanned_layers_are_in_the_order_of_the_model() -> None:
    layers = [draw(2, 3, 3) for _ in range(11)]
    scanned = tree(np.stack(layers), np.stack(layers), name="layers/block_{}")
    scanned["intermediates"]["layers/block_0"]["attention"]["attention_entropy"] = (np.ones(3),)
    found = sown.find_weights(scanned)
    assert [*found][:3] == [f"layers[{i}]/block_{j}/attention" for i, j in ((0, 0), (0, 1), (1, 0))]
    np.testing.assert_array_equal(found["layers[7]/block_1/attention"], layers[7][0])
    twice = {"encoder": {"attention_weights": (layers[0], layers[1])}}
    assert [*sown.find_weights(twice)] == ["encoder[0]", "encoder[1]"]


def test_tokens_cannot_end_the_script_that_holds_them(tmp_path: Path) -> None:
    tokens = ["</script>", "<!--", "\"'&", "%DATA%", "\u2028", "\udc80", "\\"]
    report(tmp_path / "page.html", {"</script><b>": draw(1, 7, 7)}, tokens)
    data, _ = read(tmp_path / "page.html")
    assert data["tokens"] == [tokens]
    assert data["runs"] == ["</script><b>"]
    template = Path(reporting.__file__).with_name("report.html").read_text()
    page = (tmp_path / "page.html").read_text()
    for mark in ("<script", "</script", "<!--", "<b>"):
        assert page.count(mark) == template.count(mark)


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ({"a": {}}, {}, 'an array "attention_weights", got none; give the layer capture='),
        ({"a": np.ones((2, 1, 3, 3))}, {}, r"one example, got \(2, 1, 3, 3\); choose an example"),
        ({}, {}, r"runs must be one, or two .*, got \{\}"),
        ({"a": draw(1, 3, 3), "b": draw(1, 4, 4)}, {}, r"got .*'b': .*4.*; choose prompts"),
        (
            {"a": draw(2, 3, 3)},
            {"scores": {"attribution": [[1.0]]}},
            r"attribution must .* the 2 heads, got 1",
        ),
        (
            {"a": draw(2, 3, 3)},
            {"scores": {"x": []}},
            "x must have a number for each of the 2 heads",
        ),
        ({"a": -draw(2, 3, 3)}, {}, "weights must be finite and not negative"),
        ({"a": np.full((1, 3, 3), np.nan)}, {}, "weights must be finite and not negative"),
    ],
)
def test_invalid_runs_are_refused(runs: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        report(tmp_path / "page.html", runs, **options)
    assert not (tmp_path / "page.html").exists()
