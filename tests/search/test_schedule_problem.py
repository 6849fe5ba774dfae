"""Problems are checked when made; placement files and shapes give the problems they describe."""

import json
import math
from dataclasses import replace

import pytest

from foretell.errors import InputError
from foretell.search.schedule import Block, Choice, Wait, load, read, shape, write

PLACEMENT = {
    "name": "two",
    "ndevs": 2,
    "mode": "train",
    "blocks": [
        {"id": 10, "kind": "F", "devices": [0], "time": 1, "mem": 1},
        {"id": 20, "kind": "F", "devices": [0, 1], "time": 2, "mem": 0, "mem_end": 1},
        {"id": 30, "kind": "B", "devices": [1], "time": 0.5, "mem": -1, "name": "last"},
    ],
    "deps": [[10, 20], [20, 30, 0.25]],
    "memory": [3, 4],
    "speed": 2,
    "note": "unknown keys are left alone",
}


def changed(**change):
    return {**json.loads(json.dumps(PLACEMENT)), **change}


def test_a_file_is_read_with_all_it_says(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PLACEMENT))
    problem = load(path)
    assert [b.id for b in problem.blocks] == [10, 20, 30]
    assert problem.waits == (Wait(1, 0), Wait(2, 1, 0.25))
    assert problem.capacity == (3, 4)
    assert problem.seconds == (0.5, 1.0, 0.25)
    assert problem.work == (1.5, 1.25)
    assert problem.blocks[1].change == 1
    assert read(write(problem)) == problem


def test_choices_stand_in_for_blocks():
    again = Block(30, "B", (1,), 1.5, -0.5)
    problem = replace(read(PLACEMENT), choices=(Choice("recompute", (again,)),))
    assert read(write(problem)) == problem
    assert problem.choosing(["recompute"]).blocks[2] == again
    assert problem.choosing([]).blocks == problem.blocks
    with pytest.raises(InputError, match="unknown choice"):
        problem.choosing(["recompote"])


def test_the_fingerprint_ignores_names_and_nothing_else():
    problem = read(PLACEMENT)
    renamed = replace(
        problem, name="other", blocks=tuple(replace(b, name="x") for b in problem.blocks)
    )
    assert renamed.fingerprint == problem.fingerprint
    longer = replace(problem, blocks=(replace(problem.blocks[0], time=1.5), *problem.blocks[1:]))
    later = replace(problem, waits=(Wait(1, 0, 0.1), problem.waits[1]))
    for other in (longer, later, problem.limited(5), replace(problem, mode="infer")):
        assert other.fingerprint != problem.fingerprint


BAD = {
    "cycle": ({"deps": [[10, 20], [20, 30], [30, 10]]}, "10, 20, 30 wait on each other"),
    "unknown block": ({"deps": [[10, 99]]}, "names block 99, there is none"),
    "odd dependency": ({"deps": [[10]]}, "not .first, then."),
    "bad mode": ({"mode": "test"}, "mode of placement is `test`"),
    "no blocks": ({"blocks": [], "deps": []}, "without blocks"),
    "blocks no list": ({"blocks": {}}, "no list of `blocks`"),
    "few capacities": ({"memory": [1, 2, 3]}, "3 values of capacity for 2 devices"),
    "speed zero": ({"speed": 0}, "speed of device 0 is 0"),
    "negative lag": ({"deps": [[10, 20, -1]]}, "starts -1.0 after"),
}
BAD_BLOCK = {
    "no device": ({"devices": []}, "block 10 is on no device"),
    "device missing": ({"devices": [7]}, "on device 7, there are 2"),
    "device twice": ({"devices": [0, 0]}, "names a device twice"),
    "negative time": ({"time": -1}, "block 10 takes -1"),
    "nan": ({"time": math.nan}, "block 10 of placement is `nan`"),
    "infinite memory": ({"mem": math.inf}, "block 10 of placement is `inf`"),
    "same id": ({"id": 20}, "block 20 is given twice"),
    "text for a number": ({"time": "1"}, "`time` of block 10 of placement is `1`"),
    "kind": ({"kind": "Q"}, "unknown kind of block 10"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_wrong_placement_says_what_is_wrong(change, message):
    with pytest.raises(InputError, match=message):
        read(changed(**change))


@pytest.mark.parametrize(("change", "message"), BAD_BLOCK.values(), ids=BAD_BLOCK)
def test_a_wrong_block_says_what_is_wrong(change, message):
    blocks = changed()["blocks"]
    blocks[0] |= change
    with pytest.raises(InputError, match=message):
        read(changed(blocks=blocks))


def test_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        load(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("spec", "blocks", "work"),
    [
        ("v", 8, 4),
        ("v:devices=1", 2, 4),
        ("v:infer=yes", 4, 1),
        ("v:split=yes,backward=2", 12, 3),
        ("loop:devices=3,rounds=2", 12, 8),
        ("wave:devices=3,rounds=2", 12, 8),
        ("x", 16, 8),
        ("m", 10, 6),
        ("m:split=yes,backward=2", 14, 5),
        ("nn", 12, 8),
        ("k", 10, 6),
        ("k:devices=1", 4, 6),
    ],
)
def test_shapes_have_the_blocks_they_should(spec, blocks, work):
    problem = shape(spec)
    assert len(problem.blocks) == blocks
    assert max(problem.work) == work
    for device in range(problem.num_devices):
        held = [b.change for b in problem.blocks if device in b.devices]
        assert sum(held) == 0


def test_a_lag_is_paid_only_between_devices():
    assert {w.lag for w in shape("v:lag=0.5").waits} == {0.0, 0.5}
    assert [w.lag for w in shape("v:devices=1,lag=0.5").waits] == [0.0]


def test_unknown_shapes_offer_the_nearest():
    with pytest.raises(InputError, match="unknown placement shape"):
        shape("zigzag")
    with pytest.raises(InputError, match="no stage"):
        shape("v:devices=0")
