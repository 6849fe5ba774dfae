"""Compiled loops give what their Python gives, to the last bit."""

import copy
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from foretell.cluster import load as machines
from foretell.compiled import LOOPS, Loop, build
from foretell.search.fusion.lanes import ends
from foretell.search.kit import parse
from foretell.workload import load
from foretell_lab.loops import build as builder
from foretell_lab.loops import translate

needs_compiler = pytest.mark.skipif(
    build.library("simulate") is None, reason="there is no C++ compiler"
)


@pytest.fixture
def held_to_python(monkeypatch):
    """The first call of every loop runs both ways; what was compared."""
    compared, native, is_inside = Counter(), Loop.__call__, [False]

    def both(self, *args, **words):
        name = f"{self.function.__module__}.{self.function.__name__}"
        if is_inside[0]:
            return self.function(*args, **words)
        if compared[name] or name.endswith("lowering.page"):  # pages are not filled yet
            return native(self, *args, **words)
        compared[name] += 1
        mine, is_inside[0] = copy.deepcopy(args), True
        try:
            wanted = self.function(*mine, **words)
        finally:
            is_inside[0] = False
        found = native(self, *args, **words)
        for one, other in zip(flat((found, args)), flat((wanted, mine)), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
        return found

    monkeypatch.setattr(Loop, "__call__", both)
    return compared


def flat(values):
    if isinstance(values, tuple | list):
        for value in values:
            yield from flat(value)
    else:
        yield values


@needs_compiler
def test_loops_of_searches_give_what_their_python_gives(held_to_python):
    few = "placement:playouts=1,strokes=8,polish=5"
    parse("fusion:evaluations=12").plan(load("vgg16:batch=16"), machines("disco-a"))
    parse(few).plan(load("vgg16:batch=32"), machines("heterog-8"))
    assert held_to_python["foretell.cost.fused_kernels._lower"]
    assert held_to_python["foretell.search.placement.search.loops_anneal"]
    assert len(held_to_python) > 12


@needs_compiler
def test_arrays_of_other_types_and_layouts_are_taken_too():
    order, cost, end = np.array([1, 0, 2], np.int32), np.arange(6.0)[::2], np.zeros(6)[::2]
    assert ends(order, cost, end, 0) == 6.0
    assert end.tolist() == [2.0, 2.0, 6.0]


@needs_compiler
def test_what_is_no_such_array_is_refused():
    with pytest.raises(TypeError, match="wants I1"):
        ends(np.zeros((2, 2), np.int64), np.zeros(2), np.zeros(2), 0)


def test_without_a_compiler_loops_run_as_python():
    code = """
import numpy as np
from foretell.search.fusion.lanes import best_messages
first, end = best_messages(np.array([0.0, 1.0]), np.array([1.0, 1.0]), np.array([[0.5, 0.0, 0.0]]))
print(first.tolist(), end)
"""
    env = {**os.environ, "FORETELL_COMPILED": "no", "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.stdout == "[0, 1] 1.5\n", ran.stderr


def test_a_package_with_nothing_to_build_by_runs_python_and_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "foretell_lab.loops.build", None)
    assert build.library.__wrapped__("simulate") is None
    assert "run as Python, slowly: install foretell where" in capsys.readouterr().err


def strange(values):
    return {"a": values}["a"]


def test_what_has_no_translation_is_said():
    with pytest.raises(translate.Unsupported, match="no translation"):
        translate.Function(translate.Unit(set()), strange).text("strange")


def test_every_unit_has_loops_that_python_calls():
    for unit in build.UNITS:
        assert builder.source(unit).count('extern "C"') >= 3
    assert all(build.unit_of(loop.function.__module__) for loop in LOOPS)
