"""FSDP, local SGD, accumulation and parameter servers on steps small enough for paper."""

from dataclasses import replace

import numpy as np
import pytest

from foretell.baseline import steady_seconds
from foretell.errors import InputError
from foretell.graph.build import verify
from foretell.simulate import simulate
from foretell.simulate.memory import peak_bytes
from foretell.whatif import DoesNotApply, Setting, applied, parse
from foretell.whatif.interference import TAKES
from tests.transformer import transformer
from tests.whatif.ddp import START, bare, copied, hosted


def query(graph, *specs):
    return verify(applied([parse(s) for s in specs], graph, Setting()))


class TestFsdp:
    def test_without_prefetch_everything_follows_everything(self):
        """Two gathers forward, one backward, two scatters, a copy beside each of the five."""
        size = 1e8
        message, copy = START + size / 2 / 1e9, copied(size)
        half = 1.5e-6 + (1 - 1.5e-6) / 2  # the optimizer's kernel does half its work
        after = query(bare(size), "fsdp:ranks=2,prefetch=0,skew=0")
        expected = 5 * message + 5 * copy + 4 + half
        assert simulate(after).seconds == pytest.approx(expected, rel=1e-9)
        ops = [after[int(i)].op for i in after.select(kind="collective")]
        assert sorted(ops) == ["all_gather"] * 3 + ["reduce_scatter"] * 2

    def test_prefetch_hides_gathers(self):
        size = 1e8
        message, copy = START + size / 2 / 1e9, copied(size)
        after = query(bare(size), "fsdp:ranks=2,skew=0")
        played = simulate(after)
        gathers = after.select(op="all_gather")
        assert played.start[gathers].tolist()[:2] == pytest.approx([0.0, message])
        # Exposed are the first gather and the last scatter; the others slow what they run beside.
        exposed = simulate(after).seconds - 4 - 0.5 - 5 * copy
        assert exposed == pytest.approx(2 * message + 3 * message * TAKES, rel=0.02)

    def test_zero_2_scatters_gradients_and_gathers_once(self):
        size = 4e8
        after = query(bare(size), "fsdp:ranks=2,zero=2,skew=0")
        ops = [after[int(i)].op for i in after.select(kind="collective")]
        assert ops == ["reduce_scatter", "reduce_scatter", "all_gather"]
        (gather,) = after.select(op="all_gather")
        assert after.seconds[gather] == pytest.approx(START + 2 * size / 2 / 1e9)
        assert simulate(after).end[gather] == simulate(after).seconds

    def test_zero_1_reduces_gradients_on_all_ranks(self):
        after = query(bare(), "fsdp:ranks=2,zero=1,skew=0")
        ops = [after[int(i)].op for i in after.select(kind="collective")]
        assert ops == ["all_reduce", "all_reduce", "all_gather"]

    @pytest.mark.parametrize(
        ("zero", "kept"), [(1, (1, 1, 1 / 4)), (2, (1, 1 / 4, 1 / 4)), (3, (1 / 4,) * 3)]
    )
    def test_memory(self, zero, kept):
        size = 1e8
        after = query(bare(size), f"fsdp:ranks=4,zero={zero},skew=0")
        parameters, grads, state = kept
        expected = 2 * size * (parameters + grads + 2 * state)
        assert peak_bytes(simulate(after)) == pytest.approx(expected)

    def test_a_data_parallel_step_shards_the_same(self):
        straight = query(hosted(), "fsdp:ranks=4,skew=0")
        later = query(hosted(), "data-parallel:ranks=4,skew=0", "fsdp:ranks=4,skew=0")
        assert steady_seconds(later) == pytest.approx(steady_seconds(straight), rel=1e-9)

    def test_the_next_step_gathers_what_this_one_updates(self):
        after = query(bare(1e8), "fsdp:ranks=2,skew=0")
        assert steady_seconds(after) == pytest.approx(simulate(after).seconds, rel=1e-3)

    def test_layers_without_names(self):
        with bare().edit() as edit:
            edit.set(edit.select(phase="forward"), layer="")
        with pytest.raises(DoesNotApply, match="both a forward and a backward"):
            query(edit.graph, "fsdp:ranks=2,skew=0")

    @pytest.mark.parametrize(
        "spec", ["fsdp:ranks=1", "fsdp:ranks=2,zero=4,skew=0", "fsdp:ranks=2,unit_mb=0,skew=0"]
    )
    def test_mistakes(self, spec):
        with pytest.raises(InputError):
            query(bare(), spec)


class TestLocalSgd:
    def test_a_step_bears_its_share(self):
        size = 4e8
        average = START + 2 * 3 / 4 * 2 * size / 1e9
        after = query(bare(size), "local-sgd:every=8,ranks=4")
        assert simulate(after).seconds == pytest.approx(5 + average / 8)
        assert steady_seconds(after) == pytest.approx(5 + average / 8)

    def test_gradients_stay_where_they_are(self):
        after = query(bare(), "data-parallel:ranks=4,skew=0", "local-sgd:every=8")
        straight = query(bare(), "local-sgd:every=8,ranks=4")
        assert simulate(after).seconds == simulate(straight).seconds
        assert len(after.select(op=("bucket_pack", "bucket_unpack"))) == 0

    def test_how_many_ranks(self):
        with pytest.raises(DoesNotApply, match="one rank"):
            query(bare(), "local-sgd")


class TestAccumulate:
    def test_on_paper(self):
        size, steps = 4e8, 4
        adds = 2 * 1.5e-6 + 3 * 2 * size / 0.8e12
        after = query(bare(size), f"accumulate:steps={steps}")
        assert simulate(after).seconds == pytest.approx(4 * steps + 3 * adds + 1)

    def test_one_exchange_whatever_the_order(self):
        first = query(bare(), "data-parallel:ranks=2,skew=0", "accumulate:steps=3")
        later = query(bare(), "accumulate:steps=3", "data-parallel:ranks=2,skew=0")
        for step in (first, later):
            assert len(step.select(kind="collective")) == 2
        once = simulate(query(bare(), "data-parallel:ranks=2,skew=0")).seconds
        assert simulate(first).seconds == pytest.approx(once + 8, rel=0.01)
        assert simulate(later).seconds == pytest.approx(once + 8, rel=0.01)

    def test_passes_wait_for_the_thread_of_the_backward(self):
        step = hosted()
        with step.edit() as edit:
            edit.set(edit.select(name="AccumulateGrad"), seconds=1.0)
        after = query(edit.graph, "accumulate:steps=3")
        played = simulate(after)
        forward = after.select(kind="host", phase="forward")
        starts = np.sort(played.start[forward])
        assert starts[2] >= 2.0  # two seconds of autograd in the first pass
        assert starts[4] >= 4.0

    def test_gradients_that_are_added_already(self):
        after = query(hosted(add=True), "accumulate:steps=2")
        before = hosted(add=True)
        passes = before.select(phase=("forward", "backward"))
        assert len(after) == len(before) + len(passes)

    def test_every_rank(self):
        step = transformer(ranks=2, layers=2)
        with step.edit() as edit:
            edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-3)
        after = query(edit.graph, "accumulate:steps=2")
        for rank in (0, 1):
            count = len(step.select(phase="forward", rank=rank))
            assert len(after.select(phase="forward", rank=rank)) == 2 * count

    def test_mistakes(self):
        with pytest.raises(InputError):
            query(bare(), "accumulate:steps=1")


class TestParameterServer:
    """Two ranks, one server: a piece of b bytes takes its link for 2·b/B each way.

    The turned step: backward of layer 1 (0–1 s) and layer 0 (1–2 s), then both forwards.
    """

    def sizes(self, first, second):
        graph = bare(1.0)
        buffers = graph.buffers
        kind = buffers.kind == 2
        bytes = np.array(buffers.bytes)
        bytes[kind] = (first, second)
        return replace(graph, buffers=buffers.replace(bytes=bytes))

    def test_what_is_ready_first_goes_first(self):
        """Layer 1 has a gradient of two seconds; layer 0 has to wait for its pull."""
        after = query(self.sizes(1e8, 1e9), "parameter-server:ranks=2,servers=1,skew=0")
        # push 1: 1–3, pull 1: 3–5, push 0: 3–3.2, pull 0: 5–5.2, then both forwards
        assert simulate(after).seconds == pytest.approx(7.2, abs=1e-3)

    def test_first_layers_first(self):
        """P3: layer 0 overtakes, its forward runs while the rest of layer 1 is on its way."""
        after = query(self.sizes(1e8, 1e9), "p3:ranks=2,servers=1,slice_k=2500,skew=0")
        # 0.02 s a slice; push 0: 2–2.2, pull 0 until 2.22; push 1 until 3.2, pull 1 until 3.22
        assert simulate(after).seconds == pytest.approx(4.22, abs=1e-3)

    def test_servers_side_by_side(self):
        one = query(bare(4e8), "parameter-server:ranks=4,servers=1,skew=0")
        four = query(bare(4e8), "parameter-server:ranks=4,servers=4,skew=0")
        pushes = four.select(op="push")
        assert len(pushes) == 8  # two big tensors over four servers
        assert four.seconds[pushes] == pytest.approx(4 * 1e8 / 1e9)
        assert simulate(four).seconds < simulate(one).seconds

    def test_the_optimizer_leaves_the_step(self):
        after = query(hosted(), "parameter-server:ranks=2,skew=0")
        assert not len(after.select(phase="update"))

    def test_steps_in_a_row_are_as_long_as_one_turned(self):
        after = query(bare(4e8), "p3:ranks=2,skew=0")
        assert steady_seconds(after) == pytest.approx(simulate(after).seconds, rel=0.01)

    def test_a_turned_host_bound_step_is_no_faster(self):
        """Threads of forward and backward take turns; in a turned step they still do."""
        step = hosted()
        with step.edit() as edit:
            edit.set(edit.select(kind="host"), seconds=1.0)
            edit.fact(network_bandwidth=1e15)
        slow = edit.graph
        update = slow.seconds[slow.select(kind="host", phase="update")].sum()
        after = query(slow, "parameter-server:ranks=2,skew=0")
        assert steady_seconds(after) == pytest.approx(steady_seconds(slow) - update, rel=1e-3)

    def test_a_data_parallel_step_names_the_ranks(self):
        after = query(bare(), "data-parallel:ranks=4,skew=0", "p3")
        assert {after[int(i)].group for i in after.select(op="push")} == {"0-3"}
        assert not len(after.select(kind="collective"))

    @pytest.mark.parametrize("spec", ["p3:ranks=2", "data-parallel:ranks=2", "accumulate:steps=2"])
    def test_a_turned_step_is_not_turned_again(self, spec):
        turned = query(hosted(), "p3:ranks=2")
        with pytest.raises(DoesNotApply, match="begins with its backward"):
            query(turned, spec)

    @pytest.mark.parametrize("spec", ["p3", "parameter-server"])
    def test_how_many_ranks(self, spec):
        with pytest.raises(DoesNotApply, match="one rank"):
            query(bare(), spec)

    @pytest.mark.parametrize(
        "spec", ["p3:ranks=2,slice_k=0,skew=0", "parameter-server:ranks=2,servers=-1,skew=0"]
    )
    def test_mistakes(self, spec):
        with pytest.raises(InputError):
            query(bare(), spec)
