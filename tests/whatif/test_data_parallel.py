"""Gradients of several ranks brought together: buckets, overlap, copies, and what it costs."""

import numpy as np
import pytest

from foretell.cluster import load
from foretell.cost.collective import price
from foretell.errors import InputError
from foretell.graph import Builder
from foretell.graph.build import verify
from foretell.simulate import simulate
from foretell.whatif import DoesNotApply, Setting, applied, parse
from foretell.whatif.collective_cost import wires
from foretell.whatif.exchange import bucket_of
from foretell.whatif.interference import TAKES
from tests.transformer import transformer
from tests.whatif.ddp import START, bare, copied, hosted

MIB = float(1 << 20)


def query(graph, *specs, on=None):
    return verify(applied([parse(s) for s in specs], graph, Setting(load(on) if on else None)))


def test_a_bucket_is_closed_by_the_gradient_that_fills_it():
    sizes = np.array([0.5, 0.5, 10, 20, 3, 30, 1]) * MIB
    assert bucket_of(sizes, 25 * MIB).tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert bucket_of(sizes, 0.1 * MIB).tolist() == list(range(7))
    assert bucket_of(sizes, 1e12).tolist() == [0, 0, 1, 1, 1, 1, 1]


def test_two_layers_on_paper():
    """Both all-reduces beside what runs then, everything slowed while both run."""
    size = 4e8
    message, copy = START + size / 1e9, copied(size)
    beside = message * (1 + TAKES)  # the backward kernel is longer than the first message
    backward = beside + (1 - message)
    # The first copy out of its bucket runs beside the second message and slows it.
    second = message + copy * TAKES
    expected = 3 + copy + backward + copy + second + copy + 1
    after = query(bare(size), "data-parallel:ranks=2,skew=0")
    assert simulate(after).seconds == pytest.approx(expected, rel=1e-9)


def test_without_overlap_messages_come_behind_the_backward():
    size = 4e8
    message, copy = START + size / 1e9, copied(size)
    expected = 4 + 2 * copy + 2 * message + copy * TAKES + copy + 1
    after = query(bare(size), "data-parallel:ranks=2,overlap=no,skew=0")
    assert simulate(after).seconds == pytest.approx(expected, rel=1e-9)


def test_a_host_starts_copies_and_collectives():
    after = query(hosted(("100x2000", "500x100")), "data-parallel:ranks=4,skew=0")
    (sent,) = after.select(kind="collective")
    total = (100 * 2000 + 500 * 100) * 4
    assert after.comm_bytes[sent] == total
    assert after.seconds[sent] == pytest.approx(START + 2 * 3 / 4 * total / 1e9)
    calls = [a for a in after[int(sent)].after if after[a].kind == "host"]
    assert [after[a].op for a in calls] == ["all_reduce"]
    assert len(after.select(op="bucket_pack")) == len(after.select(op="bucket_unpack")) == 4
    played = simulate(after)
    update = after.select(op="add_", kind="kernel")
    assert (played.start[update] >= played.end[sent]).all()
    back = after.select(op="mm_back", kind="kernel")
    assert played.start[sent] >= played.end[back].max()


def test_small_buckets_are_sent_early():
    after = query(hosted(), "data-parallel:ranks=4,bucket_mb=1,skew=0")
    sent = after.select(kind="collective")
    assert after.comm_bytes[sent].tolist() == [500 * 1000 * 4, 1000 * 2000 * 4]
    played = simulate(after)
    first_back, last_back = after.select(op="mm_back", kind="kernel")
    assert played.start[sent[0]] >= played.end[first_back]
    assert played.start[sent[0]] < played.end[last_back]


def test_prices_come_from_the_cluster_where_one_is_named():
    cluster = load("dgx-a100:nodes=2")
    with bare().edit() as edit:
        edit.fact(network_bandwidth=0.0)
    after = parse("data-parallel:ranks=16,skew=0").apply(edit.graph, Setting(cluster))
    for task in after.select(kind="collective").tolist():
        levels = cluster.levels(range(16))
        expected = price("all_reduce", float(after.comm_bytes[task]), levels).seconds
        assert after.seconds[task] == pytest.approx(expected)
        assert after[task].group == "0-15"


def test_too_many_ranks_for_the_cluster():
    with pytest.raises(InputError, match="do not fit"):
        query(bare(), "data-parallel:ranks=9,skew=0", on="dgx-a100")


def test_links_of_the_device_that_was_traced():
    with bare().edit() as edit:
        edit.fact(network_bandwidth=0.0, device="NVIDIA A100-SXM4-80GB")
    found = wires(edit.graph, Setting(), 16)
    assert found.cluster == load("dgx-a100:nodes=2")


def test_links_as_fast_as_the_collectives_that_are_there():
    with transformer(ranks=2, layers=2).edit() as edit:
        edit.set(edit.select(kind="collective"), seconds=START + 0.01)
    size = float(edit.graph.comm_bytes[edit.graph.select(kind="collective")][0])
    found = wires(edit.graph, Setting(), 8)
    assert found.bandwidth == pytest.approx(size / 0.01)
    assert found.seconds("all_reduce", np.array([size]), tuple(range(8))) == pytest.approx(
        START + 0.01 * 7 / 4
    )


def test_links_between_ranks_are_not_given():
    with bare().edit() as edit:
        edit.fact(network_bandwidth=0.0)
    with pytest.raises(InputError, match="--on dgx-a100"):
        parse("data-parallel:ranks=2,skew=0").apply(edit.graph, Setting())


def test_a_data_parallel_step_is_taken_to_more_ranks():
    once = query(bare(), "data-parallel:ranks=2,skew=0")
    twice = query(once, "data-parallel:ranks=8,skew=0")
    straight = query(bare(), "data-parallel:ranks=8,skew=0")
    assert simulate(twice).seconds == simulate(straight).seconds
    assert len(twice) == len(straight)


def test_every_rank_of_a_graph_takes_part():
    step = transformer(ranks=2, layers=2)
    with step.edit() as edit:
        edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-3)
    after = query(edit.graph, "data-parallel:ranks=8,skew=0")
    for task in after.select(kind="collective").tolist():
        lanes = after[task].lanes
        assert sorted(after.lanes.rank[list(lanes)].tolist()) == [0, 1]
        assert {int(after.rank[a]) for a in after[task].after} == {0, 1}


def test_ranks_of_different_gradients():
    make = Builder()
    for rank in (0, 1):
        lane = make.lane("stream", rank=rank, kind="compute")
        make.task(kind="kernel", lane=lane, rank=rank, phase="forward", layer="a", seconds=1)
        make.task(kind="kernel", lane=lane, rank=rank, phase="backward", layer="a", seconds=1)
        make.buffer(1e6 * (rank + 1), rank=rank, name="a", kind="gradient")
    with pytest.raises(DoesNotApply, match="different gradients"):
        parse("data-parallel:ranks=2,skew=0").apply(make.graph(network_bandwidth=1e9), Setting())


@pytest.mark.parametrize(
    "spec", ["data-parallel:ranks=1", "data-parallel:ranks=2,bucket_mb=0,skew=0"]
)
def test_mistakes(spec):
    with pytest.raises(InputError):
        query(bare(), spec)


class TestBucketSize:
    def test_it_is_as_if_asked_for_at_once(self):
        straight = query(bare(layers=4), "data-parallel:ranks=2,bucket_mb=500,skew=0")
        later = query(bare(layers=4), "data-parallel:ranks=2,skew=0", "bucket-size:mb=500")
        assert simulate(later).seconds == simulate(straight).seconds
        assert len(later.select(kind="collective")) == 3  # 4e8, then two, then one

    def test_it_needs_an_exchange(self):
        with pytest.raises(DoesNotApply, match="exchanges no gradients"):
            query(bare(), "bucket-size:mb=10")


class TestOverlap:
    def test_off_and_on_again(self):
        with_it = query(bare(), "data-parallel:ranks=2,skew=0")
        without = query(with_it, "overlap:on=no")
        again = query(without, "overlap:on=yes")
        straight = query(bare(), "data-parallel:ranks=2,overlap=no,skew=0")
        assert simulate(without).seconds == pytest.approx(simulate(straight).seconds, rel=1e-9)
        assert simulate(again).seconds == simulate(with_it).seconds

    @pytest.mark.parametrize(("before", "spec"), [("yes", "on=yes"), ("no", "on=no")])
    def test_what_is_so_already(self, before, spec):
        step = query(bare(), f"data-parallel:ranks=2,overlap={before},skew=0")
        with pytest.raises(DoesNotApply, match="already"):
            query(step, f"overlap:{spec}")


class TestNetwork:
    def test_twice_as_fast(self):
        step = query(bare(), "data-parallel:ranks=2,skew=0")
        after = query(step, "network:times=2")
        sent = after.select(kind="collective")
        assert after.seconds[sent] == pytest.approx(START + (step.seconds[sent] - START) / 2)

    def test_a_rate(self):
        step = query(bare(), "data-parallel:ranks=2,skew=0")
        after = query(step, "network:bandwidth=4")
        sent = after.select(kind="collective")
        assert after.seconds[sent] == pytest.approx(START + 4e8 / 4e9)

    def test_what_is_put_in_later_has_the_new_links(self):
        one = query(
            bare(),
            "data-parallel:ranks=2,skew=0",
            "network:times=2",
            "data-parallel:ranks=4,skew=0",
        )
        other = query(bare(), "data-parallel:ranks=4,skew=0", "network:times=2")
        assert simulate(one).seconds == pytest.approx(simulate(other).seconds)

    def test_only_the_links_between_nodes_change(self):
        with bare().edit() as edit:
            edit.fact(network_bandwidth=0.0)
        on = "dgx-a100:nodes=2"
        step = query(edit.graph, "data-parallel:ranks=16,skew=0", on=on)
        after = query(step, "network:times=4", on=on)
        sent = after.select(kind="collective")
        assert (after.seconds[sent] < step.seconds[sent]).all()
        assert (after.seconds[sent] > step.seconds[sent] / 4).all()

    def test_nothing_is_communicated(self):
        with pytest.raises(DoesNotApply):
            query(bare(), "network:times=2")
