"""The gradients of a step: all of them, each once, in the order they are ready."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from foretell.graph import Builder
from foretell.trace import read
from foretell.whatif import DoesNotApply, Setting, applied, parse
from foretell.whatif.gradients import exchanged, gradients
from foretell.whatif.parameters import numbers, parameters
from tests.transformer import transformer
from tests.whatif.ddp import bare, hosted

TRUTH = Path(__file__).resolve().parents[2].parent / "shared" / "truth"
# Parameters of the models as their makers count them: torchvision's and Hugging Face's model cards
# (bert with the head for masked words, gpt2 with tied embeddings); dlrm by its tables and layers.
MODELS = {
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "mobilenet_v3_large": 5_483_032,
    "swin_t": 28_288_354,
    "bert_base": 109_514_298,
    "gpt2": 124_439_808,
    "dlrm": 334_955_841,
}


def traced(name):
    path = TRUTH / name
    if not path.exists():
        pytest.skip(f"no measured data at {path}")
    return path


@pytest.mark.truth
@pytest.mark.parametrize("variant", ["base", "amp_bf16"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_all_parameters_of_a_model(model, variant):
    (found,) = gradients(read(traced(f"h200/{model}.{variant}.json.gz")).graph)
    assert found.source == "autograd"
    assert found.bytes.sum() == 4 * MODELS[model]


@pytest.mark.truth
@pytest.mark.parametrize("model", sorted(MODELS))
def test_they_come_in_the_order_autograd_visits_them(model):
    """The trace itself tells the size at each visit; the graph has to do without."""
    path = traced(f"h200/{model}.base.json.gz")
    (found,) = gradients(read(path).graph)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    visits = sorted(
        (e["ts"], e["args"]["Input Dims"][0])
        for e in events
        if e.get("name") == "torch::autograd::AccumulateGrad"
    )
    answer = np.array([4 * np.prod(dims, dtype=float) for _, dims in visits[-len(found) :]])
    assert sorted(answer) == sorted(found.bytes)
    apart = np.abs(np.cumsum(answer) - np.cumsum(found.bytes)).max() / answer.sum()
    assert apart < 0.05  # weight and bias of one layer may change places


@pytest.mark.truth
def test_a_trace_whose_gradients_are_set_to_zero():
    name = "traces/kineto/resnet50_num_workers_4.worker0.1623212756351.pt.trace.json.gz"
    (found,) = gradients(read(traced(name)).graph)
    assert (found.source, found.bytes.sum()) == ("autograd", 4 * MODELS["resnet50"])
    assert found.shape[:2] == ("1000", "1000x2048")


@pytest.mark.truth
def test_a_trace_that_exchanges_them_already():
    """Its embeddings live on one rank each; only what the ranks share is exchanged."""
    graph = read(traced("traces/param/dlrm_kineto.tar.gz")).graph
    found = gradients(graph)
    assert [side.rank for side in found] == list(range(8))
    for side in found:
        assert side.source == "collectives"
        assert side.bytes.tolist() == [1576964.0, 448.0, 907840.0]


@pytest.mark.parametrize("add", [True, False])
def test_by_autograd(add):
    graph = hosted(("10x20", "5x10"), add=add)
    (found,) = gradients(graph)
    assert found.source == "autograd"
    assert found.shape == ("5x10", "10x20")
    assert found.layer == ("linear.1", "linear.0")
    assert found.bytes.tolist() == [200.0, 800.0]
    assert [graph[int(i)].name for i in found.ready] == ["AccumulateGrad"] * 2


def test_layers_out_of_order_are_distinguished_by_their_inputs():
    make = Builder()
    thread, stream = make.lane("t", kind="host"), make.lane("s", kind="compute")
    sizes = {"a": "2x2", "b": "3x3", "c": "4x4"}
    for layer, size in sizes.items():
        make.task(kind="kernel", op="mm", lane=stream, phase="forward", layer=layer,
                  shape=f"in=7x7+{size}")  # fmt: skip
    for layer in ("b", "c", "a"):  # not from last to first
        make.task(kind="kernel", op="mm", lane=stream, phase="backward", layer=layer)
        make.task(kind="host", op="AccumulateGrad", name="AccumulateGrad", lane=thread,
                  phase="backward", layer=layer)  # fmt: skip
    for size in sizes.values():
        make.task(kind="kernel", op="add_", lane=stream, phase="update", shape=f"in={size}+{size}")
    (found,) = gradients(make.graph())
    assert found.shape == ("3x3", "4x4", "2x2")


@pytest.mark.parametrize("dtype", [("fp32", 4), ("bf16", 2), ("fp64", 8)])
def test_the_bytes_of_a_number(dtype):
    graph = hosted(("10x20",))
    with graph.edit() as edit:
        edit.set(edit.select(phase="update", kind="kernel"), dtype=dtype[0])
    (found,) = gradients(edit.graph)
    assert found.bytes.tolist() == [200.0 * dtype[1]]


def test_a_list_of_parameters():
    graph = hosted(("10x20", "5x10"))
    with graph.edit() as edit:
        first, second = edit.select(phase="update", kind="kernel")
        tensors = "10x20|5x10|7"
        edit.set(first, op="_foreach_add_", shape=f"in={tensors}+{tensors},types=TensorList")
        edit.remove(second)
    assert parameters(edit.graph, 0) == [("10x20", 4.0), ("5x10", 4.0), ("7", 4.0)]


def test_by_the_collectives_that_are_there():
    step = transformer(ranks=2, layers=3)
    found = gradients(step)
    assert [side.source for side in found] == ["collectives"] * 2
    assert found[0].layer == ("block.2", "block.1", "block.0")
    assert found[0].bytes.tolist() == [12 * 1024 * 1024 * 2] * 3
    assert len(exchanged(step)) == 3
    for rank, side in enumerate(found):
        assert (step.rank[side.ready] == rank).all()


def test_by_buffers():
    (found,) = gradients(bare(5.0, layers=3))
    assert (found.source, found.bytes.tolist()) == ("buffers", [5.0] * 3)
    assert found.layer == ("linear.2", "linear.1", "linear.0")


def test_a_cuda_graph_spreads_them_over_the_backward():
    step = parse("cuda-graph").apply(hosted(("10x20", "5x10")), Setting())
    (found,) = gradients(step)
    assert (found.source, found.bytes.tolist()) == ("spread", [200.0, 800.0])
    back = step.select(phase="backward", kind="kernel")
    assert found.ready.tolist() == back.tolist()


def test_once_packed_the_copies_tell():
    graph = hosted(("10x20", "5x10"))
    changes = [parse("data-parallel:ranks=2"), parse("accumulate:steps=3")]
    for order in (changes, changes[::-1]):
        (found,) = gradients(applied(order, graph))
        assert found.source == "packed"
        assert found.bytes.tolist() == [200.0, 800.0]
        assert found.shape == ("5x10", "10x20")


def test_gradients_of_unknown_size():
    graph = hosted()
    with graph.edit() as edit:
        edit.set(edit.select(kind="kernel"), shape="")
    with pytest.raises(DoesNotApply, match="how large"):
        gradients(edit.graph)


def test_no_backward():
    make = Builder()
    make.task(kind="kernel", phase="forward", seconds=1.0)
    with pytest.raises(DoesNotApply, match="no recognizable backward"):
        gradients(make.graph())


@pytest.mark.parametrize(
    ("text", "count"), [("3x4", 12.0), ("7", 7.0), ("-", 0.0), ("", 0.0), ("3x", 0.0)]
)
def test_numbers_of_a_shape(text, count):
    assert numbers(text) == count
