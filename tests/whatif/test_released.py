"""What a step holds when activations are not kept, or kept in fewer bits."""

import pytest

from foretell.graph.graph import Phase
from foretell.memory.tape import Op, Storage, Tape, peak_bytes
from foretell.whatif import parse

SIZE = 1 << 20  # numbers
F, B = Phase.FORWARD, Phase.BACKWARD


def tape(*names: str) -> Tape:
    """A chain of ops, each of which reads what the one before made and keeps it."""
    count = len(names)
    forward = [
        Op(name, F, node=k, reads=(k,), makes=(k + 1,), keeps=(k,)) for k, name in enumerate(names)
    ]
    backward = [Op(f"{names[k]}_backward", B, node=k, ends=True) for k in reversed(range(count))]
    return Tape(tuple(Storage(SIZE) for _ in range(count + 1)), (*forward, *backward))


def test_offloaded_inputs_are_there_only_while_they_are_used():
    chain = tape(*["convolution"] * 8)
    assert peak_bytes(chain) == 8 * SIZE * 4
    assert peak_bytes(parse("vdnn").hold(chain)) == 2 * SIZE * 4


def test_packed_outputs_take_their_bits():
    chain = tape(*["relu", "convolution"] * 4)
    peaks = [peak_bytes(parse(f"gist:bits={b}").hold(chain)) for b in (16, 8)]
    assert peaks[0] > peaks[1]
    assert peaks[0] - peaks[1] == pytest.approx(4 * SIZE, rel=0.3)  # four outputs, a byte less each


def test_before_a_pool_a_bit_is_enough():
    chain = tape("relu", "max_pool2d", "add")
    changed = parse("gist").hold(chain)
    assert changed.storages[-1].count == SIZE / 32


def test_scores_are_not_kept():
    chain = tape("mm", "bmm", "_softmax", "bmm", "mm")
    changed = parse("flash-attention").hold(chain)
    gone = {2, 3}  # the scores, before and behind the softmax
    assert not gone & {k for op in changed.ops for k in op.keeps}
    assert {1, 4} <= {k for op in changed.ops for k in op.keeps}


def test_what_has_none_of_it_stays_as_it_is():
    chain = tape("mm", "mm")
    for spec in ("vdnn", "gist", "flash-attention"):
        assert peak_bytes(parse(spec).hold(chain)) == peak_bytes(chain)
