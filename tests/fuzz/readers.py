"""What reads each format, without a command around it: thousands of cases a second.

A reader ends with a value or with an error of ours; anything else is a bug. What is read is asked
for the little that every command asks, so that values no reader should let through are met too.
"""

from __future__ import annotations

import io
import json
import random
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

from foretell.errors import ForetellError
from tests.fuzz.formats import MODEL, formats
from tests.fuzz.harness import SECONDS, Hang, _alarm
from tests.fuzz.mutate import text as changed


def _step(path: Path) -> object:
    from foretell.advise import Step
    from foretell.simulate import simulate

    return simulate(Step.from_file(path, _query()[1]).graph).seconds


def _plan(path: Path) -> object:
    from foretell.plan import check
    from foretell.plan.plan import as_fields, load

    plan = load(path)
    json.dumps(as_fields(plan), allow_nan=False)
    return check(plan, *_query())


@cache
def _query() -> tuple[Any, Any]:
    from foretell.cluster import load as machines
    from foretell.workload import load

    return load(MODEL), machines("dgx-a100:nodes=1")


def _answer(path: Path) -> object:
    from foretell.survey.inputs import read_answer

    return read_answer(path)


def _batch(path: Path) -> object:
    from foretell.cli.predict import _requests

    return _requests(path)


def _runs(path: Path) -> object:
    from foretell.predict.fit import table

    return table(path)


def _cluster(path: Path) -> object:
    from foretell.cluster import load

    return load(f"./{path.name}").text()


def _calibration(path: Path) -> object:
    from foretell.cluster.cluster import load

    return load(path)


def _prices(path: Path) -> object:
    from foretell.api.scaling import prices_of

    return prices_of(path)


def _placement(path: Path) -> object:
    from foretell.search.schedule.problem import load

    return load(path)


def _config(path: Path) -> object:
    from foretell.workload import load

    return load(f"./{path.name}")


def _spec(path: Path) -> object:
    from foretell.cluster import load as machines
    from foretell.plan import Plan
    from foretell.search.kit import parse as planner
    from foretell.whatif import parse as whatif
    from foretell.workload import load

    kind, _, text = path.read_text("utf-8", "replace").partition("\n")
    read = {"plan": Plan.parse, "cluster": machines, "workload": load, "planner": planner}
    return read.get(kind, whatif)(text)


SPECS = {
    "plan": ("dp=4,tp=2,pp=1,micro_batch=1,global_batch=8,zero=1", "pp=2,layers=4+5,sync=a+ps:1",
             "groups=0+1+all-reduce+0:8+1:4/2+2+ps+1:9+2:3,global_batch=12"),
    "cluster": ("dgx-a100:nodes=2,oversubscription=2", "dgx-1-v100:nic=ethernet-25g,nics=1"),
    "workload": (MODEL, "llama:layers=32,hidden=4096,heads=32,seq=4096", "vgg16:batch=32"),
    "planner": ("fusion:evaluations=120", "placement:playouts=20,strokes=2000,polish=500"),
    "whatif": ("amp:dtype=bf16", "faster:op=gemm,times=2", "data-parallel:ranks=4"),
}  # fmt: skip
_STEPS = ("trace", "trace-gz", "execution", "chakra", "graph-text", "graph", "graph-bytes")
READERS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(_STEPS, _step), "plan": _plan, "plan-toml": _plan, "answer": _answer,
    "batch": _batch, "runs": _runs, "runs-csv": _runs, "cluster": _cluster,
    "calibration": _calibration, "prices": _prices, "placement": _placement, "config": _config,
    "spec": _spec,
}  # fmt: skip


def read(name: str, number: int, folder: Path) -> tuple[list[str], str, int]:
    """Make one case and read it; what was asked, what was wrong, and how it ended."""
    if name == "spec":
        draw = random.Random(f"word {number}")
        kind = draw.choice(tuple(SPECS))
        raw, ending = kind.encode() + b"\n" + changed(draw.choice(SPECS[kind]), draw), ".spec"
    else:
        form = formats()[name]
        (raw, _), ending = form.case(number, name), form.ending
    path = folder / f"case{ending}"
    path.write_bytes(raw)
    argv = ["read", name, f"./{path.name}"]
    try:
        with redirect_stderr(io.StringIO()), _alarm(SECONDS):
            READERS[name](path)
    except ForetellError:
        return argv, "", 2
    except Hang:
        return argv, f"still reading after {SECONDS:g} s", 1
    except BaseException:
        return argv, traceback.format_exc(), 1
    return argv, "", 0
