"""What-ifs of several devices after one another, in any order: sound, or a clear refusal."""

import random

import pytest

from foretell.cluster import load
from foretell.errors import InputError
from foretell.graph.build import verify
from foretell.simulate import simulate
from foretell.whatif import Setting, parse
from tests.transformer import transformer
from tests.whatif.ddp import bare, hosted

SPECS = (
    *("accumulate:steps=3", "blueconnect:inside=2", "bucket-size:mb=5", "data-parallel:ranks=8"),
    *("data-parallel:ranks=4,overlap=no", "dgc:ratio=0.01", "fsdp:ranks=8", "fsdp:ranks=8,zero=1"),
    *("fsdp:ranks=4,zero=2", "local-sgd:every=4", "network:times=4", "network:bandwidth=1"),
    *("overlap:on=no", "overlap:on=yes", "p3:ranks=4", "parameter-server:ranks=4", "powersgd"),
    *("checkpoint", "cuda-graph", "fused-optimizer", "batch:times=2"),
)


def sample():
    with transformer(ranks=2, layers=3).edit() as edit:
        edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-4)
    return edit.graph


STEPS = {"bare": bare, "hosted": hosted, "adding": lambda: hosted(add=True), "sample": sample}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", sorted(STEPS))
def test_any_order(name, seed):
    rng = random.Random(f"{name} {seed}")
    graph, made = STEPS[name](), []
    setting = Setting(rng.choice([None, load("dgx-a100:nodes=2")]))
    for spec in rng.sample(SPECS, 5):
        try:
            graph = verify(parse(spec).apply(graph, setting))
        except InputError:
            continue
        made.append(str(parse(spec)))
    assert list(graph.history[-len(made) :] if made else ()) == made
    assert 0 < simulate(graph).seconds < 1e4
    tags = [graph[int(i)].phase for i in graph.select(kind="collective")]
    assert set(tags) <= {"communicate"}
