"""Graphs and tasks as people look at them."""

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.graph import NONE, Builder, Graph, Kind, Names, Phase
from foretell.graph.build import wiring
from tests.graph.golden import graph


@pytest.fixture
def step() -> Graph:
    return graph(
        """
        lane 0 = compute "s" of rank 0 ordered
        lane 1 = comm "t" of rank 1 ordered
        %0 = host launch "l" for 1e-05
        %1 = kernel gemm "fc1" on 0 for 0.5 after %0:launch phase=forward layer="net.1" flops=8.0
        %2 = kernel gemm_2 "fc2" on 0 for 0.25 after %1 phase=backward layer="net.2" dtype=bf16
        %3 = collective all_reduce on 1,0 for 0.125 after %1 %2 rank=1
        """
    )


def test_a_task_reads_its_columns(step):
    task = step[1]
    assert (task.kind, task.op, task.name, task.phase) == ("kernel", "gemm", "fc1", "forward")
    assert (task.seconds, task.flops, task.rank, task.dtype) == (0.5, 8.0, 0, "none")
    assert isinstance(task.seconds, float)
    assert isinstance(task.rank, int)
    assert task.after == (0,)
    assert step[3].lanes == (1, 0)
    assert step[0].lanes == ()
    assert step[-1].number == 3
    assert step[1] == step[1] != step[2]
    with pytest.raises(AttributeError, match="a task has no `second`"):
        task.second
    for i in (4, -5):
        with pytest.raises(IndexError, match=f"task {i} of 4"):
            step[i]


def test_a_graph_reads_its_columns(step):
    assert len(step) == 4
    assert [task.op for task in step] == ["launch", "gemm", "gemm_2", "all_reduce"]
    assert step.seconds.tolist() == [1e-05, 0.5, 0.25, 0.125]
    assert step.kind.tolist() == [Kind.HOST, Kind.KERNEL, Kind.KERNEL, Kind.COLLECTIVE]
    assert step.gap.tolist() == [0] * 4
    assert step.gap.dtype == np.float64
    assert step.order.tolist() == [0, 1, 2, 3]
    assert step.texts("layer") == ["", "net.1", "net.2", ""]
    assert step.text_of("phase", 2) == "backward"
    assert repr(step) == "<Graph: tasks 4, edges 4, lanes 2, ranks 2>"
    assert repr(Graph()) == "<Graph: tasks 0, edges 0, lanes 0, ranks 0>"
    with pytest.raises(AttributeError, match="a graph has no `second`"):
        step.second
    with pytest.raises(InputError, match="did you mean `seconds`"):
        step.column("second")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, [0, 1, 2, 3]),
        ({"op": "gemm"}, [1]),
        ({"op": "gemm*"}, [1, 2]),
        ({"op": "*e*m*"}, [1, 2]),
        ({"op": ("launch", "all_*")}, [0, 3]),
        ({"op": "missing"}, []),
        ({"kind": "kernel", "phase": "forward"}, [1]),
        ({"kind": Kind.KERNEL, "phase": (Phase.FORWARD, "backward")}, [1, 2]),
        ({"rank": 1}, [3]),
        ({"rank": np.array([0, 1])}, [0, 1, 2, 3]),
        ({"layer": ""}, [0, 3]),
        ({"dtype": {"bf16", "fp16"}}, [2]),
        ({"seconds": 0.5}, [1]),
        ({"op": ()}, []),
    ],
)
def test_select(step, wanted, found):
    assert step.select(**wanted).tolist() == found
    assert step.edit().select(**wanted).tolist() == found


def test_select_says_what_it_does_not_know(step):
    with pytest.raises(InputError, match="unknown column: `ops`"):
        step.select(ops="gemm")
    with pytest.raises(InputError, match="did you mean `kernel`"):
        step.select(kind="kernl")
    with pytest.raises(InputError, match="column `rank` holds numbers, not `x`"):
        step.select(rank="x")


def test_a_star_is_the_only_wild_character():
    names = Names(["", "f[0]", "f0", "f?", "fx", "a\nb", "F0"])
    assert names.matching("f[0]*").tolist() == [1]
    assert names.matching("f?*").tolist() == [3]
    assert names.matching("f*").tolist() == [1, 2, 3, 4]
    assert names.matching("a*b").tolist() == [5]
    assert names.matching("*").tolist() == list(range(7))
    assert names.matching("f.").tolist() == []


def test_names():
    names = Names(["", "a"])
    assert names.adding(["a", ""]) is names
    more = names.adding(["b", "a", "b", "c"])
    assert list(more) == ["", "a", "b", "c"]
    assert list(names) == ["", "a"]
    assert more.numbers(["c", "a"]).tolist() == [3, 1]
    assert (more.number("b"), more.number("x")) == (2, -1)
    assert Names(["", "a"]) == names != more
    assert hash(Names(["", "a"])) == hash(names)
    with pytest.raises(AssertionError):
        Names(["a"])


def test_what_a_builder_does_not_know():
    make = Builder()
    with pytest.raises(InputError, match="did you mean `seconds`"):
        make.task(second=1.0)
    with pytest.raises(InputError, match=r"column `seconds` holds numbers, not `1\.0`"):
        make.task(seconds="1.0")
    with pytest.raises(InputError, match="unknown kind"):
        make.task(kind="cernel")
    with pytest.raises(InputError, match="unknown lanekind"):
        make.lane("x", kind="strem")
    with pytest.raises(InputError, match="unknown bufferkind"):
        make.buffer(1.0, kind="x")
    with pytest.raises(InputError, match="unknown waitkind"):
        make.wait(0, 1, kind="x")


def test_a_builder_takes_words_and_codes():
    make = Builder()
    make.lane("s", kind="compute")
    make.task(kind=Kind.COPY, phase="forward", lanes=[0], op="x")
    made = make.graph(batch=2)
    assert (made[0].kind, made[0].phase, made[0].lane) == ("copy", "forward", 0)
    assert made.facts["batch"] == 2


# Who waits for whom, all told


def test_turns_and_drained_lanes_become_waits():
    made = graph(
        """
        lane 0 = compute "s" of rank 0 ordered
        lane 1 = compute "t" of rank 0 ordered
        lane 2 = comm "u" of rank 0 free
        %0 = kernel a on 0
        %1 = kernel b on 1
        %2 = kernel c on 0,1
        %3 = kernel d on 2
        %4 = kernel e on 2
        %5 = sync f drains 0,1
        %6 = kernel g on 0
        """
    )
    wires = wiring(made)
    assert [wires.turns.of(i).tolist() for i in range(7)] == [[], [], [0, 1], [], [], [], [2]]
    assert [wires.waits.of(i).tolist() for i in range(7)] == [[], [], [], [], [], [2], []]
    assert wires.order.tolist() == list(range(7))
    start, follower, position = wires.turn_followers
    assert follower[start[2] : start[3]].tolist() == [6]
    assert wires.turns.waiting[position[start[2]]] == 6
    assert wiring(made) is wires


@pytest.mark.parametrize("places", [(0, 1, 2), (-9, -5, -1), (-(2**61), 0, 2**61), (5, 6, 2**40)])
def test_drained_lanes_whatever_the_places(places):
    make = Builder()
    for k in range(3):
        make.lane(f"lane {k}")
    make.task(lane=2, order=places[0])
    make.task(lane=2, order=places[2])
    make.task(drains=[0, 1, 2], order=places[1])
    waits = wiring(make.graph()).waits
    assert waits.of(2).tolist() == [0]
    assert waits.kinds.tolist() == [2]


def test_a_lane_drained_before_anything_is_issued_there():
    make = Builder()
    lane = make.lane("s")
    make.task(drains=[lane])
    make.task(lane=lane)
    assert wiring(make.graph()).waits.size == 0
    assert NONE == -1


def test_columns_as_strings():
    make = Builder()
    make.task(kind="kernel", op="gemm", phase="forward")
    make.task(kind="host", op="launch")
    graph = make.graph()
    assert graph.texts("kind") == ["kernel", "host"]
    assert graph.texts("phase") == ["forward", "none"]
    assert graph.texts("op") == ["gemm", "launch"]
