"""The page: one file that loads nothing, whatever its names are, and small."""

import base64
import json
import re
import zlib

import numpy as np
import pytest

from foretell.graph import Builder, replicate
from foretell.report import write
from foretell.report.page import SCRIPTS, Content, narrow, numbers, packed, page, summaries
from foretell.report.summary import sources
from foretell.simulate import Timeline, simulate
from tests.transformer import transformer

HOSTILE = '</script><img src=x onerror="alert(1)">'


def unpacked(text):
    """What the page's own script does, here."""
    raw = zlib.decompress(base64.b64decode(text))
    size = int.from_bytes(raw[:4], "little")
    first = -(-(4 + size) // 8) * 8

    def column(value):
        if "column" not in value:
            return value
        kind, offset, length = value["column"]
        return np.frombuffer(raw, f"<{kind}", length, first + offset)

    return json.loads(raw[4 : 4 + size], object_hook=column)


def data_of(text):
    return unpacked(re.search(r'id="packed">([^<]*)<', text)[1])


@pytest.fixture(scope="module")
def lines():
    graph = transformer(ranks=2, layers=2)
    with graph.edit() as edit:
        edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-4)
    before = simulate(edit.graph)
    with before.graph.edit("faster") as again:
        again.set(again.select(kind="kernel"), seconds=5e-5)
    measured = Timeline(before.graph, before.start * 1.1, before.end * 1.1)
    return [("measured", measured), ("predicted", before), ("faster", simulate(again.graph))]


@pytest.mark.parametrize(
    "array",
    [
        np.array([0, 255]),
        np.array([256]),
        np.array([-1, 70000]),
        np.array([1 << 31]),
        np.zeros(0, int),
        np.array([0.5, 1e300]),
        np.array([1 << 40]),
        np.array([True, False]),
    ],
)
def test_columns_come_back_as_they_were(array):
    found = unpacked(packed({"a": [array], "b": "text"}))
    assert found["b"] == "text"
    np.testing.assert_array_equal(found["a"][0], array)


def test_columns_are_as_narrow_as_they_can_be():
    assert [narrow(np.array([v])).dtype.itemsize for v in (255, 256, 65536, -1)] == [1, 2, 4, 4]


def test_several_columns_are_found_again():
    arrays = [np.arange(k) for k in (3, 0, 7, 300)]
    for was, found in zip(arrays, unpacked(packed(arrays)), strict=True):
        np.testing.assert_array_equal(was, found)


def test_the_page_holds_every_span(lines):
    found = data_of(page(lines))
    assert [line["name"] for line in found["lines"]] == ["measured", "predicted", "faster"]
    for shown, (_, line) in zip(found["lines"], lines, strict=True):
        tick = line.seconds / 2**31
        np.testing.assert_allclose(shown["start"] * shown["tick"], line.start, atol=2 * tick)
        ends = (shown["start"].astype(float) + shown["length"]) * shown["tick"]
        np.testing.assert_allclose(ends, line.end, atol=2 * tick)
        names = [shown["words"][k] for k in shown["op"]]
        assert names == line.graph.texts("op")
    np.testing.assert_array_equal(found["lines"][1]["path"], lines[1][1].critical_path())
    np.testing.assert_array_equal(found["lines"][2]["cause"], lines[2][1].cause)
    assert len(found["lines"][0]["cause"]) == 0


def test_what_differs_is_marked(lines):
    shown = data_of(page(lines))["lines"]
    kernels = lines[2][1].graph.select(kind="kernel")
    assert set(shown[2]["change"][kernels].tolist()) == {1}  # shorter
    assert shown[2]["against"] == 1
    np.testing.assert_array_equal(shown[2]["origin"], np.arange(len(lines[1][1])))


def test_the_page_loads_nothing(lines):
    text = page(lines)
    assert re.findall(r"https?://", text) == []
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|link|img|iframe)[^>]+src=", text)
    assert len(SCRIPTS) == 10


def test_names_never_become_markup():
    make = Builder()
    lane = make.lane(HOSTILE)
    make.task(kind="kernel", op=HOSTILE, name=HOSTILE, layer=HOSTILE, lane=lane, seconds=1.0)
    text = page([(HOSTILE, simulate(make.graph()))], Content(title=HOSTILE, notes=[HOSTILE]))
    assert "<img src=x" not in text
    assert "&lt;/script&gt;" in text  # the title
    assert text.count("</script>") == 2
    assert data_of(text)["lines"][0]["words"][1] == HOSTILE


def test_a_title_that_reads_like_a_mark():
    text = page([], Content(title="@SCRIPT@ @DATA@"))
    assert "<h1>@SCRIPT@ @DATA@</h1>" in text


def test_fifty_thousand_tasks_stay_small():
    drawn = np.random.default_rng(1)
    make = Builder()
    lane = make.lane("stream")
    for k in range(500):
        make.task(kind="kernel", op=f"op{k % 50}", name=f"kernel {k}", lane=lane)
    with replicate(make.graph(), 100).edit() as edit:
        edit.set(np.arange(50_000), seconds=drawn.exponential(1e-5, 50_000))
    line = simulate(edit.graph)
    text = page([("a", line), ("b", Timeline(line.graph, line.start, line.end))])
    assert len(line) == 50_000
    assert len(text) < 3 << 20


def test_numbers_are_plain_and_complete(lines):
    found = numbers(lines, Content(title="x"))
    json.dumps({**found, "memory": len(found["memory"]), "timelines": summaries(lines)})
    for part, (name, line) in zip(found["split"], lines, strict=True):
        assert part["name"] == name
        assert sum(part["values"].values()) == pytest.approx(line.seconds)
    (first, second) = found["changes"]
    assert (first["before"], second["after"]) == ("measured", "faster")
    top = second["rows"][0]
    assert top["after_s"] == pytest.approx(top["before_s"] / 2)


def test_empty_timelines(tmp_path):
    write([("nothing", simulate(Builder().graph()))], tmp_path / "empty.html")
    assert data_of((tmp_path / "empty.html").read_text())["split"][0]["total"] == 0


def test_what_was_measured_and_then_changed_is_distinguished():
    make = Builder()
    lane = make.lane("stream")
    for k in range(4):
        make.task(kind="kernel", op=f"op{k}", lane=lane, seconds=1.0, source="measured")
    graph = make.graph()
    assert sources(graph) == {"measured": 1.0}
    with graph.edit("faster") as edit:
        edit.set([0], seconds=2.0)
        edit.set([1], seconds=5.0, source="formula")
    with edit.graph.edit("fewer") as again:
        again.remove([3])
    assert sources(again.graph) == {
        "measured": pytest.approx(1 / 8),
        "formula": pytest.approx(5 / 8),
        "measured, then changed": pytest.approx(2 / 8),
    }
