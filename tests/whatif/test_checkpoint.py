"""A second forward pass, and what the hooks of a checkpoint cost the host."""

from pathlib import Path

import pytest

from foretell.graph.graph import Kind, Phase
from foretell.memory.tape import FACT, decode
from foretell.trace import read
from foretell.whatif import Setting, parse
from foretell.whatif.checkpoint import PACK, PACK_AGAIN, UNPACK

STEP = Path(__file__).parents[2] / "benchmarks" / "measured" / "h200" / "resnet18.base.json.gz"


def host(graph, **wanted):
    return float(graph.seconds[graph.select(kind="host", **wanted)].sum())


def test_the_host_pays_for_each_saved_tensor():
    graph = read(STEP).graph
    tape = decode(graph.facts[FACT])
    saved = sum(len(o.keeps) for o in tape.ops if o.phase in (Phase.FORWARD, Phase.LOSS))
    after = parse("checkpoint").apply(graph, Setting())
    second = host(graph, phase="forward")
    more = host(after) - host(graph) - second
    assert saved > 100
    assert more == pytest.approx(saved * (PACK + PACK_AGAIN + UNPACK), rel=1e-6)
    packed = host(after, phase="forward") - second
    assert packed == pytest.approx(saved * PACK, rel=1e-6)


def test_kernels_of_the_forward_run_twice():
    graph = read(STEP).graph
    after = parse("checkpoint").apply(graph, Setting())
    kernels = (graph.kind == Kind.KERNEL) & (graph.phase == Phase.FORWARD)
    count = int((after.kind == Kind.KERNEL).sum()) - int((graph.kind == Kind.KERNEL).sum())
    assert count == int(kernels.sum()) > 0
