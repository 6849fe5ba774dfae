"""Playing without a compiler gives the bits of the rule, and is chosen where it is sooner."""

import subprocess
import sys

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.strategies import graphs

from foretell.graph.wiring import wiring
from foretell.simulate import plain, transfers
from foretell.simulate.engine import loop_for
from foretell.simulate.readable import play

MANY = settings(max_examples=100, deadline=None)
SHAPES = st.sampled_from([{}, {"free": False}, {"links": False}, {"links": False, "free": False}])


def same(a, b):
    for column in ("start", "end", "cause", "why"):
        np.testing.assert_array_equal(getattr(a, column), getattr(b, column), column)


@MANY
@given(SHAPES.flatmap(lambda shape: graphs(**shape)))
def test_it_plays_by_the_rule(graph):
    same(plain.play(graph), play(graph))


@MANY
@given(graphs(links=False, free=False))
def test_its_sweep_gives_the_same_bits(graph):
    assert loop_for(graph) == "paths"
    assume(wiring(graph).is_forward)
    same(plain.sweep(graph), play(graph))


@settings(max_examples=200, deadline=None)
@given(graphs(free=False))
def test_its_transfers_give_the_same_bits(graph):
    same(transfers.flow(graph), play(graph))


CHOICE = """
import sys
from foretell.graph import Builder
from foretell.simulate import plain, simulate

make = Builder()
lane = make.lane("a", kind="compute")
for _ in range({tasks}):
    make.task(kind="kernel", op="gemm", lane=lane, seconds=1.0)
graph = make.graph()
for _ in range({times}):
    found = simulate(graph).seconds
print("numba" in sys.modules, found)
"""


def chosen(tasks: int, times: int) -> str:
    code = CHOICE.format(tasks=tasks, times=times)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_who_plays_once_needs_no_compiler_and_who_plays_often_gets_one():
    assert chosen(20_000, 1) == "False 20000.0"
    assert chosen(20_000, 7) == "True 20000.0"
    assert chosen(30_000, 1) == "True 30000.0"
