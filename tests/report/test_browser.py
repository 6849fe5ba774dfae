"""The page in a real browser: it opens, is drawn, answers to keys and mouse, never complains."""

import json
import time

import pytest

from foretell.advise import Step
from foretell.cluster import load
from foretell.plan import Plan
from foretell.report import layouts
from foretell.report.drawings import drawn_plan, drawn_schedule
from foretell.report.page import Content, write
from foretell.search.schedule import schedule, shape
from foretell.simulate import Timeline, simulate
from foretell.survey.diagnosis import diagnose
from foretell.survey.window import window
from tests.axe import grave, needs_axe
from tests.browser import browser, errors, needs_browser
from tests.transformer import transformer

pytestmark = needs_browser
HOSTILE = "<img src=x onerror=document.title='taken'>"


def drawings():
    """A plan on two nodes, one whose layers are dealt out, layouts and a schedule."""
    buckets, regions = ((HOSTILE, "b"), ("c",)), (("relu", "add"), ("mul", "relu*"))
    regular = Plan(dp=8, tp=2, buckets=buckets, regions=regions)
    mixed = Plan(groups=(("a", "b", "all-reduce", "0:3", "6:1"),), global_batch=4)
    rows = [{"gpus": n, "strategy": s, "step_s": 1.0 / n, "peak_bytes": 1e9, "plan": f"dp={n}"}
            for n in (8, 16) for s in ("data", "tensor")]  # fmt: skip
    answer = schedule(shape("v:devices=2"), micro_batches=4).answer()
    sizes = {HOSTILE: 1e6, "b": 2e6, "c": 3e6}
    return {
        "plans": [drawn_plan(regular, "regular", load("dgx-a100:nodes=2"), sizes=sizes),
                  drawn_plan(mixed, "mixed", load("heterog-8"))],
        "oracle": [layouts.layouts({"rows": rows}, "layouts")],
        "schedules": [drawn_schedule(answer, "schedule")],
    }  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    graph = transformer(ranks=6, layers=2)
    with graph.edit() as edit:
        edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-4)
    before = simulate(edit.graph)
    with before.graph.edit("faster") as again:
        again.set(again.select(kind="kernel"), seconds=5e-5)
    measured = Timeline(before.graph, before.start * 1.1, before.end * 1.1)
    advice = {
        "baseline_s": 0.02,
        "together": None,
        "refused": [{"change": HOSTILE, "reason": "x"}],
        "ranked": [
            {
                "changes": ["tf32"],
                "predicted_s": 0.01,
                "low_s": 0.008,
                "high_s": 0.012,
                "gain": 0.5,
                "peak_bytes": 1e9,
                "why": "because",
                "code": [],
            }
        ],
    }
    figures = [{"what": HOSTILE, "seconds": 1.0}]
    step = Step(edit.graph, load("dgx-a100:nodes=1"))
    rows = [{"what": HOSTILE, "measured_s": 0.02, "predicted_s": 0.021}]
    found = diagnose(step, window(step, edit.graph)) | {"compared": rows}
    content = Content(
        title=HOSTILE,
        advice=advice,
        notes=[HOSTILE],
        figures=figures,
        diagnosis=found,
        **drawings(),
    )
    write(
        [("measured", measured), ("predicted", before), ("faster", simulate(again.graph))],
        path,
        content,
    )
    return path


@pytest.fixture(scope="module")
def chromium(page):
    with browser() as driver:
        driver.get(page.as_uri())
        opened(driver)
        yield driver
        assert errors(driver) == []


def opened(driver):
    """Wait until the page is drawn."""
    end = time.monotonic() + 20
    while not driver.execute_script("return document.documentElement.dataset.ready"):
        assert time.monotonic() < end, errors(driver)
        time.sleep(0.05)


def state(driver, what):
    return driver.execute_script(f"return window.foretellView.state.{what}")


def settle():
    time.sleep(0.15)


def keys(driver, *pressed):
    from selenium.webdriver.common.action_chains import ActionChains

    driver.execute_script("document.querySelector('canvas').focus()")
    for key in pressed:
        ActionChains(driver).send_keys(key).perform()
    settle()


def test_all_sections_are_there(chromium):
    titles = [h.text for h in chromium.find_elements("css selector", "h2")]
    for wanted in ("What would help", "Where the step goes", "Time by module", "Communication",
                   "Kernels against the roofline", "Ranks", "Timeline", "Memory",
                   "Measured and predicted"):  # fmt: skip
        assert wanted in titles
    links = chromium.find_elements("css selector", "nav a")
    assert len(links) == len(titles)


def test_a_report_of_several_ranks_names_the_straggler(chromium, tmp_path, page):
    from foretell.report import write as write_page
    from foretell.survey.survey import survey
    from tests.trace.kineto import data_parallel

    found = survey([Step.from_file(data_parallel(tmp_path))], advice=False)
    write_page(found.timelines, tmp_path / "ranks.html", found.content)
    chromium.get((tmp_path / "ranks.html").as_uri())
    try:
        opened(chromium)
        assert "Rank 2 is the straggler" in chromium.find_element("css selector", ".verdict").text
        section = chromium.find_element("id", "ranks")
        names = [t.text for t in section.find_elements("css selector", "svg text")]
        assert [n for n in names if n.startswith("rank")] == [
            "rank 0", "rank 1", "rank 2 (straggler)", "rank 3",
        ]  # fmt: skip
    finally:
        chromium.get(page.as_uri())
        opened(chromium)


WIDER = """return [...document.querySelectorAll('.scroll')]
  .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 40).map(e => e.ariaLabel)"""


def test_a_laptop_shows_every_table_of_a_trace_whole(chromium, tmp_path, page):
    from foretell.api import Step

    trace = "src/foretell/samples/traces/resnet18-h200.json.gz"
    made = Step.from_trace(trace).report(tmp_path / "step.html", "tf32", advice=False)
    size = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chromium.get(made.as_uri())
    try:
        opened(chromium)
        assert chromium.execute_script(WIDER) == []
        nav = chromium.find_element("id", "contents")
        assert nav.size["height"] < 60  # links in one row
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        chromium.get(page.as_uri())
        opened(chromium)


def test_names_stay_text(chromium):
    assert chromium.title != "taken"
    assert chromium.find_elements("css selector", "main img, h1 img") == []
    assert chromium.find_element("css selector", "h1").text == HOSTILE


def test_the_verdict_comes_first(chromium):
    main = chromium.find_element("id", "main")
    first = main.find_element("css selector", ":scope > *")
    assert first.get_attribute("class") == "verdict"
    assert "-bound: " in first.text


def test_a_module_opens_and_closes_again(chromium):
    """By its row in the table, which keys reach, and back by its path."""
    chromium.execute_script("document.querySelectorAll('#modules details')[0].open = true")
    whole = chromium.find_element("css selector", "#modules .trail").text
    part = chromium.find_element("css selector", "#modules button.link")
    name = part.text
    chromium.execute_script("arguments[0].click()", part)
    assert name in chromium.find_element("css selector", "#modules .trail").text
    root = chromium.find_element("css selector", "#modules .trail button")
    chromium.execute_script("arguments[0].click()", root)
    assert chromium.find_element("css selector", "#modules .trail").text == whole


def test_kernels_lie_under_the_roofs(chromium):
    result = titles(chromium, "Roofline")
    assert result
    assert all("of the roofline" in text for text in result)


def test_no_cell_breaks_a_number_from_its_unit(chromium):
    """`341 ms` stays on one line, at the width of a laptop."""
    chromium.set_window_size(1280, 900)
    broken = chromium.execute_script("""
      document.querySelectorAll('details').forEach(d => d.open = true);
      return [...document.querySelectorAll('td.n')].filter(e => {
        const range = document.createRange();
        range.selectNodeContents(e);
        return new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1;
      }).map(e => e.textContent);""")
    assert broken == []


def test_spans_are_drawn(chromium):
    colours = chromium.execute_script("""
      const c = document.querySelector('canvas'), seen = new Set();
      const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
      return [...seen];""")
    assert 0x4C8DFF in colours  # kernels
    assert 0xEC6A3D in colours  # collectives


def test_keys_move_and_zoom(chromium):
    keys(chromium, "0")
    whole = state(chromium, "to") - state(chromium, "from")
    keys(chromium, "+", "+")
    near = state(chromium, "to") - state(chromium, "from")
    assert near < whole / 1.5
    at = state(chromium, "from")
    keys(chromium, "\ue014")  # right
    assert state(chromium, "from") > at
    keys(chromium, "0")
    assert state(chromium, "to") - state(chromium, "from") == pytest.approx(whole)


def test_from_task_to_task_to_cause(chromium):
    keys(chromium, "n")
    first = state(chromium, "task")
    keys(chromium, "n", "n")
    later = state(chromium, "task")
    assert later != first
    result = chromium.find_element("css selector", ".view .task").text
    assert "started when it did because" in result
    assert "critical path" in result
    keys(chromium, "c")
    assert state(chromium, "task") != later
    keys(chromium, "\ue00c")  # escape
    assert state(chromium, "task") == -1


def test_hover_tells_the_cause(chromium):
    from selenium.webdriver.common.action_chains import ActionChains

    canvas = chromium.find_element("css selector", "canvas")
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    keys(chromium, "0")
    where = chromium.execute_script("return document.querySelector('canvas').clientHeight")
    seen = ""
    for y in range(int(-where / 2) + 40, int(where / 2), 18):
        ActionChains(chromium, duration=10).move_to_element_with_offset(canvas, 20, y).perform()
        seen += chromium.find_element("id", "tip").text
    assert "price" in seen
    assert "because" in seen
    assert "in “predicted”" in seen


def test_finding_and_colouring(chromium):
    box = chromium.find_element("css selector", "input[type=search]")
    box.send_keys("gemm")
    settle()
    assert "tasks" in chromium.find_element("css selector", ".bar .soft").text
    box.clear()
    box.send_keys(" ")
    for mode in ("phase", "op", "source", "kind"):
        chromium.find_element("css selector", f".bar option[value={mode}]").click()
        settle()


def test_all_ranks_can_be_shown(chromium):
    assert "all ranks" in chromium.find_element("css selector", ".bar").text
    chromium.find_element("xpath", "//label[contains(., 'all ranks')]/input").click()
    settle()
    assert chromium.execute_script("return document.querySelector('.rows').scrollHeight") > 400


def titles(driver, label):
    """What hovering over the parts of a picture tells."""
    picture = driver.find_element("css selector", f"svg[aria-label^='{label}']")
    return driver.execute_script(
        "return [...arguments[0].querySelectorAll('title')].map(t => t.textContent)", picture
    )


def test_plans_are_drawn_on_their_machines(chromium):
    result = titles(chromium, "Where each rank")
    assert sum(text.startswith("rank ") for text in result) == 16
    assert "rank 15 on a100-80: dp rank 7 of 8, tp rank 1 of 2" in result
    assert "infiniband 192 GB/s" in result  # the way out of a node
    assert titles(chromium, "Which devices run") == [
        "a … b on rank 0 (v100-32): 3 samples",
        "a … b on rank 6 (p100-pcie): 1 samples",
    ]


def test_messages_and_kernels_are_drawn(chromium):
    first, second = titles(chromium, "2 messages")
    assert HOSTILE in first
    assert "2.86 MiB" in second
    kernels = chromium.find_elements("css selector", ".kernels li")
    assert [k.text.split() for k in kernels] == [["relu", "add"], ["mul", "relu*"]]
    assert len(chromium.find_elements("css selector", ".kernels .again")) == 1


def test_schedules_frame_what_repeats(chromium):
    picture = chromium.find_element("css selector", "svg[aria-label^='Schedule']")
    assert "repeats every" in picture.text
    assert len(chromium.find_elements("css selector", "svg[aria-label^='Step time of each']")) == 1


def test_light_and_dark(chromium):
    grounds = []
    for theme in ("light", "dark"):
        chromium.find_element("css selector", f"#theme option[value={theme}]").click()
        settle()
        grounds.append(
            chromium.execute_script("return getComputedStyle(document.body).backgroundColor")
        )
    assert grounds[0] != grounds[1]


NAMES = """
const bad = [], all = what => document.querySelectorAll(what);
const named = e => e.getAttribute('aria-label') || (e.labels && e.labels.length);
const drawn = [...all('svg:not([aria-hidden])')];
for (const e of drawn) if (e.getAttribute('role') !== 'img' || !named(e)) bad.push('svg');
for (const e of all('canvas')) if (e.tabIndex < 0 || !named(e)) bad.push('canvas');
const fields = [...all('input, select, button')];
for (const e of fields) if (!named(e) && !e.textContent.trim()) bad.push(e.outerHTML);
for (const e of all('th')) if (!e.getAttribute('scope')) bad.push('th');
if (!document.documentElement.lang || all('h1').length !== 1) bad.push('page');
return bad;
"""


def test_everything_has_a_name(chromium):
    """Pictures say what they show, fields what they are for; headings come in order."""
    assert chromium.execute_script(NAMES) == []


CONTRAST = """
const part = x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
const light = colour => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(x => part(x / 255));
  return .2126 * r + .7152 * g + .0722 * b;
};
const ground = e => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$|transparent/.test(colour)) return colour;
  }
  return 'rgb(255,255,255)';
};
const texts = [...document.querySelectorAll('p, h1, h2, h3, td, th, a, label, summary, .big')];
return texts.filter(e => e.innerText && e.offsetParent).map(e => {
  const a = light(getComputedStyle(e).color), b = light(ground(e));
  return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
});
"""


def test_text_can_be_read_in_both_themes(chromium):
    for theme in ("light", "dark"):
        chromium.find_element("css selector", f"#theme option[value={theme}]").click()
        settle()
        found = chromium.execute_script(CONTRAST)
        assert len(found) > 20
        assert min(found) >= 4.5  # WCAG 2.1 AA, 1.4.3


@needs_axe
@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing_serious(chromium, theme):
    chromium.find_element("css selector", f"#theme option[value={theme}]").click()
    chromium.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    settle()
    assert grave(chromium) == []


def test_it_prints(chromium):
    made = chromium.execute_cdp_cmd("Page.printToPDF", {"landscape": True})
    assert len(made["data"]) > 20_000


def test_no_row_of_a_table_fills_a_page_of_paper(chromium):
    """Columns keep a width in which their words can be read, on A4."""
    metrics = {"width": 760, "height": 1100, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    chromium.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    heights = chromium.execute_script(
        "return [...document.querySelectorAll('tr')].map(e => e.getBoundingClientRect().height)"
    )
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert max(heights) < 250


def test_nothing_is_fetched(chromium, page):
    found = chromium.execute_script(
        "return JSON.stringify(performance.getEntriesByType('resource'))"
    )
    assert [e["name"] for e in json.loads(found) if not e["name"].startswith("data:")] == []
