"""Recurrent layers of cuDNN: what they make and keep, and the peak of a real step with them."""

from pathlib import Path

import pytest

from foretell.memory.outputs import RULES
from foretell.memory.tape import FACT, Call, decode, peak_bytes, resized
from foretell.trace import read

MIB = 2**20
STEP = Path(__file__).parents[2] / "benchmarks" / "measured" / "h200" / "half"
# Of the process that measured them, 5 pairs of cuBLAS workspaces: decision 0015.
SURPLUS = 5 * 65.0


def empty(sizes, code=6):
    return Call("empty", ((),), ("",), (str(sizes), str(code)))


WEIGHTS = ((4000, 500), (4000, 1000), (4000,), (4000,))
INPUTS = ((8, 20, 500), WEIGHTS, (), (6_008_000,), (1, 8, 1000), (1, 8, 1000))
TYPES = ("float", "TensorList", "Scalar", "float", "float", "float")


def test_a_layer_makes_output_states_reserve_and_workspace():
    inner = [empty([20, 8, 1000]), empty([1, 8, 1000]), empty([1, 8, 1000]),
             empty([24_100_000], 0), empty([4_000_000], 0)]  # fmt: skip
    call = Call("_cudnn_rnn", INPUTS, TYPES, ("",) * 10 + ("True",), inner=inner)
    made = [dims for dims, _ in RULES["_cudnn_rnn"](call)]
    assert made[:4] == [(8, 20, 1000), (1, 8, 1000), (1, 8, 1000), (1_000_000,)]
    assert made[4:-1] == list(WEIGHTS)
    assert made[-1] == ((24_100_000 - 4 * 6_008_000) // 4,)


def test_its_backward_makes_a_gradient_for_each_weight():
    call = Call("_cudnn_rnn_backward", INPUTS, TYPES)
    made = [dims for dims, _ in RULES["_cudnn_rnn_backward"](call)]
    assert made == [(8, 20, 500), (1, 8, 1000), (1, 8, 1000), *WEIGHTS]


@pytest.mark.parametrize(("times", "measured"), [(1.0, 2467.6), (2.0, 3501.7), (0.5, 2067.5)])
def test_the_peak_of_a_language_model(times, measured):
    tape = decode(read(STEP / "rnnlm.base.json.gz").graph.facts[FACT])
    tape = resized(tape, times) if times != 1 else tape
    assert peak_bytes(tape) / MIB == pytest.approx(measured - SURPLUS, rel=0.02)


def test_the_peak_of_its_step_under_autocast():
    tape = decode(read(STEP / "rnnlm.amp_bf16.json.gz").graph.facts[FACT])
    assert peak_bytes(tape) / MIB == pytest.approx(2399.2 - SURPLUS, rel=0.02)


def shaped(*sizes):
    return [Call("resize_", ((1,),), ("float",), ("", str([*dims]))) for dims in sizes]


def test_weights_of_which_the_trace_has_no_list_are_as_large_as_their_flat_tensor():
    """A trace leaves out lists of more than thirty tensors."""
    inputs = (INPUTS[0], (), *INPUTS[2:])
    inner = [empty([20, 8, 1000]), empty([24_100_000], 0), empty([4_000_000], 0)]
    forward = Call("_cudnn_rnn", inputs, TYPES, ("",) * 11, inner=inner)
    made = [dims for dims, _ in RULES["_cudnn_rnn"](forward)]
    assert made[-2:] == [(6_008_000,), ((24_100_000 - 4 * 6_008_000) // 4,)]
    backward = Call("_cudnn_rnn_backward", inputs, TYPES, inner=shaped(*WEIGHTS))
    assert [dims for dims, _ in RULES["_cudnn_rnn_backward"](backward)][3:] == list(WEIGHTS)


@pytest.mark.parametrize(("model", "measured"), [("both_ways", 1193.9), ("remembering", 1743.6)])
def test_the_peak_of_speech_and_of_an_agent(model, measured):
    trace = STEP.parents[1] / "fresh" / "h200" / f"{model}.base.json.gz"
    peak = peak_bytes(decode(read(trace).graph.facts[FACT]))
    assert peak / MIB == pytest.approx(measured, rel=0.04)
