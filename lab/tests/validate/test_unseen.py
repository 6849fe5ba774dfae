"""Pages of unseen sources, and constants fitted again without one."""

import pytest

from foretell.cluster import load as load_cluster
from foretell.errors import ForetellError
from foretell.plan import Plan
from foretell.predict import predict
from foretell.workload import load
from foretell_lab.validate import layouts, pages, refit, reported, unseen

PLAN = "dp=8,zero=3,micro_batch=1,framework=fsdp"


@pytest.fixture(scope="module")
def found():
    model = load("llama:layers=4,hidden=1024,heads=8,seq=1024,vocab=32000")
    return predict(Plan.parse(PLAN), model, load_cluster("h100:gpus=8"))


def test_a_page_has_the_figures_the_plot_and_the_worst_row(found):
    rows = [
        unseen.Row("made", "right", found.step, found, found.peak),
        unseen.Row("made", "slow", 2 * found.step, found),
    ]
    text = pages.page("made", rows, "Two rows.")
    assert "| 2 | 25.0 % | -25.0 % |" in text
    assert text.index("slow") < text.index("| right")
    assert "made.svg" in text
    plot = pages.plot(rows)
    assert plot.count("<circle") == 2
    assert plot.count("#c1121f") == 2  # the interval and the point of the row outside it


def test_every_constant_is_there_and_has_sources_that_are(found):
    for constant in refit.constants():
        assert constant.value() > 0
        assert not constant.borrows or constant.value(constant.borrows) > 0
        assert set(constant.sources) <= {*unseen.SOURCES, *layouts.SOURCES, *refit.STEPS}


def test_constants_are_as_shipped_behind_a_refit(found):
    before = [c.written() for c in refit.constants()]
    with refit.restored():
        for constant in refit.constants():
            constant.put(3 * constant.value())
        model = load("llama:layers=4,hidden=1024,heads=8,seq=1024,vocab=32000")
        slower = predict(Plan.parse(PLAN), model, load_cluster("h100:gpus=8"))
    assert slower.step > found.step
    assert [c.written() for c in refit.constants()] == before
    assert 0.0 in before  # a profile that leaves its host time to the kind of kernel
    assert predict(Plan.parse(PLAN), model, load_cluster("h100:gpus=8")).step == found.step


def test_a_constant_without_a_source_left_borrows(tmp_path):
    with refit.restored():
        changed = {str(c): after for c, _, after in refit.without("vtrain", tmp_path)}
    (name,) = changed
    one = next(c for c in refit.constants() if str(c) == name)
    assert changed[name] == one.value(one.borrows) != one.value()


def test_an_unknown_source_is_refused(tmp_path):
    with pytest.raises(ForetellError, match="no source `nowhere`"):
        refit.report(tmp_path, "nowhere")


def test_the_interval_widens_with_distance():
    def width(
        text, model="llama:layers=4,hidden=1024,heads=8,seq=1024,vocab=32000", on="h100:gpus=8"
    ):
        one = predict(Plan.parse(text), load(model), load_cluster(on))
        return one.high / one.low

    plain = width(PLAN)
    assert width(f"{PLAN},precision=fp8") > plain
    assert width("dp=4,cp=2,zero=3,micro_batch=1,framework=fsdp") > plain
    assert width(PLAN, on="a100-80:gpus=8") < plain  # its sources ran on A100


def test_every_reported_run_can_be_asked_and_has_an_address():
    for name, said in reported.sources().items():
        rows = list(reported.runs(name))
        assert len(rows) == said["blind"][0], name
        assert said["url"].startswith("https://")
        assert all(row.seconds > 0 and row.peak >= 0 for row in rows)
        for row in rows:
            assert Plan.parse(row.plan).ranks <= reported.cluster(row.system).size
            assert load(row.model).layers
    assert "Asked blind" in reported.blind("sailor-gh200")
    assert reported.blind("steps") == ""
