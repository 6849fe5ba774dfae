"""Collectives taken apart: compression and topology, against what paper and pencil give."""

import math
from itertools import pairwise

import numpy as np
import pytest

from foretell.cluster import load
from foretell.cost.collective import price
from foretell.cost.kernel import passes
from foretell.errors import InputError
from foretell.graph.build import verify
from foretell.graph.graph import Kind
from foretell.simulate import simulate
from foretell.whatif import DoesNotApply, Setting, applied, parse
from foretell.whatif.calls import call_seconds
from foretell.whatif.powersgd import thin
from tests.transformer import transformer
from tests.whatif.ddp import START, bare, hosted

RATE = 0.8e12  # bytes/s a copy moves on a device nobody named


def query(graph, *specs, on=None):
    return verify(applied([parse(s) for s in specs], graph, Setting(load(on) if on else None)))


def one_of(graph, **wanted):
    return graph[int(graph.select(**wanted)[0])]


class TestDgc:
    def test_on_paper(self):
        size, ranks, ratio = 4e8, 4, 0.01
        after = query(bare(size), f"data-parallel:ranks={ranks},skew=0", f"dgc:ratio={ratio}")
        chosen = ranks * ratio * size * 2  # values and places, of all ranks
        first, sent, last = (one_of(after, op=o) for o in ("sparsify", "all_gather", "scatter"))
        assert first.seconds == pytest.approx(8 * 1.5e-6 + 11 * size / RATE)
        assert sent.comm_bytes == pytest.approx(chosen)
        assert sent.seconds == pytest.approx(START + 3 / 4 * chosen / 1e9)
        assert last.seconds == pytest.approx(1.5e-6 + (size + 3 * chosen) / RATE)
        assert not len(after.select(op="all_reduce"))

    def test_stages_follow_each_other_and_the_optimizer_follows_them(self):
        after = query(bare(), "data-parallel:ranks=4,skew=0", "dgc")
        played = simulate(after)
        stages = [after.select(op=o) for o in ("sparsify", "all_gather", "scatter")]
        for one, next_one in pairwise(stages):
            assert (played.start[next_one] >= played.end[one]).all()
        update = after.select(op="add_", phase="update")
        assert played.start[update[0]] >= played.end[stages[-1]].max()

    def test_it_pays_on_slow_links_and_not_on_fast_ones(self):
        slow = query(bare(), "data-parallel:ranks=8,skew=0")
        fast = query(slow, "network:times=1000")
        assert simulate(query(slow, "dgc")).seconds < simulate(slow).seconds
        assert simulate(query(fast, "dgc")).seconds > simulate(fast).seconds

    def test_the_host_starts_its_kernels(self):
        step = query(hosted(("100x2000", "500x100")), "data-parallel:ranks=4,skew=0")
        after = query(step, "dgc")
        (call,) = after.select(op="sparsify", kind="host")
        (kernel,) = after.select(op="sparsify", kind="kernel")
        assert int(call) in after[int(kernel)].after
        assert after.seconds[call] == pytest.approx(8 * call_seconds(step))

    def test_the_host_waits_for_the_choice_and_the_update_for_the_hook(self):
        step = query(hosted(("100x2000", "500x100")), "data-parallel:ranks=4,skew=0")
        after = query(step, "dgc")
        (wait,) = np.flatnonzero(after.kind == Kind.SYNC)
        (chosen,) = after.select(op="sparsify", kind="kernel")
        (last,) = after.select(op="scatter", kind="host")
        assert int(chosen) in after[int(wait)].after
        played = simulate(after)
        assert played.start[last] >= played.end[wait] >= played.end[chosen]
        copies = after.select(op="bucket_unpack", kind="host")
        assert played.start[copies].min() >= played.end[last]

    @pytest.mark.parametrize("ratio", ["0", "-1", "2"])
    def test_mistakes(self, ratio):
        with pytest.raises(InputError):
            query(bare(), "data-parallel:ranks=2,skew=0", f"dgc:ratio={ratio}")

    @pytest.mark.parametrize("spec", ["bucket-size:mb=1", "data-parallel:ranks=8", "overlap:on=no"])
    def test_what_is_taken_apart_is_not_made_anew(self, spec):
        step = query(bare(), "data-parallel:ranks=2,skew=0", "dgc")
        with pytest.raises(DoesNotApply, match="taken apart by `dgc`"):
            query(step, spec)

    def test_what_is_compressed_is_not_compressed_again(self):
        with pytest.raises(DoesNotApply, match="no gradients by all_reduce"):
            query(bare(), "data-parallel:ranks=2,skew=0", "dgc", "dgc")


class TestPowerSgd:
    def test_a_matrix_a_vector_and_a_small_matrix(self):
        found = thin("in=1000x2048+1000+4x3", 2_049_012.0, 4)
        assert (found.left, found.right) == (4000, 8192)
        assert found.whole == 1000 + 12
        assert (found.matrices, found.count, found.vectors) == (2_048_000, 1, 2)

    def test_a_filter_is_a_matrix_of_its_outputs(self):
        found = thin("in=512x256x3x3+512x256x3x3", 2.0 * 512 * 256 * 9, 2)
        assert (found.left, found.right, found.count) == (2 * 1024, 2 * 2 * 256 * 9, 2)

    @pytest.mark.parametrize("shapes", ["", "in=-+-", "in=10x10"])
    def test_a_bucket_of_unknown_shapes_is_one_square(self, shapes):
        found = thin(shapes, 1e6, 4)
        assert (found.left, found.right, found.matrices) == (4000, 4000, 1e6)

    def test_on_paper(self):
        rows, columns, ranks, rank = 1000, 2000, 4, 2
        step = query(hosted((f"{rows}x{columns}",)), f"data-parallel:ranks={ranks},skew=0")
        after = query(step, f"powersgd:rank={rank}")
        size, share = 4.0 * rows * columns, 2 * 3 / 4 / 1e9
        p, q = after.select(op="all_reduce", kind="collective")
        assert after.comm_bytes[p] == 4 * rank * rows
        assert after.comm_bytes[q] == 4 * rank * columns
        assert after.seconds[p] == pytest.approx(START + share * 4 * rank * rows)
        assert after.seconds[q] == pytest.approx(START + share * 4 * rank * columns)
        names = ("powersgd_p", "powersgd_q", "powersgd_back")
        first, middle, back = (one_of(after, op=n, kind="kernel") for n in names)
        assert first.seconds == pytest.approx((4 * rank + 3) * 1.5e-6 + 4 * size / RATE)
        assert middle.seconds == pytest.approx((4 * rank + 1) * 1.5e-6 + size / RATE)
        assert back.seconds == pytest.approx(3 * 1.5e-6 + 4 * size / RATE)
        played, (wait,) = simulate(after), np.flatnonzero(after.kind == Kind.SYNC)
        assert played.start[after.select(op="bucket_unpack", kind="host")].min() >= played.end[wait]

    def test_many_columns_are_made_orthogonal_by_qr(self):
        step = query(hosted(("1000x2000",)), "data-parallel:ranks=4,skew=0")
        few, many = (query(step, f"powersgd:rank={r}") for r in (2, 4))
        spent = [g.seconds[g.select(op="powersgd_*", kind="host")].sum() for g in (few, many)]
        call, qr = call_seconds(step), passes()["powersgd"]["qr"]
        assert spent[1] - spent[0] == pytest.approx(2 * (qr - 8 * call))

    def test_mistakes(self):
        with pytest.raises(InputError):
            query(bare(), "data-parallel:ranks=2,skew=0", "powersgd:rank=0")


class TestBlueConnect:
    def test_on_paper(self):
        size = 4e8
        after = query(bare(size), "data-parallel:ranks=8,skew=0", "blueconnect:inside=4")
        down, across, up = (
            one_of(after, kind="collective", op=o)
            for o in ("reduce_scatter", "all_reduce", "all_gather")
        )
        assert down.seconds == up.seconds == pytest.approx(START + 3 / 4 * size / 1e9)
        assert across.comm_bytes == size / 4
        assert across.seconds == pytest.approx(START + size / 4 / 1e9)
        assert (down.group, across.group) == ("0-3", "0+4")

    def test_stages_of_two_buckets_overlap(self):
        """Tiers are channels of their own: three stages of two buckets take four, not six."""
        after = query(
            bare(4e8, update=0), "data-parallel:ranks=4,overlap=no,skew=0", "blueconnect:inside=2"
        )
        played = simulate(after)
        stages = after.select(kind="collective")
        one = START + 0.2
        took = played.end[stages].max() - played.start[stages].min()
        assert took == pytest.approx(4 * one, rel=0.01)

    def test_by_the_nodes_of_a_cluster(self):
        cluster = load("dgx-a100:nodes=4")
        with bare().edit() as edit:
            edit.fact(network_bandwidth=0.0)
        step = applied([parse("data-parallel:ranks=32,skew=0")], edit.graph, Setting(cluster))
        after = verify(applied([parse("blueconnect")], step, Setting(cluster)))
        across = one_of(after, kind="collective", op="all_reduce")
        assert across.group == "0-24/8"
        beside = [range(k, 32, 8) for k in range(1, 8)]
        levels = cluster.levels(range(0, 32, 8), beside)
        assert across.seconds == pytest.approx(price("all_reduce", 4e8 / 8, levels).seconds)

    def test_one_node_has_one_tier(self):
        with bare().edit() as edit:
            edit.fact(network_bandwidth=0.0)
        with pytest.raises(DoesNotApply, match="one tier"):
            query(edit.graph, "data-parallel:ranks=8,skew=0", "blueconnect", on="dgx-a100")

    def test_nodes_that_do_not_fill(self):
        with pytest.raises(InputError, match="do not make nodes"):
            query(bare(), "data-parallel:ranks=8,skew=0", "blueconnect:inside=3")


@pytest.mark.parametrize("spec", ["dgc", "powersgd", "blueconnect:inside=2"])
def test_both_ranks_of_a_graph_take_part(spec):
    step = transformer(ranks=2, layers=2)
    with step.edit() as edit:
        edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-3)
    after = query(edit.graph, spec)
    for task in after.select(kind="collective").tolist():
        assert sorted(after.lanes.rank[list(after[task].lanes)].tolist()) == [0, 1]
    played = simulate(after)
    last = played.end[after.select(kind="collective")].max()
    for rank in (0, 1):
        first = after.select(phase="update", kind="kernel", rank=rank)[0]
        assert played.start[first] >= last or math.isclose(played.start[first], last)


@pytest.mark.parametrize("spec", ["dgc", "powersgd", "blueconnect:inside=2"])
def test_they_need_an_exchange(spec):
    with pytest.raises(DoesNotApply, match="data-parallel"):
        query(bare(), spec)
