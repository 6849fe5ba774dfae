"""Calls made into a tape: what is a parameter, what is kept, what is there when."""

import pytest

from foretell.graph.graph import BufferKind, Phase
from foretell.memory.read import GEMM_WORKSPACE, tape_of
from foretell.memory.tape import decode, encode, occupancy
from tests.memory.steps import (
    ACTIVATION,
    ADAM,
    BATCH,
    SGD,
    WEIGHT,
    WIDTH,
    call,
    forward,
    node,
    step,
)  # fmt: skip

LIBRARIES = 2 * GEMM_WORKSPACE  # of the thread of the forward and that of the backward pass


def kinds(tape, kind):
    return [s.bytes for s in tape.storages if s.kind == kind]


def test_parameters_are_as_large_as_the_gradients_that_are_stored():
    tape = tape_of(step(layers=3))
    assert kinds(tape, BufferKind.PARAMETER) == [WEIGHT] * 3
    assert kinds(tape, BufferKind.GRADIENT) == [WEIGHT] * 3
    assert kinds(tape, BufferKind.INPUT) == [ACTIVATION]


@pytest.mark.parametrize(("optimizer", "states"), [(SGD, 1), (ADAM, 2), ((("add_", 2),), 0)])
def test_the_optimizer_s_ops_tell_its_state(optimizer, states):
    tape = tape_of(step(layers=2, optimizer=optimizer))
    assert kinds(tape, BufferKind.OPTIMIZER) == [WEIGHT] * 2 * states


def test_what_a_layer_makes_is_kept_once():
    """The result of a relu in place is its own product's and the input of the next."""
    tape = tape_of(step(layers=4))
    kept = {k for o in tape.ops for k in o.keeps}
    activations = [k for k in kept if tape.storages[k].kind == BufferKind.ACTIVATION]
    assert [tape.storages[k].bytes for k in activations] == [ACTIVATION] * 4


def test_the_peak_is_all_that_is_kept_and_the_gradients_at_hand():
    layers = 4
    found = occupancy(tape_of(step(layers)))
    lasting = layers * WEIGHT * 2 + ACTIVATION + LIBRARIES  # parameters, momentum, input
    assert found.tape.ops[found.at].name == "threshold_backward"
    assert found.peak == lasting + (layers + 2) * ACTIVATION


def test_what_was_kept_goes_as_the_backward_pass_goes_on():
    layers = 4
    found = occupancy(tape_of(step(layers)))
    ends = [k for k, o in enumerate(found.tape.ops) if o.name == "MmBackward0"]
    assert sorted(found.held[ends], reverse=True) == found.held[ends].tolist()
    assert found.held[-1] == layers * WEIGHT * 3 + ACTIVATION + LIBRARIES


def test_adam_makes_a_denominator():
    plain, adam = (occupancy(tape_of(step(2, optimizer))) for optimizer in (SGD, ADAM))
    last = adam.tape.ops[-1]
    assert (last.name, last.phase) == ("div", Phase.UPDATE)
    assert adam.held[-1] - plain.held[-1] == 2 * WEIGHT + 3 * WEIGHT  # a state more, three results


def test_an_operator_that_needs_its_input_and_writes_over_it_copies_it():
    calls = [c for c in step(1) if c.name != "relu_"]
    calls.insert(2, call("hardswish_", (BATCH, WIDTH), sequence=2))
    calls = [_renamed(c, "ReluBackward0", "HardswishBackward0") for c in calls]
    tape = tape_of(calls)
    op = next(o for o in tape.ops if o.name == "hardswish_")
    assert op.makes == op.keeps != ()
    assert tape.storages[op.makes[0]].bytes == ACTIVATION


def test_an_operator_that_needs_its_result_alone_writes_in_place():
    calls = [c for c in step(1) if c.name != "relu_"]
    calls.insert(2, call("leaky_relu_", (BATCH, WIDTH), sequence=2))
    calls = [_renamed(c, "ReluBackward0", "LeakyReluBackward0") for c in calls]
    op = next(o for o in tape_of(calls).ops if o.name == "leaky_relu_")
    assert op.makes == ()
    assert op.keeps == op.reads


def _renamed(c, old, new):
    c.name = c.name.replace(old, new)
    c.inner = [_renamed(i, old, new) for i in c.inner]
    return c


def test_an_unknown_operator_keeps_what_its_backward_reads():
    x = (BATCH, WIDTH)
    calls = [c for c in step(1) if c.name != "relu_"]
    calls.insert(2, call("wiggle", x, sequence=2))
    calls = [_renamed(c, "ReluBackward0", "WiggleBackward0") for c in calls]
    for c in calls:
        if c.name.endswith("WiggleBackward0"):
            c.inner[0].dims, c.inner[0].types = ((1, WIDTH),), ("float",)
    op = next(o for o in tape_of(calls).ops if o.name == "wiggle")
    assert op.reads[0] in op.keeps


def test_a_step_without_a_backward_pass_has_no_tape():
    assert tape_of(list(forward(2))) is None


def test_a_tape_reads_back_as_it_was_written():
    tape = tape_of(step(3, ADAM))
    assert decode(encode(tape)) == tape


def test_gradients_that_are_zeroed_late_are_there_in_the_forward_pass():
    first, late = (occupancy(tape_of(step(3), is_zeroed_first=z)) for z in (True, False))
    assert late.held[0] - first.held[0] == 3 * WEIGHT
    assert late.held[-1] == first.held[-1]


def _gates():
    """A step whose first layer is cut in two parts, each made into a gate."""
    whole, part = (BATCH, WIDTH), (BATCH, WIDTH // 2)
    view = [call("as_strided", whole, values=("", str([*part]))) for _ in range(2)]
    gates = [call("tanh", part, sequence=3), call("sigmoid", part, sequence=4)]
    calls = step(1)
    calls[2:3] = [call("split", whole, inner=view), *gates, call("mul", part, part, sequence=5)]
    names = ((5, "MulBackward0"), (4, "SigmoidBackward0"), (3, "TanhBackward0"))
    nodes = [node(name, n, part) for n, name in names]
    at = next(k for k, c in enumerate(calls) if c.name.endswith("ReluBackward0"))
    calls[at : at + 1] = nodes
    return tape_of(calls)


def test_gates_of_one_tensor_are_made_from_its_parts():
    ops = {o.name: o for o in _gates().ops if o.phase == Phase.FORWARD}
    assert ops["sigmoid"].reads == ops["tanh"].reads
    assert set(ops["mul"].reads) == {*ops["tanh"].makes, *ops["sigmoid"].makes}


def test_the_data_of_the_first_operator_is_no_parameter():
    """Even where it is as large as one."""
    w = (WIDTH, WIDTH)
    calls = step(1)
    calls.insert(0, call("native_batch_norm", w, (WIDTH,), (WIDTH,)))
    first = tape_of(calls)
    op = first.ops[0]
    assert first.storages[op.reads[0]].kind == BufferKind.INPUT


def test_a_formula_of_the_backward_pass_holds_what_it_has_named():
    x = (BATCH, WIDTH)
    calls = step(1)
    at = next(k for k, c in enumerate(calls) if c.name.endswith("ReluBackward0"))
    several = [call("mul", x, x, phase=Phase.BACKWARD) for _ in range(6)]
    calls[at] = node("ReluBackward0", 2, x, inner=several)
    assert occupancy(tape_of(calls)).peak - occupancy(tape_of(step(1))).peak >= 4 * ACTIVATION


def test_a_sum_of_booleans_counts_in_whole_numbers():
    """They are copied first, eight bytes each; the copy goes with the operator."""
    x = (BATCH, WIDTH)
    cast = call("_to_copy", x, values=("", "4"), phase=Phase.LOSS)
    calls = [*forward(1), call("sum", x, phase=Phase.LOSS, inner=[cast])]
    calls += [c for c in step(1) if c.phase == Phase.BACKWARD]
    tape = tape_of(calls)
    found = occupancy(tape)
    at = next(k for k, o in enumerate(tape.ops) if o.name == "sum")
    copies = [k for k in tape.ops[at].makes if tape.storages[k].kind == BufferKind.WORKSPACE]
    assert [tape.storages[k].bytes for k in copies] == [2 * ACTIVATION]
    assert [found.born[k] for k in copies] == [found.dies[k] for k in copies] == [at]
