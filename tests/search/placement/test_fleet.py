"""Cells, candidate sets and op groups: complete, and the same whatever the file's order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cluster import load as machines
from foretell.errors import ForetellError
from foretell.plan.check import units
from foretell.search.placement.problem import fleet, grouped
from foretell.workload import load
from tests.search.placement.machines import mixed


@pytest.mark.parametrize("name", ["tag", "hap", "heterog-8", "dgx-a100:nodes=32"])
def test_cells_are_all_ranks_once(name):
    cluster = machines(name)
    found = fleet(cluster)
    assert sorted(r for cell in found.cells for r in cell.ranks) == list(range(cluster.size))
    assert len(found.cells) <= 16
    assert sorted(found.ranks(0)) == list(range(cluster.size))
    assert len(set(found.sets)) == len(found.sets)


def test_a_cell_is_of_one_kind():
    cluster = machines("tag")
    for cell in fleet(cluster).cells:
        assert len({cluster.devices[r].name for r in cell.ranks}) == 1


def test_subsets_of_three_groups_are_all_candidates():
    titles = [fleet(machines("tag")).title(s) for s in range(7)]
    assert titles[0] == "4 v100-32 + 8 1080ti + 4 p100-pcie"
    assert len(set(titles)) == 7


def test_the_order_in_the_file_does_not_matter(tmp_path):
    one, other = (fleet(mixed(tmp_path, slow=3, flip=flip)) for flip in (False, True))
    assert [d.name for d in one.kinds] == [d.name for d in other.kinds]
    assert one.sets == other.sets
    assert [(len(c.ranks), c.kind, c.box) for c in one.cells] == [
        (len(c.ranks), c.kind, c.box) for c in other.cells
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("memory = ", 'memory = "0 B"'), "memory"),
        (("bandwidth = ", 'bandwidth = "0 B/s"'), "bandwidth|zero|more than"),
    ],
)
def test_nothing_is_placed_on_what_cannot_be(tmp_path, change, words):
    key, line = change
    text = mixed(tmp_path).text()
    path = tmp_path / "odd.toml"
    lines = [line if found.startswith(key) else found for found in text.splitlines()]
    path.write_text("\n".join(lines))
    with pytest.raises(ForetellError, match=words):
        fleet(machines(str(path)))


def test_an_island_is_refused(tmp_path):
    path = tmp_path / "island.toml"
    path.write_text(
        'name = "island"\n[[node]]\ncount = 1\ndevice = "v100-32"\ndevices = 2\n'
        'nic = "ethernet-25g"\n'
        '[[node]]\ncount = 1\ndevice = "p100-pcie"\ndevices = 2\n'
    )
    with pytest.raises(ForetellError, match=r"nic|island"):
        machines(str(path))


def test_metis_makes_few_groups_in_a_row():
    model = load("resnet:depth=101")
    count = len(units(model))
    found = grouped(model, np.ones(count), np.ones(count), most=8)
    assert [u.name for g in found for u in g.units] == [u.name for u in units(model)]
    assert len(found) <= 12


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 12))
def test_groups_follow_the_rank_that_holds_their_weights(most):
    model = load("gpt:layers=12,hidden=64,heads=2,vocab=512")
    count = len(units(model))
    found = grouped(model, np.ones(count), np.ones(count), most=most)
    assert found[-1].leader == 0
    assert all(found[g.leader].leader == g.leader for g in found)
