"""More samples: what does not follow them, and what changes its way past some number of them."""

import numpy as np
import pytest

from foretell.graph.graph import Kind
from foretell.whatif import parse
from foretell.whatif.base import Setting
from foretell.whatif.batch import SWEPT, TILED, gathered
from tests.whatif.traced import CALL, KERNEL, Step

BAG = "_embedding_bag_dense_backward"
PLAIN = "embedding_dense_backward"


def table(op, indices, kernels=10):
    """The gradient of a table of 1000 rows, its zeros, and an update of it."""
    s = Step(phase="backward")
    s.op("fill_", "in=1000x64+-,types=float+Scalar", "table.0")
    s.op(op, f"in={indices}x64+{indices},types=float+long int", "table.0", kernels=kernels)
    s.phase = "update"
    s.op("add_", "in=1000x64+1000x64,types=float+float", "optimizer")
    return s.graph()


def changed(graph, times):
    return parse(f"batch:times={times}").apply(graph, Setting())


def host(graph, op):
    names = np.isin(graph.name, graph.names.matching(op)) & (graph.kind == Kind.HOST)
    return float(graph.seconds[names].sum())


def device(graph, op):
    return float(graph.seconds[graph.select(kind="kernel", op=op)].sum())


def test_zeros_of_a_table_do_not_follow_the_batch():
    after = changed(table(BAG, 512), 2)
    assert device(after, "fill_") == KERNEL
    assert device(after, BAG) == pytest.approx(10 * KERNEL * 2**0.96, rel=0.01)


@pytest.mark.parametrize(("indices", "times"), [(512, 2), (4096, 2), (8192, 0.5)])
def test_on_one_side_of_the_limit_the_host_does_the_same(indices, times):
    before = table(BAG, indices)
    assert host(changed(before, times), BAG) == pytest.approx(host(before, BAG))


def test_past_one_tile_a_sort_is_twenty_calls():
    before = table(BAG, 2048)
    after = changed(before, 2)
    more = (SWEPT.launches - TILED.launches) * CALL
    assert host(after, BAG) - host(before, BAG) == pytest.approx(more)
    (one,) = gathered(before)
    assert one.seconds(2) - one.seconds() > SWEPT.seconds - TILED.seconds


@pytest.mark.parametrize(("indices", "times", "shorter"), [(4096, 0.5, True), (2240, 2, False)])
def test_few_indices_are_added_one_after_another(indices, times, shorter):
    before = table(PLAIN, indices, kernels=29 if shorter else 1)
    after = changed(before, times)
    assert (host(after, PLAIN) < host(before, PLAIN)) == shorter


def test_a_step_without_shapes_is_left_to_its_kernels():
    s = Step(phase="backward")
    s.op(BAG, "", "table.0", kernels=3)
    graph = s.graph()
    assert list(gathered(graph)) == []
    assert host(changed(graph, 2), BAG) == pytest.approx(host(graph, BAG))
