"""The public Python API: the main jobs in three lines, results that print, and the command line."""

import dataclasses
import inspect
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import foretell
from foretell.api.result import Bar, Result, bars, curves
from foretell.cli.main import foretell as command
from foretell.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
TRACE = str(ROOT / "src/foretell/samples/traces/resnet18-h200.json.gz")
STEP = str(ROOT / "docs/guides/step.txt")
GPT = "gpt:layers=4,hidden=512,heads=8,seq=256,vocab=1000"
GPUS = "dgx-a100:gpus=8"


def said(*args):
    """The JSON that a command prints."""
    done = CliRunner().invoke(command, [*args, "--json", "--quiet"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


# The five main jobs, each in three lines or fewer, and the command that must agree.


def test_what_would_a_change_do():
    step = foretell.Step.from_trace(TRACE, unprofiled=0.0482)
    result = step.whatif("amp", "channels-last")
    assert result.predicted < result.baseline

    output = said("whatif", TRACE, "amp", "channels-last", "--real-ms", "48.2")
    assert result.to_dict() == output
    assert json.loads(result.to_json()) == output


def test_what_would_help_most():
    step = foretell.Step.from_graph(STEP)
    result = step.advise("faster-host:times=2", "faster:op=gemm,times=2")
    assert result.ranked[0].seconds < result.baseline

    output = said("advise", STEP, "faster-host:times=2", "faster:op=gemm,times=2")
    assert json.loads(result.to_json()) == output


def test_which_parallelism():
    one = foretell.predict(GPT, GPUS, dp=4, tp=2)
    every = foretell.oracle(GPT, "dgx-a100", gpus="4,8")
    assert one.fits
    assert every.best[-1].gpus == 8

    assert one.to_dict() == said("predict", GPT, "--on", GPUS, "--plan", "dp=4,tp=2")
    assert json.loads(every.to_json()) == said("oracle", GPT, "--on", "dgx-a100", "--gpus", "4,8")


def test_the_best_plan():
    best = foretell.plan(GPT, GPUS, "oracle")
    assert best.predicted == foretell.predict(GPT, GPUS, best.plan).step
    assert best.alternatives[0].step >= best.predicted

    output = said("plan", GPT, "--on", GPUS, "--with", "oracle")
    output.pop("search_cpu_s")
    mine = json.loads(best.to_json())
    mine.pop("search_cpu_s")
    assert mine == output


def test_options_of_a_planner_are_arguments_too():
    few = foretell.plan(GPT, GPUS, evaluations=20)
    assert "evaluations=20" in few.planner
    with pytest.raises(InputError, match="evaluation"):
        foretell.plan(GPT, GPUS, evaluation=20)


def test_a_plan_prints_as_what_makes_it_again():
    plan = foretell.Plan.parse("dp=4,tp=2,recompute=full")
    assert eval(repr(plan), {"Plan": foretell.Plan}) == plan


def test_hfu_counts_what_is_recomputed():
    plain, again = (foretell.predict(GPT, GPUS, dp=8, recompute=r) for r in ("none", "full"))
    assert plain.hfu == plain.utilisation
    assert 1.2 < again.hfu / again.utilisation < 1.35
    assert "HFU" in again.verdict
    assert "HFU" not in plain.verdict
    assert again.to_dict()["hfu"] == again.hfu


def test_in_which_order():
    found = foretell.schedule("v:devices=3", micro_batches=6, cache=None)
    assert found.schedule.proven

    output = said("schedule", "v:devices=3", "-n", "6", "--no-cache")
    mine = json.loads(found.to_json())
    for answer in (mine, output):
        answer.pop("search_cpu_s")
    assert mine == output


def test_of_a_model_the_schedule_is_a_plan():
    found = foretell.schedule(GPT, "dgx-a100:gpus=2", micro_batches=4, pipeline="v", cache=None)
    assert isinstance(found, foretell.ModelSchedule)
    again = foretell.predict(GPT, "dgx-a100:gpus=2", found.plan)
    assert again.step == pytest.approx(found.predicted)


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_model_without_a_gpu_then_run():
    import torch

    model, x = torch.nn.Linear(64, 64), torch.zeros(32, 64)
    step = foretell.capture(model, x, lambda model, x: model(x).sum(), "adamw", "h100")
    assert step.whatif("faster-host:times=2").predicted <= step.seconds
    assert foretell.parallelize.__module__ == "foretell.pytorch.deploy.apply"


def test_a_step_is_simulated():
    found = foretell.Step.from_graph(STEP).simulate()
    assert found.seconds == found.timeline.seconds
    assert found.to_dict() == said("simulate", STEP)
    assert len(found.records()) == found.timeline.graph.size


def test_a_step_prints_and_writes_its_report(tmp_path):
    step = foretell.Step.from_trace(TRACE, unprofiled=0.0482)
    assert str(step) == step.simulate().text()
    assert "\n" not in repr(step)
    assert "<svg" in step._repr_html_()
    page = step.report(tmp_path / "step.html", "tf32", advice=False).read_text()
    assert "foretell" in page
    assert step.measured is not None


def test_a_cluster_with_a_number_is_priced_up_to_it():
    found = foretell.oracle(GPT, "dgx-a100:gpus=4")
    assert sorted({row.gpus for row in found.rows}) == [1, 2, 4]


@pytest.mark.parametrize("line", [["show", ""], ["whatif", "", "amp"], ["replay", ""]])
def test_an_empty_name_is_not_the_current_folder(line):
    with pytest.raises((InputError, click.UsageError), match="empty"):
        CliRunner().invoke(command, line, standalone_mode=False, catch_exceptions=False)
    with pytest.raises(InputError, match="empty"):
        foretell.Step.load("")


# What every result can do


@pytest.fixture(scope="module")
def results():
    step = foretell.Step.from_graph(STEP)
    return [
        step.whatif("faster:op=gemm,times=2"),
        step.advise("faster:op=gemm,times=2"),
        step.simulate(),
        foretell.predict(GPT, GPUS, dp=8),
        foretell.plan(GPT, "dgx-a100:gpus=2", "oracle"),
        foretell.oracle(GPT, "dgx-a100", gpus="1,2"),
        foretell.schedule("v:devices=2", micro_batches=4, cache=None),
    ]


def test_results_are_frozen_and_print_themselves(results, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for result in results:
        assert isinstance(result, Result)
        name = dataclasses.fields(result)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(result, name, None)
        assert "\n" not in repr(result)
        assert repr(result).startswith(f"<{type(result).__name__}: ")
        assert " ".join(str(result).split()).startswith(result.verdict)
        plan = getattr(result, "plan", "-")
        plan = str(plan.but(model="", cluster="")) if isinstance(plan, foretell.Plan) else str(plan)
        lines = [line for line in str(result).splitlines() if not line.endswith(plan)]
        assert max(map(len, lines)) <= 80


def test_results_show_in_notebooks_and_as_plots(results, tmp_path):
    import xml.etree.ElementTree as tree

    for k, result in enumerate(results):
        assert result._repr_html_().startswith("<div>")
        plot = result.plot()
        assert plot._repr_html_() == plot.svg
        tree.parse(plot.save(tmp_path / f"{k}.svg"))  # well-formed
        rows = result.records()
        assert rows
        assert json.loads(result.to_json())


def test_results_become_data_frames_where_pandas_is(results, monkeypatch):
    if find_spec("pandas"):
        assert len(results[0].to_pandas()) == len(results[0].records())
    monkeypatch.setattr("foretell.api.result.find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs pandas") as error:
        results[0].to_pandas()
    assert "pip install pandas" in str(error.value)


def test_names_do_not_break_out_of_plots():
    svg = bars("<b>", [Bar("<script>", 1.0, "&", 0.5, 2.0)]).svg
    assert "<script>" not in svg
    assert "<b>" not in svg
    assert "nothing to draw" in curves("none", {}, ("x", "y")).svg


# Mistakes


def test_mistakes_say_what_to_do():
    with pytest.raises(InputError, match="without a plan"):
        foretell.predict(GPT, GPUS)
    with pytest.raises(foretell.ForetellError, match="unknown field of a plan"):
        foretell.predict(GPT, GPUS, ddp=8)
    with pytest.raises(InputError, match="without a change"):
        foretell.Step.from_graph(STEP).whatif()
    with pytest.raises(InputError, match="--plan is for a model"):
        foretell.schedule("v:devices=2", plan="micro_batch=2")


# Packages that are functions too


@pytest.mark.parametrize("first", ["foretell", "foretell.plan.plan", "foretell.simulate.engine"])
def test_packages_can_be_called_in_any_order_of_import(first):
    code = (
        f"import {first}, foretell, inspect\n"
        f"import foretell.plan.plan as file\n"
        f"from foretell.plan import Plan\n"
        f"assert file is foretell.plan.plan and file.read('dp=2') == Plan(dp=2)\n"
        f"assert 'torch' not in __import__('sys').modules\n"
        f"for one in (foretell.simulate, foretell.predict, foretell.plan):\n"
        f"    print(callable(one), len(inspect.signature(one).parameters) > 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * 6, done.stderr


def test_a_called_package_is_the_function():
    assert inspect.signature(foretell.plan) == inspect.signature(foretell.api.plan)
    graph = foretell.load(Path(STEP))
    assert foretell.simulate(graph).seconds == foretell.Step.from_graph(graph).seconds


TYPED = """
import foretell
import foretell.plan.plan
from foretell.plan.plan import read

best: foretell.PlanResult = foretell.plan("gpt", "h100")
one: foretell.Prediction = foretell.predict("gpt", "h100", read("dp=2"))
line: foretell.Timeline = foretell.simulate(foretell.Graph())
"""


@pytest.mark.slow
def test_type_checkers_see_the_functions(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    config = str(ROOT / "pyproject.toml")
    arguments = ["--strict", "--config-file", config, str(tmp_path / "user.py")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_page_lists_every_stable_name():
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    names = set(foretell.__all__) - {"__version__"}
    assert sorted(name for name in names if f"`{name}" not in page) == []
