"""Two timelines beside each other: what is matched, and that parts add up to the gap."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from foretell.cli.compare import command
from foretell.errors import InputError
from foretell.graph import Builder, save
from foretell.simulate import Timeline, simulate
from foretell.simulate.compare import compare, twins


def step(matmul=1.0, wire=2.0, update=1.0, lag=0.0, name="matmul", more=0):
    b = Builder()
    stream, link = b.lane("stream", kind="compute"), b.lane("wire", kind="comm")
    first = b.task(kind="kernel", op="gemm", name=name, lane=stream, seconds=matmul)
    sent = b.task(kind="collective", op="all_reduce", name="bucket 0", lane=link, seconds=wire)
    b.wait(sent, first, lag=lag)
    b.task(kind="kernel", op="adam", name="update", lane=stream, seconds=update, after=[sent])
    for k in range(more):
        b.task(kind="kernel", op="extra", name=f"extra {k}", lane=stream, seconds=0.1)
    return b.graph()


def test_every_task_explains_its_part_and_all_add_up():
    found = compare(simulate(step()), simulate(step(1.5, 3.0, 1.0, lag=0.25)))
    assert found.gap == pytest.approx(1.75)
    parts = {p.name: p for p in found.parts}
    assert (parts["bucket 0"].ran, parts["bucket 0"].waited) == pytest.approx((1.0, 0.25))
    assert parts["matmul"].seconds == pytest.approx(0.5)
    assert found.parts[0].name == "bucket 0"
    assert sum(p.seconds for p in found.parts) + found.elsewhere == pytest.approx(found.gap)
    lanes = {lane.name: lane.explains for lane in found.lanes}
    assert lanes == pytest.approx({"rank 0: stream": 0.5, "rank 0: wire": 1.25})


def test_what_only_one_has_is_counted_and_lies_elsewhere():
    found = compare(simulate(step()), simulate(step(more=3)))
    assert (found.matched, found.only_predicted, found.only_measured) == (3, 0, 3)
    assert found.elsewhere == pytest.approx(found.gap) == pytest.approx(0.3)


def test_other_names_are_matched_by_op():
    assert twins(step(), step(name="aten::mm")).tolist() == [0, 1, 2]


def test_a_measured_timeline_knows_no_causes_and_is_compared_all_the_same():
    graph = step()
    measured = Timeline(graph, np.array([0.0, 1.2, 3.4]), np.array([1.1, 3.4, 4.5]))
    found = compare(measured, simulate(graph))
    assert found.gap == pytest.approx(-0.5)
    assert sum(p.seconds for p in found.parts) + found.elsewhere == pytest.approx(found.gap)


def test_nothing_in_common():
    b = Builder()
    b.task(kind="host", op="other", name="other", rank=5, seconds=1.0)
    with pytest.raises(InputError, match="no task in common"):
        compare(simulate(step()), simulate(b.graph()))


@pytest.mark.parametrize("seed", range(5))
def test_parts_add_up_whatever_the_times(seed):
    some = np.random.default_rng(seed).uniform(0.1, 3.0, 8)
    found = compare(simulate(step(*some[:4])), simulate(step(*some[4:])))
    assert sum(p.seconds for p in found.parts) + found.elsewhere == pytest.approx(found.gap)


def test_the_command_lays_two_files_beside_each_other(tmp_path):
    one, other = tmp_path / "a.graph", tmp_path / "b.graph"
    save(step(), one)
    save(step(wire=3.0), other)
    result = CliRunner().invoke(command, [str(one), str(other), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["gap_s"] == pytest.approx(1.0)
    assert found["parts"][0]["name"] == "bucket 0"
    text = CliRunner().invoke(command, [str(one), str(other), "--most", "1"]).stdout
    assert "bucket 0" in text
    assert "100 %" in text
