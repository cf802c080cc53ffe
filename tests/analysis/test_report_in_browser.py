"""The page of attention heads in Debian's Chromium, driven as a reader would."""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_mha.analysis import report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
IS_THERE = CHROMIUM and DRIVER and importlib.util.find_spec("selenium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not IS_THERE,
        reason="needs apt-get install chromium chromium-driver, and pip install selenium",
    ),
]

TOKENS = ["</script>", '"quoted"', " the", "\n", ""]
SHOWN = ["</script>", '"quoted"', "·the", "⏎", "∅"]
KEYS = [*"0123456"]  # Names are for five tokens.
RNG = np.random.default_rng(0)


def draw(heads: int, queries: int, keys: int) -> np.ndarray:
    """Return random weights [heads, queries, keys]."""
    return RNG.dirichlet(np.full(keys, 0.3), (heads, queries)).astype(np.float32)


RUNS = {run: [draw(2, 5, 5), draw(3, 5, 7)] for run in ("original", "edited")}
SCORES = [[0.1, 0.9], [0.2, 0.3, -0.4]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium, with logs of its console and of the network."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1500,1300"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Open a page of two runs, and check afterwards that it had no error and sent nothing."""
    from selenium.webdriver.support.wait import WebDriverWait

    models = {
        run: {f"layer_{i}": {"attention_weights": (x[None],)} for i, x in enumerate(layers)}
        for run, layers in RUNS.items()
    }
    report(tmp_path / "page.html", models, TOKENS, scores={"<i>induction": SCORES})
    url = (tmp_path / "page.html").as_uri()
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(url)
    WebDriverWait(browser, 20).until(lambda _: find(browser, ".head :checked"))
    yield browser
    events = [json.loads(event["message"])["message"] for event in browser.get_log("performance")]
    sent = [x["params"] for x in events if x["method"] == "Network.requestWillBeSent"]
    assert {x["request"]["url"] for x in sent} == {url}
    assert browser.get_log("browser") == []


def find(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def text(browser: Any, selector: str) -> str:
    (element,) = find(browser, selector)
    return element.text


def strip(browser: Any, title: str) -> list[Any]:
    """Return the tokens of one side in one run."""
    return find(browser, f'[aria-label="{title}"] .token')


def head(browser: Any, name: str) -> Any:
    """Return the cell of a head in the grid."""
    (cell,) = find(browser, f'.head[title^="{name},"]')
    return cell


def check_numbers(tokens: list[Any], wanted: np.ndarray) -> None:
    """Check the numbers under the tokens against weights."""
    found = [float(token.text.split()[-1]) for token in tokens]
    np.testing.assert_allclose(found, wanted, atol=0.01)
    assert np.all(np.abs(found - wanted) <= np.where(wanted < 0.09, 0.003, 0.01))


def test_a_click_picks_a_head_and_a_token_shows_its_weights(page: Any) -> None:
    from selenium.webdriver import ActionChains

    assert len(find(page, ".head")) == 5
    head(page, "layer 1, head 2").click()
    assert text(page, "#name") == "Layer 1, head 2 (layer_1)"
    queries = strip(page, "queries of original")
    assert [x.text for x in queries] == SHOWN
    ActionChains(page).move_to_element(queries[3]).perform()
    for run, layers in RUNS.items():
        keys = strip(page, f"keys of {run}")
        assert [x.text.split()[0] for x in keys] == KEYS
        check_numbers(keys, layers[1][2, 3])
    ActionChains(page).move_to_element(strip(page, "keys of edited")[6]).perform()
    check_numbers(strip(page, "queries of edited"), RUNS["edited"][1][2, :, 6])


def test_pointing_at_a_pattern_reads_both_runs_and_their_difference(page: Any) -> None:
    from selenium.webdriver import ActionChains

    head(page, "layer 1, head 0").click()
    for canvas in find(page, "#panels canvas"):
        x, y = (2.5 / 7 - 0.5) * canvas.size["width"], (4.5 / 5 - 0.5) * canvas.size["height"]
        ActionChains(page).move_to_element_with_offset(canvas, round(x), round(y)).perform()
        found = text(page, "#readout")
        assert found.startswith("query 4 “∅” → key 2 “2”: original ")
        numbers = [float(x.split()[-1]) for x in found.split(": ")[1].split(", ")]
        a, b = (layers[1][0, 4, 2] for layers in RUNS.values())
        np.testing.assert_allclose(numbers, [a, b, b - a], atol=0.02)


def test_the_grid_shows_either_run_or_their_difference(page: Any) -> None:
    def patterns() -> list[str]:
        script = "return [...document.querySelectorAll('.head canvas')].map(x => x.toDataURL())"
        return page.execute_script(script)

    shown = []
    for option in find(page, "#view option"):
        option.click()
        shown.append(patterns())
    assert len(shown) == 3
    assert all(len({*head}) == 3 for head in zip(*shown, strict=True))
