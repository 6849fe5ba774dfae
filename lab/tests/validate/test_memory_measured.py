"""Peak memory of models measured for this project, each in its own process (H200, torch 2.11)."""

from pathlib import Path

import pytest

from foretell.memory.tape import FACT, decode, peak_bytes
from foretell.trace import read
from foretell.whatif import parse
from foretell_lab.validate.whatifs import SPECS

MEASURED = Path(__file__).parents[3] / "benchmarks" / "measured" / "h200"
MIB = 2**20
DETECTOR = {  # leaky ReLUs in place; FFTs, Winograd tiles and changes of layout in cuDNN
    "base": 10369.8, "tf32": 6427.9, "amp_bf16": 3444.4, "batch_x2": 16182.1, "nhwc": 10411.1,
    "amp_bf16+nhwc": 3440.0, "amp_bf16+compile": 2923.8,
}  # fmt: skip
MIXER = {"base": 3360.0, "amp_bf16": 2127.8, "batch_x2": 6464.7, "batch_half": 1838.6,
         "compile": 3308.8, "amp_bf16+compile": 1879.4}  # fmt: skip
DISTILBERT = {"base": 3519.3, "amp_bf16": 2954.7, "batch_x2": 6162.8, "batch_half": 2166.1,
              "opt_fused": 3516.9, "amp_bf16+compile": 2148.0}  # fmt: skip
T5 = {"amp_bf16+compile": 2780.5}
CASES = [
    (path, variant, mib)
    for path, rows in (
        ("memory/detector", DETECTOR),
        ("mixer", MIXER),
        ("distilbert", DISTILBERT),
        ("t5_small", T5),
    )
    for variant, mib in rows.items()
]


@pytest.mark.parametrize(("model", "variant", "mib"), CASES, ids=[f"{m} {v}" for m, v, _ in CASES])
def test_a_step_that_has_its_process_to_itself(tapes, model, variant, mib):
    tape = tapes(model)
    for spec in SPECS.get(variant, ()):
        tape = parse(spec).hold(tape)
    assert peak_bytes(tape) / MIB == pytest.approx(mib, rel=0.035)


@pytest.fixture(scope="module")
def tapes():
    known = {}

    def tape_of(model):
        if model not in known:
            facts = read(MEASURED / f"{model}.base.json.gz").graph.facts
            known[model] = decode(facts[FACT])
        return known[model]

    return tape_of
