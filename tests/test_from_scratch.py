"""The small form of the product in docs runs, stays small, and does what the real one does."""

import ast
import contextlib
import io
import random
import runpy
import sys
from itertools import product
from pathlib import Path

import pytest

from foretell.graph import NONE, Builder
from foretell.simulate import simulate
from tests.alike import alike

DOCS = Path(__file__).resolve().parents[1] / "docs"
SCRIPT = DOCS / "from_scratch.py"


@pytest.fixture(scope="module")
def ran():
    """What the script defines, and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = runpy.run_path(str(SCRIPT))
    return names, printed.getvalue()


def test_it_prints_what_is_recorded(ran):
    assert alike(ran[1], (DOCS / "from_scratch.out").read_text()) == ""


def test_it_is_small_and_needs_nothing():
    source = SCRIPT.read_text()
    assert source.count("\n") < 400
    imports = [
        n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.Import, ast.ImportFrom))
    ]
    roots = {getattr(n, "module", None) or n.names[0].name for n in imports}
    assert {root.split(".")[0] for root in roots} <= sys.stdlib_module_names


@pytest.mark.parametrize("seed", range(150))
def test_its_rule_is_the_rule(ran, seed):
    """Start, end and cause of every task are those of the real engines, ties included."""
    small = ran[0]
    graph = random_graph(small, random.Random(seed))
    expected = small["simulate"](graph)
    for engine in ("compiled", "readable"):
        played = simulate(real_graph(graph), engine=engine)
        names = list(graph.tasks)
        for i, name in enumerate(names):
            cause = int(played.cause[i])
            found = (played.start[i], played.end[i], None if cause == NONE else names[cause])
            assert found == tuple(expected[name])


def random_graph(small, rng):
    """Up to 20 tasks on up to 4 lanes, with few different numbers so that many ties occur."""
    lanes = [f"lane{k}" for k in range(rng.randint(1, 4))]
    tasks = []
    for i in range(rng.randint(1, 20)):
        after = rng.sample([t.name for t in tasks], min(i, rng.randint(0, 3)))
        mine = rng.sample(lanes, rng.randint(0, min(2, len(lanes))))
        length, urgency = rng.choice([0.0, 0.5, 1.0, 2.0]), rng.choice([0, 0, 1])
        tasks.append(small["Task"](f"task{i}", length, (*mine,), (*after,), "op", urgency))
    return small["graph_of"](tasks, [lane for lane in lanes if rng.random() < 0.5])


def real_graph(graph):
    make = Builder()
    lanes = sorted({lane for t in graph.tasks.values() for lane in t.lanes})
    lane_of = {lane: make.lane(lane, ordered=lane not in graph.free) for lane in lanes}
    number = {name: i for i, name in enumerate(graph.tasks)}
    for t in graph.tasks.values():
        make.task(
            lanes=[lane_of[lane] for lane in t.lanes],
            after=[number[name] for name in t.after],
            seconds=t.seconds,
            priority=t.priority,
        )
    return make.graph()


def test_greedy_on_a_plain_line_is_1f1b(ran):
    small = ran[0]
    spans = small["simulate"](small["schedule"](small["PLAIN"], 6, fill=(4, 3, 2, 1)))
    first = sorted((span.start, name) for name, span in spans.items() if name[1] == "0")
    order = " ".join(name[0] + name[3] for _, name in first)
    assert order == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"


def test_shares_are_the_best_there_are(ran):
    devices = [(3.0, 4), (2.0, 9), (1.0, 9)]
    given, seconds = ran[0]["shares"](9, devices)
    assert sum(given) == 9
    assert all(n <= most for n, (_, most) in zip(given, devices, strict=True))
    options = (s for s in product(range(5), range(10), range(10)) if sum(s) == 9)
    times = (max(n / d[0] for n, d in zip(s, devices, strict=True)) for s in options)
    assert seconds == min(times)


def test_factors_win_on_the_wire_exactly_where_the_text_says(ran):
    """With no latency and no arithmetic, R(N1+N2) < 2·N1·N2 decides."""
    names = ran[0]
    factors, whole = names["factors_seconds"], names["all_reduce_seconds"]
    was = factors.__globals__["ALPHA"], factors.__globals__["PEAK"]
    factors.__globals__.update(ALPHA=0.0, PEAK=float("inf"))
    try:
        n1, n2 = 300, 600
        limit = 2 * n1 * n2 // (n1 + n2)
        sent = whole(2 * n1 * n2, 8, 1e9, alpha=0.0)
        assert factors(limit - 1, n1, n2, 8, 1e9) < sent < factors(limit + 1, n1, n2, 8, 1e9)
    finally:
        factors.__globals__.update(ALPHA=was[0], PEAK=was[1])
