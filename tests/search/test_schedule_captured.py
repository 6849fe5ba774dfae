"""A captured step dealt out in stages: layers by module, times by kernel, memory by buffer."""

import numpy as np
import pytest

from foretell.cluster import load as load_cluster
from foretell.errors import InfeasibleError, InputError
from foretell.graph import Builder
from foretell.search.schedule import schedule, wrong
from foretell.search.schedule.best import solved
from foretell.search.schedule.captured import captured
from foretell.search.schedule.model import captured_model

MIB = 2.0**20


def step(layers=("stem", "body.0", "body.1", "body.2", "head"), reads=None):
    """A step whose layer i takes i + 1 ms forward, and as long for each gradient."""
    made = Builder()
    lane = made.lane("compute", kind="compute")
    ahead, held = [], []
    for i, name in enumerate(layers):
        after = [ahead[j] for j in (reads or {}).get(i, [i - 1] if i else [])]
        kernel = {"lane": lane, "kind": "kernel", "op": "gemm", "source": "measured"}
        task = made.task(
            after=after, seconds=1e-3 * (i + 1), phase="forward", layer=f"{name}.lin", **kernel
        )
        ahead.append(task)
        made.buffer(4 * MIB, name=f"{name}.lin.weight", kind="parameter")
        held.append(task)
    last = ahead[-1]
    for i in reversed(range(len(layers))):
        for makes in (False, True):
            last = made.task(
                after=[last], seconds=1e-3 * (i + 1), phase="backward", layer=f"{layers[i]}.lin",
                lane=lane, kind="kernel", op="gemm", source="measured",
            )  # fmt: skip
            if makes:
                made.buffer(4 * MIB, born=last, name=f"{layers[i]}.lin.weight", kind="gradient")
        made.buffer((i + 1) * MIB, born=held[i], dies=last, name=layers[i], kind="activation")
    return made.graph(captured="net")


@pytest.fixture(scope="module")
def two():
    return load_cluster("v100-16:gpus=2")


def test_layers_are_modules_with_their_own_times_and_bytes(two):
    found = captured(step(), two)
    names = [layer.name for layer in found.workload.layers]
    assert names == ["stem", "body.0", "body.1", "body.2", "head"]
    r = found.rates((0,))
    assert r.forward == pytest.approx(1e-3 * np.arange(1, 6))
    assert r.weights == pytest.approx(1e-3 * np.arange(1, 6))
    assert r.inputs == pytest.approx(1e-3 * np.arange(1, 6))
    assert r.kept == pytest.approx(MIB * np.arange(1, 6))
    assert r.parameters == pytest.approx([4 * MIB] * 5)
    assert r.handed == pytest.approx([MIB, 2 * MIB, 3 * MIB, 4 * MIB, 0])


def test_what_skips_layers_travels_with_every_cut_it_crosses(two):
    r = captured(step(reads={1: [0], 2: [1], 3: [2, 0], 4: [3]}), two).rates((0,))
    assert r.handed == pytest.approx([MIB, 3 * MIB, 4 * MIB, 4 * MIB, 0])


def test_stages_are_balanced_and_scheduled(two):
    found = captured_model(step(), two, 8, recompute="no")
    assert [p.times for p in found.places] == [(1, 1, 1, 1, 0), (0, 0, 0, 0, 1)] or [
        p.times for p in found.places
    ] == [(1, 1, 1, 0, 0), (0, 0, 0, 1, 1)]
    work = sorted(found.problem.work)
    assert max(work) == pytest.approx(3e-3 * 9)  # 4 and 5 against 1, 2 and 3
    one = solved(found, 8, time_limit=1)
    assert wrong(one.schedule.problem, one.schedule.starts, one.schedule.order) is None
    assert one.prediction.step >= one.schedule.makespan
    split = captured_model(step(), two, 8, recompute="no", split=True)
    assert {b.kind for b in split.problem.blocks} == {"F", "I", "W"}
    assert schedule(split.problem, 8).makespan <= one.schedule.makespan * (1 + 1e-9)


def test_what_is_not_known_of_a_captured_step_is_told(two):
    with pytest.raises(InfeasibleError, match="on 2 ranks: how its layers are split"):
        captured(step(), two).rates((0, 1))
    bare = Builder()
    lane = bare.lane("compute", kind="compute")
    bare.task(lane=lane, kind="kernel", phase="forward", seconds=1.0)
    with pytest.raises(InputError, match="does not say which module"):
        captured(bare.graph(), two)
