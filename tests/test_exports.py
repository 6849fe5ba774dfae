"""The public names, and what importing them loads."""

import subprocess
import sys

import pytest

import foretell
import foretell.graph

PUBLIC = [
    "AdviceResult",
    "Builder",
    "Cluster",
    "ForetellError",
    "Graph",
    "ModelSchedule",
    "Plan",
    "PlanResult",
    "Prediction",
    "ScalingResult",
    "ScheduleResult",
    "Simulation",
    "Step",
    "Timeline",
    "WhatIfResult",
    "__version__",
    "capture",
    "concat",
    "deploy",
    "load",
    "oracle",
    "parallelize",
    "parse",
    "plan",
    "predict",
    "price",
    "profile",
    "read",
    "replicate",
    "save",
    "schedule",
    "simulate",
]
GRAPH = {
    *(
        "COLLECTIVES",
        "COLUMNS",
        "NONE",
        "BufferKind",
        "Dtype",
        "Kind",
        "LaneKind",
        "Phase",
        "Source",
    ),
    *("WaitKind", "Buffers", "Drained", "Edges", "Held", "Lanes", "Links", "Names", "Used"),
    *("Builder", "Edit", "Graph", "Task", "assemble", "concat", "edges", "load", "parse"),
    *("replicate", "save", "text", "verify"),
}


def test_the_public_names():
    assert sorted(foretell.__all__) == PUBLIC
    assert dir(foretell) == PUBLIC


def test_every_public_name_is_there():
    """Those of a module asked for first, in a fork of a process with nothing else of ours."""
    code = """
import contextlib, os, sys, traceback, foretell
import click, msgspec, numpy, rich.console, rich.table
with contextlib.suppress(ImportError):
    import torch.distributed.fsdp, torch._dynamo
missing = []
where = {name: module for module, names in foretell._PUBLIC.items() for name in names.split()}
alike = {where.get(name, name): [] for name in sys.argv[1:]}  # by where they live
for name in sys.argv[1:]:
    alike[where.get(name, name)].append(name)
for names in alike.values():
    child = os.fork()
    if not child:
        try:
            os._exit(any(getattr(foretell, name) is None for name in names))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        missing += names
print(missing)
"""
    assert fresh(code, *PUBLIC) == "[]"


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module `foretell` has no `simulator`"):
        foretell.simulator


@pytest.mark.parametrize("first", ["foretell", "foretell, foretell.simulate.engine"])
def test_functions_can_be_called_again_and_again(first):
    """Also where a room has the name of a function, and whoever was imported first."""
    code = f"import {first}; foretell.simulate; print(callable(foretell.simulate))"
    assert fresh(code) == "True"


def test_the_names_of_the_graph_room():
    assert set(foretell.graph.__all__) == GRAPH
    for name in GRAPH:
        assert getattr(foretell.graph, name) is not None


def test_importing_is_light():
    heavy = ("numba", "torch", "scipy", "zstandard", "numpy", "click", "rich")
    code = f"import sys, foretell; print([m for m in {heavy} if m in sys.modules])"
    assert fresh(code) == "[]"


def test_the_graph_room_needs_no_compiler():
    """Building, writing and reading a small graph loads neither a compiler nor a framework."""
    code = """
import sys, foretell
make = foretell.Builder()
make.task(seconds=1.0)
make.task(after=[0])
assert foretell.parse(str(make.graph())).size == 2
print([m for m in ("numba", "torch", "scipy") if m in sys.modules])
"""
    assert fresh(code) == "[]"


def fresh(code: str, *words: str) -> str:
    """What a new Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
