"""The studio in a real browser: load, tick, compare, export, bad upload, two tabs, keyboard."""

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("dash", reason="the studio needs the extra `web`")

from foretell.samples import transformer
from foretell.studio import serve
from tests.axe import grave, needs_axe
from tests.browser import browser, errors, needs_browser

pytestmark = needs_browser
STEP = Path(__file__).resolve().parents[2] / "docs" / "guides" / "step.txt"
FAST = "faster-host:times=2"


@pytest.fixture(scope="module")
def studio():
    running = serve([STEP])
    yield running
    running.close()


@pytest.fixture(scope="module")
def chromium():
    with browser() as driver:
        yield driver


@pytest.fixture
def page(studio, chromium):
    chromium.get(studio.url)
    until(chromium, lambda: "a step as it is" in text(chromium, "headline"))
    yield chromium
    assert errors(chromium) == []


def until(driver, holds, seconds=20):
    """Wait for something to hold; the last answer tells why it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.05)
    raise AssertionError(driver.find_element("tag name", "body").text[:2000])


def text(driver, name):
    return driver.execute_script(
        "const e = document.getElementById(arguments[0]); return e ? e.innerText : ''", name
    )


def tick(driver, spec):
    driver.find_element("xpath", f"//*[@id='changes']//label[contains(., '{spec}')]//input").click()


def open_tab(driver, name):
    driver.find_element("xpath", f"//*[@role='tab'][contains(., '{name}')]").click()


def test_ticking_changes_the_step(page):
    tick(page, FAST)
    until(page, lambda: "with the changes" in text(page, "headline"))
    assert "shorter" in text(page, "headline")
    tick(page, FAST)
    until(page, lambda: "with the changes" not in text(page, "headline"))


def test_a_change_that_does_not_apply_says_so(page):
    tick(page, "channels-last")
    until(page, lambda: text(page, "problem"))
    tick(page, "channels-last")
    until(page, lambda: not text(page, "problem"))


def test_loading_a_file(page, tmp_path):
    mine = tmp_path / "mine & others.txt"
    mine.write_text(STEP.read_text())
    page.find_element("id", "file").send_keys(str(mine))
    until(page, lambda: "is loaded" in text(page, "upload-says"))
    until(page, lambda: "mine & others.txt" in text(page, "steps"))
    assert page.find_elements("css selector", "#steps b") == []


def test_a_bad_file_is_refused_in_words(page, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    page.find_element("id", "file").send_keys(str(bad))
    until(
        page,
        lambda: (
            "bad.json" in text(page, "upload-says") and "Reading" not in text(page, "upload-says")
        ),
    )
    assert "loaded" not in text(page, "upload-says")
    messages = errors(page)  # a browser notes every refused request
    assert all("400" in message for message in messages)


def test_a_cluster_is_named_and_edited(page):
    field = page.find_element("id", "cluster")
    field.send_keys("dgx-a100:nodes=2\n")
    until(page, lambda: "16 ranks on 2 node" in text(page, "cluster-says"))
    page.find_element("xpath", "//summary[.='Edit it']").click()
    area = page.find_element("id", "cluster-text")
    until(page, lambda: "node" in area.get_attribute("value"))
    page.find_element("id", "use-text").click()
    until(page, lambda: "using the text: 16 ranks" in text(page, "cluster-says"))
    field.clear()
    field.send_keys("/etc/passwd\n")
    until(page, lambda: "is no preset" in text(page, "cluster-says"))


def test_comparing_in_two_tabs(page, studio):
    before = len(studio.desk.scenarios)
    page.find_element("id", "save").click()
    until(page, lambda: len(studio.desk.scenarios) == before + 1)
    first = page.current_window_handle
    page.switch_to.new_window("tab")
    page.get(studio.url)
    until(page, lambda: "a step as it is" in text(page, "headline"))
    tick(page, FAST)  # what is ticked here is not ticked there
    until(page, lambda: "with the changes" in text(page, "headline"))
    page.find_element("id", "save").click()
    until(page, lambda: len(studio.desk.scenarios) == before + 2)
    page.close()
    page.switch_to.window(first)
    assert "with the changes" not in text(page, "headline")
    open_tab(page, "Compare")
    until(page, lambda: "faster-host" in text(page, "compared-table"))
    assert "as it is" in text(page, "compared-table")


def test_exporting_a_report_and_a_trace(page, studio):
    for button, ending in (("report", ".html"), ("trace", ".trace.json.gz")):
        page.find_element("id", button).click()
        until(page, lambda ending=ending: ending in text(page, "exported"), 60)
        name = page.find_element("id", "export-link").get_attribute("href").rsplit("/", 1)[1]
        assert (studio.desk.folder / "out" / name).stat().st_size > 500
        if ending == ".html":
            report = page.find_element("id", "export-link").get_attribute("href")
    page.get(report)
    until(page, lambda: page.execute_script("return document.documentElement.dataset.ready"))


def test_building_a_model_and_searching_layouts(page):
    page.find_element("xpath", "//summary[.='From a model']").click()
    page.find_element("id", "build").click()
    until(page, lambda: text(page, "build-says") == "built", 60)
    page.find_element("id", "cluster").send_keys("a100-80\n")
    open_tab(page, "Layouts")
    gpus = page.find_element("id", "gpus")
    gpus.clear()
    gpus.send_keys("8,16\n")
    page.find_element("id", "run-oracle").click()
    until(page, lambda: "layouts in" in text(page, "job-says"), 90)
    assert "tensor" in text(page, "found-table")
    assert page.find_element("id", "plan-link").get_attribute("href").endswith("best.plan")


def endless(*asked):
    for k in range(10_000):
        asked[-1](f"layout {k}")
        time.sleep(0.01)


def test_a_search_can_be_stopped(page, studio, monkeypatch):
    from foretell.studio import answers

    monkeypatch.setattr(answers, "strategies", endless)
    open_tab(page, "Layouts")
    page.find_element("id", "run-oracle").click()
    until(page, lambda: "layout " in text(page, "job-says") and "s" in text(page, "job-says"))
    until(page, lambda: page.find_element("id", "stop").is_enabled())
    page.find_element("id", "stop").click()
    until(page, lambda: text(page, "job-says") == "stopped")


def test_everything_by_keyboard(page):
    """Tab leads through the page in order, and space ticks a change."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    seen = []
    for _ in range(80):
        ActionChains(page).send_keys(Keys.TAB).perform()
        here = page.switch_to.active_element
        seen.append(here.get_attribute("id") or here.get_attribute("type") or here.tag_name)
        if here.get_attribute("type") == "checkbox":
            ActionChains(page).send_keys(Keys.SPACE).perform()
            until(
                page, lambda: text(page, "problem") or "with the changes" in text(page, "headline")
            )
            break
    for _ in range(80):
        ActionChains(page).send_keys(Keys.TAB).perform()
        if page.switch_to.active_element.get_attribute("id") == "tab-compare":
            break
    ActionChains(page).send_keys(Keys.ENTER).perform()
    until(page, lambda: page.find_element("id", "panel-compare").is_displayed())
    assert not page.find_element("id", "panel-whatif").is_displayed()
    assert {"file", "cluster", "checkbox"} <= set(seen)


def test_every_field_has_a_label(page):
    unnamed = page.execute_script("""
      return [...document.querySelectorAll('input, textarea, button, select')].filter(e =>
        !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim()
        && e.type !== 'hidden').map(e => e.outerHTML.slice(0, 120))""")
    assert unnamed == []


@needs_axe
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page, theme):
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.find_element("css selector", "#steps input").click()  # the first: it has a host
    tick(page, FAST)
    until(page, lambda: "with the changes" in text(page, "headline"))
    page.find_element("id", "save").click()
    for tab in ("What if", "Layouts", "Compare"):
        open_tab(page, tab)
        time.sleep(0.3)
        assert grave(page) == [], tab


def test_nothing_comes_from_elsewhere(page, studio):
    loaded = page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert len(loaded) > 5
    assert [url for url in loaded if not url.startswith(studio.url)] == []


@pytest.mark.slow
def test_fifty_thousand_tasks_answer_within_a_second(studio):
    from foretell.advise import Step
    from foretell.cluster import load
    from foretell.cost import price
    from foretell.studio.desk import foretold

    step = Step(price(transformer(ranks=64, layers=48), load("dgx-a100:nodes=8")), None)
    foretold(step, ("faster:op=gemm,times=3",))
    began = time.perf_counter()
    json.dumps(foretold(step, ("faster:op=gemm,times=2", "faster-host:times=2")))
    assert time.perf_counter() - began < 1.0
