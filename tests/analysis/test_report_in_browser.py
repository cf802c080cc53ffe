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
KEYS = ["one", "two", "three", "four", "five", "six", "seven"]
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
    report(tmp_path / "page.html", models, TOKENS, KEYS, scores={"<i>induction": SCORES})
    url = (tmp_path / "page.html").as_uri()
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(url)
    WebDriverWait(browser, 20).until(lambda _: find(browser, ".head[aria-selected=true]"))
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
    """Return the buttons of the tokens of one side in one run."""
    return find(browser, f'[aria-label="{title}"] .token')


def check_numbers(tokens: list[Any], wanted: np.ndarray) -> None:
    """Check the numbers under the tokens against weights."""
    found = [float(token.text.splitlines()[-1]) for token in tokens]
    np.testing.assert_allclose(found, wanted, atol=0.01)
    assert np.all(np.abs(found - wanted) <= np.where(wanted < 0.09, 0.003, 0.01))
    assert all(f"weight {x.text.splitlines()[-1]}" in x.accessible_name for x in tokens)


def focused(browser: Any) -> str:
    return browser.switch_to.active_element.accessible_name


def test_a_click_picks_a_head_and_a_token_shows_its_weights(page: Any) -> None:
    from selenium.webdriver import ActionChains

    assert len(find(page, ".head")) == 5
    cell = find(page, '.head[aria-label^="layer 1, head 2,"]')[0]
    cell.click()
    assert text(page, "#name") == "Layer 1, head 2"
    assert text(page, "#path") == "layer_1"
    assert cell.get_attribute("aria-selected") == "true"
    queries = strip(page, "Queries · original")
    assert [x.text for x in queries] == SHOWN
    ActionChains(page).move_to_element(queries[3]).perform()
    for run, layers in RUNS.items():
        keys = strip(page, f"Keys · {run}")
        assert [x.text.splitlines()[0] for x in keys] == KEYS
        check_numbers(keys, layers[1][2, 3])
    ActionChains(page).move_to_element(strip(page, "Keys · edited")[6]).perform()
    check_numbers(strip(page, "Queries · edited"), RUNS["edited"][1][2, :, 6])


def test_pointing_at_a_pattern_reads_both_runs_and_their_difference(page: Any) -> None:
    from selenium.webdriver import ActionChains

    find(page, '.head[aria-label^="layer 1, head 0,"]')[0].click()
    for canvas in find(page, "#panels canvas"):
        left, top, cell = (canvas.get_property(name) for name in ("left", "top", "cell"))
        x, y = (left + 2.5 * cell, top + 4.5 * cell)
        size = canvas.size
        move = ActionChains(page).move_to_element_with_offset(
            canvas, round(x - size["width"] / 2), round(y - size["height"] / 2)
        )
        move.perform()
        found = text(page, "#readout")
        assert found.startswith("query 4 “∅” → key 2 “three”: original ")
        numbers = [float(x.split()[-1].replace("−", "-")) for x in found.split(": ")[1].split(", ")]
        a, b = (layers[1][0, 4, 2] for layers in RUNS.values())
        np.testing.assert_allclose(numbers, [a, b, b - a], atol=0.02)


def test_the_keyboard_moves_picks_reads_and_goes_back(page: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    def press(*keys: str) -> None:
        ActionChains(page).send_keys(*keys).perform()

    find(page, "#measure option")[1].click()
    find(page, "#top button")[0].click()
    press(Keys.TAB * 5)
    assert focused(page) == "layer 0, head 1, <i>induction 0.90"
    press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert focused(page) == "layer 1, head 2, <i>induction −0.40"
    assert text(page, "#name") == "Layer 0, head 1"
    press(Keys.ENTER)
    assert text(page, "#name") == "Layer 1, head 2"
    assert focused(page) == "query 4 ∅"
    press(Keys.ARROW_LEFT)
    check_numbers(strip(page, "Keys · original"), RUNS["original"][1][2, 3])
    press(Keys.ARROW_DOWN, Keys.END)
    check_numbers(strip(page, "Queries · original"), RUNS["original"][1][2, :, 6])
    press(Keys.ESCAPE, Keys.ARROW_UP)
    assert focused(page).startswith("layer 0, head 1")


def test_themes_differ_and_leave_a_picture(page: Any, tmp_path: Path) -> None:
    def background() -> Any:
        return page.execute_script("return getComputedStyle(document.body).backgroundColor")

    def patterns() -> Any:
        return page.execute_script("return document.querySelector('.head canvas').toDataURL()")

    (toggle,) = find(page, "#theme")
    light = background(), patterns()
    page.save_screenshot(tmp_path / "light.png")
    toggle.click()
    page.save_screenshot(tmp_path / "dark.png")
    assert toggle.get_attribute("aria-pressed") == "true"
    dark = background(), patterns()
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    toggle.click()
    assert (background(), patterns()) == light
    find(page, "#shown button")[2].click()
    assert patterns() != light[1], "the grid shows the difference"


def test_the_page_fits_a_phone(browser: Any, tmp_path: Path) -> None:
    names = [f"token{i}" for i in range(40)]
    tree = {f"layer_{i}": {"attention_weights": (draw(12, 40, 40)[None],)} for i in range(2)}
    kinds = ("attribution", "previous", "first", "duplicate", "induction")
    scores = {kind: RNG.random((2, 12)) for kind in kinds}
    runs = {"a prompt of several words": tree, "another prompt of several words": tree}
    report(tmp_path / "page.html", runs, names, scores=scores)
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        browser.get((tmp_path / "page.html").as_uri())
        browser.implicitly_wait(20)
        find(browser, ".head[aria-selected=true]")
        width = browser.execute_script("return document.documentElement.scrollWidth")
        browser.save_screenshot(tmp_path / "phone.png")
        assert width <= 390
    finally:
        browser.implicitly_wait(0)
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
