"""Same input, same answer: on every CPU, BLAS, thread count, hash seed and clock, to the last bit.

Each machine is another process that is told to be one: OpenBLAS and NumPy take the algorithms of
other processors, the C library leaves out fused multiply-add, and a clock may run a hundred times
as fast, as if the machine were that much slower.
"""

import json
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

from foretell import portable

PLAIN = " ".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name))
HASWELL = {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "2", "HASH": "1"}
PRESCOTT = {
    "OPENBLAS_CORETYPE": "Prescott",
    "OPENBLAS_NUM_THREADS": "1",
    "NPY_DISABLE_CPU_FEATURES": PLAIN,
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
    "HASH": "3",
}
MACHINES = {
    "haswell": HASWELL,
    "plain and slow": PRESCOTT | {"SLOWER": "100"},
    "plain": PRESCOTT,
    "slow": {"SLOWER": "100"},
    "nehalem": {"OPENBLAS_CORETYPE": "Nehalem", "OPENBLAS_NUM_THREADS": "1", "HASH": "2"},
}
FAST = ("haswell", "plain and slow")  # the others tell which of these differs
EACH = [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in MACHINES]

QUERIES = """
import json, os, time
slower = float(os.environ.get("SLOWER", "1"))
for name in ("perf_counter", "monotonic", "process_time", "time"):
    real = getattr(time, name)
    setattr(time, name, lambda real=real, start=real(): start + slower * (real() - start))

from foretell.cluster import load as machines
from foretell.search.oracle import scaling
from foretell.search.kit import parse
from foretell.workload import load

def asked(spec, model, cluster):
    found = parse(spec).plan(load(model), machines(cluster))
    return [repr(found.plan), found.predicted.hex(), found.bound.hex(), found.evaluations]

shape = lambda n: machines(f"dgx-a100:gpus={n}")
rows = scaling(load("llama:layers=8,hidden=2048,heads=16,seq=2048"), shape, [8, 16], lambda n: 64)
few = "placement:playouts=10,strokes=500,polish=200"
answers = {
    "fusion": asked("fusion:evaluations=40", "resnet18:batch=16", "disco-a"),
    "placement": asked(few, "vgg16:batch=32", "heterog-8"),
    "oracle": [[repr(row.plan), row.step.hex()] for row in rows],
}
if os.environ.get("LONG"):
    small = "gpt:layers=4,hidden=256,heads=4"
    answers = {"joint": asked("joint:evaluations=12", small, "heterog-8")}
print(json.dumps(answers))
"""


@cache
def answers(machine="", long=""):
    """What a machine says to the questions, or to those that take long."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS", "NPY_", "GLIBC_"))}
    result = MACHINES[machine] if machine else {}
    env |= result | {"PYTHONHASHSEED": result.get("HASH", "0"), "LONG": long}
    ran = subprocess.run([sys.executable, "-c", QUERIES], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("machine", EACH)
@pytest.mark.parametrize("question", ["fusion", "placement", "oracle"])
def test_another_machine_gives_the_same_answer(question, machine):
    assert answers(machine)[question] == answers()[question]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_another_machine_finds_the_same_joint_plan(machine):
    assert answers(machine, "yes") == answers("", "yes")


VALUES = np.exp(np.random.default_rng(0).uniform(-200, 200, 100_000))


@pytest.mark.parametrize("name", ["exp", "log", "log2", "log10", "log1p"])
def test_a_function_is_near_the_libraries(name):
    values = np.log(VALUES) if name == "exp" else VALUES
    found, known = getattr(portable, name)(values), getattr(np, name)(values)
    np.testing.assert_array_max_ulp(found, known, maxulp=8)


EDGES = np.array([0.0, -0.0, 1.0, 0.5, 5e-324, 1e-310, 1.7e308, np.inf, np.nan, -1.0, 0.3, 710.0])


def test_a_few_numbers_are_as_in_an_array():
    """Single numbers go another way, to the same bits."""
    values = np.concatenate([EDGES, VALUES[:3000], np.log(VALUES[:3000]), -EDGES])
    with np.errstate(all="ignore"):
        query = [("exp", ()), ("log", ())]
        query += [("power", (to,)) for to in (0.3, 1.0, 2.3, -1.5, 0.0, 40.0)]
        for name, more in query:
            function = getattr(portable, name)
            few = np.concatenate([function(values[k : k + 1], *more) for k in range(len(values))])
            np.testing.assert_array_equal(few, function(values, *more), err_msg=name)
    assert portable.power(np.float64(3.0), np.array([0.5])).shape == (1,)
    assert portable.power(3.0, 0.5).shape == portable.exp(1.0).shape == ()
    assert portable.exp(np.zeros((0, 3))).shape == (0, 3)


def test_powers_roots_and_tangents_are_near_the_libraries():
    for to in (0.3, 1.0, 2.0, 2.3, 4.0, -1.5):
        values = VALUES[np.abs(np.log(VALUES) * to) < 300]
        np.testing.assert_allclose(portable.power(values, to), values**to, rtol=1e-13)
    assert portable.power(np.array([0.0, 1.0, 4.0]), 0.5).tolist() == [0.0, 1.0, 2.0]
    assert portable.hypot(3.0, 4.0) == 5.0
    bent = np.log(VALUES)
    np.testing.assert_allclose(portable.tanh(bent), np.tanh(bent), rtol=1e-13, atol=1e-15)


def test_ends_are_those_of_the_libraries():
    ends = np.array([0.0, np.inf, np.nan])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(portable.log(ends), np.log(ends))
        np.testing.assert_array_equal(portable.exp(-ends), np.exp(-ends))


def test_powers_of_two_are_exact():
    exponents = np.arange(-1000, 1000)
    assert portable.log2(np.ldexp(1.0, exponents)).tolist() == exponents.tolist()
    assert portable.two_above(np.array([1.0, 1.5, 2.0, 3.0, 1023, 1024, 1025])).tolist() == [
        1, 2, 2, 4, 1024, 1024, 2048,
    ]  # fmt: skip
