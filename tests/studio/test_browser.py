"""The studio in a real browser: load, tick, compare, export, bad upload, two tabs, keyboard."""

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("flask", reason="the studio needs the extra `web`")

from foretell.studio import serve
from tests.axe import grave, needs_axe
from tests.browser import browser, errors, needs_browser
from tests.transformer import transformer

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
    chromium.get("about:blank")  # what the address holds is not what the last test left
    chromium.get(studio.url)
    until(chromium, lambda: ready(chromium))
    until(chromium, lambda: "current step" in text(chromium, "headline"))
    yield chromium
    assert errors(chromium) == []


def until(driver, holds, seconds=120):
    """Wait for something to hold; the last answer tells why it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.05)
    says = ("problem", "rank-says", "job-says", "build-says", "picked", "upload-says")
    result = {name: text(driver, name)[:300] for name in says}
    raise AssertionError(f"{result}\n{text(driver, 'headline')[:500]}")


def text(driver, name):
    return driver.execute_script(
        "const e = document.getElementById(arguments[0]); return e ? e.innerText : ''", name
    )


def ready(driver):
    return driver.execute_script("return document.documentElement.dataset.ready")


def tick(driver, spec):
    driver.find_element("xpath", f"//*[@id='changes']//label[contains(., '{spec}')]//input").click()


def press(driver, name):
    """Click wherever the button has been scrolled to."""
    driver.execute_script("document.getElementById(arguments[0]).click()", name)


def open_tab(driver, name):
    driver.find_element("xpath", f"//*[@role='tab'][contains(., '{name}')]").click()


def test_ticking_changes_the_step(page):
    tick(page, FAST)
    until(page, lambda: "faster-host" in text(page, "headline"))
    assert "shorter" in text(page, "headline")
    until(page, lambda: "with faster-host" in text(page, "sections"))
    assert FAST in page.execute_script("return decodeURIComponent(location.hash)")
    tick(page, FAST)
    until(page, lambda: "faster-host" not in text(page, "headline"))


def test_the_address_brings_everything_back(page):
    tick(page, FAST)
    until(page, lambda: "faster-host" in text(page, "headline"))
    address = page.current_url
    page.get("about:blank")
    page.get(address)
    until(page, lambda: "faster-host" in text(page, "headline"))
    box = f"//*[@id='changes']//label[contains(., '{FAST}')]//input"
    assert page.find_element("xpath", box).is_selected()


def test_the_step_is_diagnosed(page):
    until(page, lambda: "-bound: " in text(page, "headline"))
    until(page, lambda: "What would help" in text(page, "sections"), 120)  # every change is tried
    titles = [h.text for h in page.find_elements("css selector", "#sections h2")]
    for wanted in ("What would help", "Where the step goes", "Time by module", "Timeline"):
        assert wanted in titles
    assert len(page.find_elements("css selector", "#contents a")) == len(titles)


def test_a_change_that_does_not_apply_says_so(page):
    tick(page, "channels-last")
    until(page, lambda: text(page, "problem"))
    tick(page, "channels-last")
    until(page, lambda: not text(page, "problem"))


def test_an_empty_studio_opens_the_sample_trace(chromium):
    running = serve([])
    try:
        chromium.get(running.url)
        until(chromium, lambda: ready(chromium))
        assert "No step yet" in text(chromium, "empty")
        press(chromium, "sample")
        until(chromium, lambda: "GPU-bound" in text(chromium, "headline"))
        ordered = "return [...document.querySelectorAll('#changes label')].map(e => e.dataset.spec)"
        until(chromium, lambda: "In this order" in text(chromium, "sections"))
        listed = chromium.execute_script(ordered)
        assert listed[0] == "amp:dtype=bf16"  # the best first, what does not apply last
        assert chromium.execute_script(
            "return [...document.querySelectorAll('#changes label')].at(-1).title"
        ).count("Does not apply") == 1  # fmt: skip
        assert errors(chromium) == []
    finally:
        running.close()


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


def choose(driver, name, value):
    driver.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('change'))", name, value,
    )  # fmt: skip


def test_machines_are_chosen_and_edited(page):
    open_tab(page, "Layouts")
    choose(page, "on-kind", "dgx-a100")
    choose(page, "on-count", "16")
    until(page, lambda: "16 × a100-80 on 2 nodes" in text(page, "on-says"))
    page.execute_script("document.querySelector('#machines details').open = true")
    area = page.find_element("id", "on-text")
    assert "node" in area.get_attribute("value")
    page.find_element("xpath", "//*[@id='machines']//button[.='Use this text']").click()
    until(page, lambda: "text " in page.execute_script("return state.text"))
    page.execute_script("arguments[0].value = 'nonsense'", area)
    page.find_element("xpath", "//*[@id='machines']//button[.='Use this text']").click()
    until(page, lambda: "the text" in text(page, "on-says"))


def test_comparing_in_two_tabs(page, studio):
    before = len(studio.desk.scenarios)
    page.find_element("id", "save").click()
    until(page, lambda: len(studio.desk.scenarios) == before + 1)
    first = page.current_window_handle
    page.switch_to.new_window("tab")
    page.get(studio.url)
    until(page, lambda: "current step" in text(page, "headline"))
    tick(page, FAST)  # what is ticked here is not ticked there
    until(page, lambda: "with changes" in text(page, "headline"))
    page.find_element("id", "save").click()
    until(page, lambda: len(studio.desk.scenarios) == before + 2)
    page.close()
    page.switch_to.window(first)
    assert "faster-host" not in text(page, "headline")
    open_tab(page, "Compare")
    until(page, lambda: "faster-host" in text(page, "compared-table"))
    assert "current step" in text(page, "compared-table")


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


def small(page):
    """A small model on a few GPUs, so that a search is short."""
    choose(page, "model", "gpt")
    for name, value in {"layers": 4, "hidden": 256, "heads": 4}.items():
        choose(page, f"size-{name}", str(value))
    choose(page, "on-count", "8")
    until(page, lambda: "8 × h100" in text(page, "on-says"))


def test_layouts_are_found_drawn_and_opened(page):
    open_tab(page, "Layouts")
    assert "Find layouts" in text(page, "layouts-empty")
    small(page)
    page.find_element("id", "explore").click()
    until(page, lambda: "layouts in" in text(page, "job-says"), 120)
    assert "DDP" in text(page, "found-table")
    marks = page.find_elements("css selector", "#charts [role=button]")
    assert len(marks) > 4
    assert "a step" in marks[0].get_attribute("aria-label")
    one = next(m for m in marks if m.get_attribute("aria-label").startswith("ZeRO-1 on"))
    page.execute_script("arguments[0].dispatchEvent(new MouseEvent('click'))", one)
    until(page, lambda: "predicted step" in text(page, "picked"), 60)
    until(page, lambda: "Placement on the machines" in text(page, "plan-sections"))
    press(page, "export-plan")
    until(page, lambda: page.find_elements("id", "plan-link"))
    assert page.find_element("id", "plan-link").get_attribute("href").endswith("best.plan")
    choose(page, "export-to", "torchtitan")
    until(page, lambda: "torchtitan has no zero=1" in text(page, "plan-says"))
    choose(page, "export-to", "megatron")
    until(page, lambda: "--use-distributed-optimizer" in text(page, "settings"))
    assert text(page, "plan-says") == ""
    keep = "//*[@id='picked']//button[.='Save to compare']"
    page.execute_script("arguments[0].click()", page.find_element("xpath", keep))
    until(page, lambda: "see Compare" in text(page, "plan-says"), 60)
    open_tab(page, "Compare")
    until(page, lambda: "gpt:" in text(page, "compared-table"))


def test_a_plan_of_ones_own_becomes_a_step(page):
    open_tab(page, "Layouts")
    small(page)
    choose(page, "plan-pp", "2")
    choose(page, "plan-micro_batch", "1")
    choose(page, "plan-global_batch", "16")
    press(page, "predict")
    until(page, lambda: "Pipeline order" in text(page, "plan-sections"), 60)
    press(page, "build")
    until(page, lambda: "gpt:" in text(page, "steps") and "pp=2" in text(page, "steps"), 60)
    until(page, lambda: page.find_element("id", "panel-step").is_displayed())


def endless(*query):
    for k in range(10_000):
        query[-1](f"layout {k}")
        time.sleep(0.01)


def test_a_search_can_be_stopped(page, studio, monkeypatch):
    from foretell.studio import views

    monkeypatch.setattr(views, "strategies", endless)
    open_tab(page, "Layouts")
    page.find_element("id", "explore").click()
    until(page, lambda: "layout " in text(page, "job-says"))
    until(page, lambda: page.find_element("id", "stop").is_enabled())
    page.find_element("id", "stop").click()
    until(page, lambda: text(page, "job-says") == "stopped")


def test_everything_by_keyboard(page):
    """Tab leads through the page in order, space ticks a change, arrows go from tab to tab."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    seen = []
    page.execute_script("document.activeElement.blur()")
    for _ in range(40):
        ActionChains(page).send_keys(Keys.TAB).perform()
        here = page.switch_to.active_element
        seen.append(here.get_attribute("id") or here.get_attribute("type") or here.tag_name)
        if here.get_attribute("type") == "checkbox":
            ActionChains(page).send_keys(Keys.SPACE).perform()
            until(page, lambda: text(page, "problem") or "with changes" in text(page, "headline"))
            break
    assert seen.index("tab-step") < seen.index("file") < seen.index("checkbox")
    page.execute_script("document.getElementById('tab-step').focus()")
    ActionChains(page).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    until(page, lambda: page.find_element("id", "panel-compare").is_displayed())
    assert not page.find_element("id", "panel-step").is_displayed()


def test_every_field_has_a_label(page):
    unnamed = page.execute_script("""
      return [...document.querySelectorAll('input, textarea, button, select')].filter(e =>
        !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim()
        && e.type !== 'hidden').map(e => e.outerHTML.slice(0, 120))""")
    assert unnamed == []


@needs_axe
@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing_serious(page, theme):
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.find_element("css selector", "#steps input").click()  # the first: it has a host
    tick(page, FAST)
    until(page, lambda: "with changes" in text(page, "headline"))
    until(page, lambda: "Timeline" in text(page, "sections"))
    page.find_element("id", "save").click()
    open_tab(page, "Layouts")
    small(page)
    press(page, "predict")
    until(page, lambda: "Timeline" in text(page, "plan-sections"), 60)
    for tab in ("Step", "Layouts", "Compare"):
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
    from foretell.studio.desk import predicted

    step = Step(price(transformer(ranks=64, layers=48), load("dgx-a100:nodes=8")), None)
    predicted(step, ("faster:op=gemm,times=3",))
    began = time.perf_counter()
    json.dumps(predicted(step, ("faster:op=gemm,times=2", "faster-host:times=2")))
    assert time.perf_counter() - began < 1.0
