"""What several ranks make of the memory of one, on a step of three storages."""

import pytest

from foretell.graph.graph import BufferKind
from foretell.memory.tape import Storage, Tape
from foretell.whatif import parse

ONE = 512.0 * 1024  # bytes of the parameters, and of their gradients


@pytest.fixture
def tape():
    kinds = (BufferKind.PARAMETER, BufferKind.GRADIENT, BufferKind.OPTIMIZER)
    sizes = (ONE, ONE, 2 * ONE)
    pairs = zip(kinds, sizes, strict=True)
    return Tape(tuple(Storage(size / 4, kind=kind) for kind, size in pairs), fixed=100.0)


def lasting(tape):
    """Bytes of parameters, gradients and state, and what is fixed."""
    return [s.bytes for s in tape.storages], tape.fixed


def test_buckets_hold_all_gradients_once_more(tape):
    once = parse("data-parallel:ranks=8").hold(tape)
    assert lasting(once) == ([ONE, ONE, 2 * ONE], 100 + ONE)
    assert lasting(parse("data-parallel:ranks=16").hold(once)) == lasting(once)


@pytest.mark.parametrize(
    ("zero", "sizes", "fixed"),
    [
        (1, [ONE, ONE, ONE / 4], 100 + ONE),
        (2, [ONE, ONE / 8, ONE / 4], 100 + ONE),
        (3, [ONE / 8, ONE / 8, ONE / 4], 100 + ONE),  # one unit: all of it is gathered
    ],
)
def test_shards(tape, zero, sizes, fixed):
    assert lasting(parse(f"fsdp:ranks=8,zero={zero}").hold(tape)) == (sizes, fixed)


def test_gathered_units(tape):
    after = parse("fsdp:ranks=8,unit_mb=0.125,prefetch=1").hold(tape)
    assert after.fixed == 100 + 2 * 0.125 * 2**20


@pytest.mark.parametrize(("spec", "times"), [("dgc", 2), ("powersgd", 1), ("local-sgd", 0)])
def test_what_compression_keeps(tape, spec, times):
    assert parse(spec).hold(tape).fixed == 100 + times * ONE


@pytest.mark.parametrize("spec", ["p3:ranks=2", "parameter-server:ranks=2"])
def test_servers_keep_the_state(tape, spec):
    sizes, fixed = lasting(parse(spec).hold(tape))
    assert sizes[:2] == [ONE, ONE]
    assert sizes[2] <= 512
    assert fixed == 100


def test_gradients_stay_while_they_add_up(tape):
    assert tape.is_zeroed_first
    assert not parse("accumulate").hold(tape).is_zeroed_first
