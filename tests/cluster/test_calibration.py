"""A cluster that carries how it really runs."""

import json

import pytest

from foretell.cluster import Calibration, load, validate
from foretell.cluster import cluster as files
from foretell.cost import collective
from foretell.errors import InputError

PLAIN = load("abci:nodes=2")
SIZES = (1e3, 1e6, 1e9)


def seconds(cluster, size, ranks=range(8)):
    return collective.price("all_gather", size, cluster.levels(ranks)).seconds


def test_a_plain_calibration_changes_nothing():
    same = PLAIN.calibrated(Calibration())
    assert same.fingerprint() == PLAIN.fingerprint()
    assert [seconds(same, s) for s in SIZES] == [seconds(PLAIN, s) for s in SIZES]


@pytest.mark.parametrize(
    ("factor", "inside", "between"), [("beta", 1, 3), ("inside", 3, 1), ("comm", 3, 3)]
)
def test_bytes_are_slower_where_the_factor_says(factor, inside, between):
    slow = PLAIN.calibrated(Calibration(**{factor: 3.0}))
    node = seconds(slow, 1e10, range(4)) / seconds(PLAIN, 1e10, range(4))
    both = seconds(slow, 1e10) / seconds(PLAIN, 1e10)
    assert node == pytest.approx(inside, rel=0.02)
    assert both == pytest.approx(between, rel=0.06)


def test_alpha_is_what_small_messages_take():
    slow = PLAIN.calibrated(Calibration(alpha=3.0))
    assert seconds(slow, 1.0) == pytest.approx(3 * seconds(PLAIN, 1.0), rel=0.01)
    assert seconds(slow, 1e10) == pytest.approx(seconds(PLAIN, 1e10), rel=0.02)


def test_trees_end_at_the_size_given_to_the_library():
    cluster = load("abci:nodes=64")
    rings = cluster.calibrated(Calibration(tree_bytes=1e6))
    for size in (1e5, 1e8):
        usual = collective.price("all_reduce", size, cluster.levels(range(256)))
        answer = collective.price("all_reduce", size, rings.levels(range(256)))
        assert usual.way.algorithm == "tree"
        assert answer.way.algorithm == ("tree" if size < 1e6 else "ring")


def test_a_file_of_it_reads_back(tmp_path):
    slow = PLAIN.calibrated(Calibration(compute=1.25, beta=2.0, tree_bytes=0.0))
    path = tmp_path / "mine.toml"
    path.write_text(slow.text())
    assert load(str(path)) == slow
    assert load(str(path)).calibration == slow.calibration
    assert slow != PLAIN


@pytest.mark.parametrize("line", ["compute = 0", 'beta = "much"', "gamma = 2"])
def test_factors_that_cannot_be_are_problems_of_the_file(line):
    found = validate(PLAIN.text() + f"\n[calibration]\n{line}\n")
    assert len(found) == 1
    assert line.split()[0] in found[0].message


def test_a_calibration_is_loaded_or_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"calibration": {"host": 2.0}}))
    assert files.load(path) == Calibration(host=2.0)
    path.write_text("{}")
    with pytest.raises(InputError, match="no calibration"):
        files.load(path)
    with pytest.raises(InputError, match="cannot read"):
        files.load(tmp_path / "none.json")
