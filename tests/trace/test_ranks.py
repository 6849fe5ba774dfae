"""Several ranks: one clock, one graph, one task a collective."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.simulate import simulate
from foretell.trace import read
from tests.trace.kineto import Kineto

US = 1e-6
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def rank(number: int, begin: float, clock: float = 0.0, ranks: int = 2) -> Kineto:
    """A rank whose step begins at `begin`; its all-reduce ends at 400 on everybody's clock."""
    k = Kineto(base=1000.0 + clock, distributedInfo={"rank": number, "world_size": ranks})
    k.note("ProfilerStep#5", begin, 500)
    k.op("aten::mm", begin + 10, begin + 60)
    k.launch("gemm", begin + 20, begin + 30, 1, (begin + 32, begin + 132), device=number)
    k.note("nccl:all_reduce", begin + 70, begin + 100, **{"Input Dims": [[250]],
                                                         "Input type": ["float"]})  # fmt: skip
    k.op("record_param_comms", begin + 72, begin + 98)
    k.call("cudaEventRecord", begin + 74, begin + 75, 2)
    k.call("cudaStreamWaitEvent", begin + 76, begin + 77, 3)
    k.launch(NCCL, begin + 80, begin + 90, 4, (begin + 134, 400), stream=20, device=number)
    k.call("cudaEventRecord", begin + 92, begin + 93, 7)
    k.call("cudaStreamWaitEvent", begin + 110, begin + 111, 5)
    k.op("aten::add_", begin + 120, begin + 140)
    k.launch("update", begin + 125, begin + 130, 6, (402, 420), device=number)
    return k


def write(folder: Path, *ranks: Kineto) -> Path:
    for number, k in enumerate(ranks):
        k.write(folder / f"rank{number}.json.gz")
    return folder


def test_collectives_become_one_task_that_holds_all_lanes(tmp_path: Path) -> None:
    trace = read(write(tmp_path, rank(0, 0), rank(1, 150)))
    g = trace.graph
    (one,) = g.select(kind="collective").tolist()
    task = g[one]
    assert (task.op, task.group, task.comm_bytes) == ("all_reduce", "0-1", 1000.0)
    assert [int(g.lanes.rank[lane]) for lane in task.lanes] == [0, 1]
    assert task.seconds == pytest.approx(116 * US)  # of the rank that came last
    assert simulate(trace.warm).seconds - trace.found == pytest.approx(500 * US)
    assert np.abs(simulate(trace.warm).start[trace.ahead :] - trace.start).max() < 3 * US


def test_a_collective_starts_when_the_last_rank_has_come(tmp_path: Path) -> None:
    g = read(write(tmp_path, rank(0, 0), rank(1, 150))).graph
    (one,) = g.select(kind="collective").tolist()
    late = g.select(name="gemm", rank=1)
    with g.edit("slow") as edit:
        edit.scale(late, 5.0)
    before, after = simulate(g).start[one], simulate(edit.graph).start[one]
    assert after - before == pytest.approx(400 * US, rel=0.05)
    everywhere = edit.graph.select(name="update")
    assert (simulate(edit.graph).start[everywhere] > after).all()


@pytest.mark.parametrize("clock", [-5000.0, 123456.0])
def test_clocks_are_laid_over_each_other_by_collectives(tmp_path: Path, clock: float) -> None:
    same = read(write(tmp_path, rank(0, 0), rank(1, 150)))
    (tmp_path / "other").mkdir()
    other = read(write(tmp_path / "other", rank(0, 0), rank(1, 150, clock)))
    assert other.graph.facts["late"] == pytest.approx(same.graph.facts["late"], abs=US)
    assert other.graph.facts["late"] == pytest.approx([0.0, 150 * US], abs=US)
    assert other.graph.facts["measured"] == pytest.approx(same.graph.facts["measured"])


def test_a_late_rank_among_many_is_named_and_the_others_are_on_its_clock(tmp_path: Path) -> None:
    """64 ranks, each with a clock of its own; one begins its step later than the rest."""
    many, slow = 64, 37
    ranks = (rank(k, 150 * (k == slow), 977.0 * k * (-1) ** k, many) for k in range(many))
    trace = read(write(tmp_path, *ranks))
    (one,) = trace.graph.select(kind="collective").tolist()
    assert len(trace.graph[one].lanes) == many
    assert trace.graph.facts["late"] == pytest.approx([150 * US * (k == slow) for k in range(many)])
    assert any(f"rank {slow} is a straggler" in note for note in trace.notes)
    assert simulate(trace.warm).seconds - trace.found == pytest.approx(500 * US, rel=0.01)


def pair(number: int, peers: tuple[int, int], begin: float, clock: float) -> Kineto:
    """A rank that reduces with one neighbour first, then with the other."""
    k = Kineto(base=1000.0 + clock, distributedInfo={"rank": number, "world_size": 4})
    k.note("ProfilerStep#5", begin, 900)
    for at, peer in ((100, peers[0]), (400, peers[1])):
        group = {"Process Group Ranks": str(sorted((number, peer))), "Collective name": "allreduce"}
        k.op("record_param_comms", begin + at, begin + at + 20)
        k.launch(NCCL, begin + at + 5, begin + at + 10, at, (begin + at + 20, at + 250), stream=20,
                 device=number, **group)  # fmt: skip
    return k


def test_clocks_of_ranks_that_share_no_group_with_the_first(tmp_path: Path) -> None:
    """Rank 3 shares a group with 1 and 2, and only they with 0."""
    clocks = (0.0, 5000.0, -700.0, 123456.0)
    peers = ((1, 2), (0, 3), (3, 0), (2, 1))
    folder = write(tmp_path, *(pair(r, peers[r], 10.0 * r, clocks[r]) for r in range(4)))
    late = read(folder).graph.facts["late"]
    assert late == pytest.approx([0.0, 10 * US, 20 * US, 30 * US], abs=2 * US)


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    trace = read(write(tmp_path, rank(0, 0), rank(1, 150)))
    found = trace.graph.facts["balance"]
    assert found["waiting_s"] == pytest.approx([150 * US, 0.0], abs=US)
    assert found["waited_for_s"] == pytest.approx([0.0, 150 * US], abs=US)
    assert any("rank 1 is a straggler" in note for note in trace.notes)
    assert any("rank 1 begins its step" in note for note in trace.notes)
    even = tmp_path / "even"
    even.mkdir()
    assert not read(write(even, rank(0, 0), rank(1, 1))).notes


def test_ranks_that_disagree_keep_their_own(tmp_path: Path) -> None:
    odd = rank(1, 150)
    odd.launch(NCCL, 440, 445, 9, (450, 460), stream=20)
    trace = read(write(tmp_path, rank(0, 0), odd))
    assert len(trace.graph.select(kind="collective")) == 3
    assert any("different numbers of `all_reduce`" in note for note in trace.notes)


def test_some_ranks_can_be_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, *(rank(r, 10.0 * r, ranks=3) for r in range(3)))
    assert set(read(folder).graph.rank.tolist()) == {0, 1, 2}
    assert set(read(folder, ranks=[0, 2]).graph.rank.tolist()) == {0, 2}
    with pytest.raises(InputError, match="no rank 7"):
        read(folder, ranks=[7])


def test_two_files_of_one_rank_are_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path, rank(0, 0), rank(0, 0))
    with pytest.raises(InputError, match="two traces say they are rank 0"):
        read(folder)
