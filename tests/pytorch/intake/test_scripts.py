"""Scripts that nobody changed, profiled and captured."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from foretell.graph import load  # noqa: E402
from foretell.trace import read  # noqa: E402
from tests.pytorch.intake.table import SLOW, TABLE, Case, run  # noqa: E402

CASES = [
    *(pytest.param(case, id=str(case)) for case in TABLE),
    *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW),
]
LOSSES = ("nll_loss_forward", "nll_loss2d_forward", "mse_loss")


@pytest.mark.parametrize("case", CASES)
def test_a_script_is_profiled(case: Case, tmp_path: Path) -> None:
    if not case.is_here:
        pytest.skip(f"{case.needs} is not installed")
    answers = run(case, "profile", tmp_path)
    if case.ranks > 1:
        answers = answers[: case.ranks]
    assert len(answers) == case.ranks
    for answer in answers:
        assert answer["unprofiled_s"] > 0
        assert answer["unprofiled_steps"] == 3
    trace = read(Path(answers[0]["trace"]))
    assert trace.real == answers[0]["unprofiled_s"]
    assert len(trace.graph.select(phase="backward"))
    assert not list((tmp_path / "here").iterdir())  # whatever it wrote is gone


@pytest.mark.parametrize("case", CASES)
def test_a_script_is_captured(case: Case, tmp_path: Path) -> None:
    if not case.is_here:
        pytest.skip(f"{case.needs} is not installed")
    (answer, *_) = run(case, "capture", tmp_path)
    assert answer["is_real"] == case.is_real
    graph = load(Path(answer["graph"]))
    assert graph.facts.get("optimizer", "") == case.optimizer
    assert "ParametrizationList" not in graph.facts["captured"]  # a part, named like a model
    for phase in ("forward", "backward", "update"):
        assert len(graph.select(kind="kernel", phase=phase)), phase
    if case.losses is not None:
        assert sum(len(graph.select(kind="kernel", op=op)) for op in LOSSES) == case.losses
    assert not list((tmp_path / "here").iterdir())


def test_a_step_of_a_gan_has_all_turns(tmp_path: Path) -> None:
    (case,) = (case for case in TABLE if case.name == "gan.py")
    (answer,) = run(case, "capture", tmp_path)
    graph = load(Path(answer["graph"]))
    updates = graph.select(kind="kernel", phase="update", op="_foreach_addcdiv_")
    assert len(updates) == 4  # the critic three times, the generator once


def test_autocast_of_the_script_is_in_its_graph(tmp_path: Path) -> None:
    (case,) = (case for case in TABLE if case.name == "accumulation_scaler.py")
    (answer,) = run(case, "capture", tmp_path)
    graph = load(Path(answer["graph"]))
    assert graph.facts["autocast"] == "fp16"
    products = graph.select(kind="kernel", phase="forward", op="addmm")
    assert {graph[int(k)].dtype for k in products} == {"fp16"}
