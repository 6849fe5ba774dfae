"""What changes make of a tape."""

import pytest

from foretell.graph.graph import NONE, BufferKind, Phase
from foretell.memory import change
from foretell.memory.change import blocks
from foretell.memory.read import tape_of
from foretell.memory.tape import (
    Op,
    Storage,
    Tape,
    occupancy,
    peak_bytes,
    phase_peaks,
    resized,
    states,
)
from tests.memory.steps import ACTIVATION, ADAM, WEIGHT, step

LAYERS = 8


@pytest.fixture(scope="module")
def tape():
    return tape_of(step(LAYERS, ADAM))


def activations(tape):
    held = occupancy(tape)
    return held.by_kind()["activation"]


def lasting(tape):
    own = (BufferKind.PARAMETER, BufferKind.OPTIMIZER)
    return sum(s.bytes for s in tape.storages if s.kind in own)


def test_twice_the_batch_is_twice_the_activations(tape):
    twice = resized(tape, 2)
    assert activations(twice) == 2 * activations(tape)
    assert lasting(twice) == lasting(tape)
    assert resized(twice, 0.5) == tape


def test_half_precision_halves_activations_and_copies_weights(tape):
    half = change.half_precision(tape)
    casts = sum(o.name == "_to_copy" for o in half.ops)
    assert casts == LAYERS + 1 + LAYERS  # weights, the input, gradients of weights back
    expected = activations(tape) / 2 + LAYERS * WEIGHT / 2 + ACTIVATION / 2
    assert activations(half) == pytest.approx(expected, rel=0.1)
    assert lasting(half) == lasting(tape)


def test_gradients_of_parameters_stay_wide(tape):
    half = change.half_precision(tape)
    grads = [s for s in half.storages if s.kind == BufferKind.GRADIENT]
    assert [s.item for s in grads] == [4] * LAYERS


def test_checkpointing_the_whole_forward_only_moves_the_peak(tape):
    again = change.checkpoint(tape)
    assert len(again.ops) > len(tape.ops)
    assert peak_bytes(again) == pytest.approx(peak_bytes(tape), rel=0.1)
    assert phase_peaks(again)["forward"] < phase_peaks(tape)["forward"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["embed", *["mm", "norm", "mm", "relu"] * 6, "head"],
         [(k, k + 4) for k in range(1, 25, 4)]),
        (["conv", "norm", "relu", "pool", "mm"], [(0, 5)]),
        ([*["a", "b", "c", "d"] * 4, *map(str, range(30))], [(0, 46)]),
    ],
    ids=["stack", "no stack", "small stack"],
)  # fmt: skip
def test_a_stack_of_equal_blocks_is_found(names, found):
    assert blocks(names) == found


def test_all_denominators_at_once(tape):
    assert states(tape) == 2
    every, none = change.foreach_optimizer(tape), change.fused_optimizer(tape)
    assert phase_peaks(every)["update"] - phase_peaks(none)["update"] == LAYERS * WEIGHT
    assert phase_peaks(none)["update"] < phase_peaks(tape)["update"]


def test_a_compiler_writes_no_more_than_is_written_now(tape):
    assert peak_bytes(change.compiled(tape)) <= peak_bytes(tape)


def test_changes_compose(tape):
    one = change.fused_optimizer(change.half_precision(resized(tape, 2)))
    other = change.half_precision(change.fused_optimizer(resized(tape, 2)))
    assert peak_bytes(one) == peak_bytes(other)


def test_a_compiler_casts_no_logits_and_hands_products_what_they_read():
    """Logits are widened for a loss: neither that copy nor a wide gradient is ever written."""
    sizes = {"x": 10, "weight": 10, "logits": 1000, "wide": 1000, "logs": 1000, "grad": 1000}
    items = {"x": 2, "weight": 2, "logits": 2}
    storages = tuple(Storage(1024.0 * n, items.get(k, 4)) for k, n in sizes.items())
    at = {name: k for k, name in enumerate(sizes)}

    def op(name, phase, reads, makes=(), keeps=(), node=NONE, ends=False):
        numbers = [tuple(at[n] for n in names) for names in (reads, makes, keeps)]
        return Op(name, phase, node, *numbers, ends=ends)

    ops = (
        op("mm", Phase.FORWARD, ("x", "weight"), ("logits",), ("x", "weight"), 1),
        op("_to_copy", Phase.FORWARD, ("logits",), ("wide",)),
        op("_log_softmax", Phase.LOSS, ("wide",), ("logs",), ("logs",), 2),
        op("_log_softmax_backward_data", Phase.BACKWARD, ("logs",), ("grad",), node=2),
        op("LogSoftmaxBackward0", Phase.BACKWARD, (), node=2, ends=True),
        op("mm", Phase.BACKWARD, ("grad", "weight"), node=1),
        op("MmBackward0", Phase.BACKWARD, (), node=1, ends=True),
    )
    after = change.compiled(Tape(storages, ops))
    assert [after.storages[at[n]].count for n in ("wide", "logs")] == [0, 0]
    assert after.storages[at["grad"]].item == 2
    assert after.ops[2].keeps == (at["logits"],)


def conversion(name, *beside):
    """A product, a tensor of scores in fp32, and an operator on both behind a conversion."""
    items = [Storage(4096, 4, int(kind)) for kind in (BufferKind.INPUT, BufferKind.PARAMETER)]
    items += [Storage(4096 + k, 4, int(BufferKind.ACTIVATION)) for k in range(3)]
    ops = (
        Op("mm", int(Phase.FORWARD), 1, (0, 1), (2,)),
        Op("mul", int(Phase.FORWARD), 2, (2, 1), (3,)),  # beside a parameter: fp32
        Op("float", int(Phase.FORWARD), NONE, (3 if name == "wide" else 2,)),
        Op("mul", int(Phase.FORWARD), 3, (3 if name == "wide" else 2, *beside), (4,)),
    )
    return change.half_precision(Tape(tuple(items), ops))


def made_by_last(tape):
    last = [o for o in tape.ops if o.name == "mul"][-1]
    return tape.storages[last.makes[0]].item


def test_what_is_converted_beside_half_precision_is_half():
    assert made_by_last(conversion("wide", 2)) == 2


def test_what_is_converted_alone_is_wide():
    tape = conversion("narrow")
    assert made_by_last(tape) == 4
    assert [o.name for o in tape.ops].count("float") == 1
