"""Text, fingerprint and description of clusters."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretell.cluster
from foretell.cluster import Cluster, load, validate
from foretell.cluster.read import parse, read
from foretell.errors import InputError

from .cases import built, clusters, clusters_and_ranks


def _again(cluster: Cluster) -> Cluster:
    page = parse(cluster.text(), "again")
    found = read(page)
    assert found is not None, page.problems
    return found


@given(clusters())
@settings(max_examples=60, deadline=None)
def test_text_reads_back_as_the_same_cluster(cluster: Cluster) -> None:
    again = _again(cluster)
    assert again == cluster
    assert again.fingerprint() == cluster.fingerprint()
    assert again.text() == cluster.text()


@given(clusters_and_ranks())
@settings(max_examples=60, deadline=None)
def test_text_keeps_the_places_of_ranks(case: tuple[Cluster, list[int]]) -> None:
    cluster, ranks = case
    part = cluster.subset(ranks)
    again = _again(part)
    assert again == part
    assert (again.nodes == cluster.nodes[ranks]).all()
    assert [d.name for d in again.devices] == [cluster.devices[r].name for r in ranks]


@pytest.mark.parametrize("name", ["dgx-1-v100", "abci:nodes=70", "hap", "tag", "gb200-nvl72"])
def test_presets_survive_as_text(name: str, tmp_path: Path) -> None:
    cluster = load(name)
    path = tmp_path / "written.toml"
    path.write_text(cluster.text(), encoding="utf-8")
    again = load(str(path))
    assert validate(path) == ()
    assert again == cluster
    assert again.levels(range(again.size)) == cluster.levels(range(cluster.size))
    assert again.devices[0].sources == cluster.devices[0].sources


def test_drawn_switches_survive_as_text() -> None:
    node = {"device": "k80", "devices": 2, "nic": "infiniband-edr", "count": 2}
    link = {"odd": {"kind": "ethernet", "bandwidth": "1.234567890123 GB/s", "latency": "3.3 us"}}
    a = {"name": "a", "nodes": [0], "links": [["b", "odd x3"]], "latency": "0.7 us"}
    cluster = built({"node": [node], "link": link, "switch": [a, {"name": "b", "nodes": [1]}]})
    assert _again(cluster) == cluster
    assert _again(cluster).latency(0, 2) == cluster.latency(0, 2)


@given(clusters(), st.data())
@settings(max_examples=40, deadline=None)
def test_any_changed_number_changes_the_fingerprint(cluster: Cluster, data: st.DataObject) -> None:
    node, count = cluster.groups[0]
    change = data.draw(st.sampled_from(["link", "device", "count", "price"]))
    if change == "link":
        links = (replace(node.links[0], latency=node.links[0].latency * 2), *node.links[1:])
        changed = (replace(node, links=links), count)
    elif change == "device":
        devices = (replace(node.devices[0], memory=1.0), *node.devices[1:])
        changed = (replace(node, devices=devices), count)
    elif change == "price":
        changed = (replace(node, price=node.price + 1), count)
    else:
        changed = (node, count + 1)
    other = replace(cluster, groups=(changed, *cluster.groups[1:]))
    assert other.fingerprint() != cluster.fingerprint()


def test_names_titles_and_the_order_of_keys_do_not_matter() -> None:
    cluster = load("dgx-a100:nodes=2")
    renamed = replace(cluster, name="x", title="y")
    assert renamed == cluster
    node, count = cluster.groups[0]
    turned = replace(
        node.devices[0], flops=dict(reversed(list(node.devices[0].flops.items()))), title="z"
    )
    other = replace(node, devices=(turned,) * 8, name="n", title="t", sources={})
    assert replace(cluster, groups=((other, count),)) == cluster


def test_the_fingerprint_does_not_depend_on_the_hash_seed() -> None:
    code = "from foretell.cluster import load; print(load('tag').fingerprint())"
    source = str(Path(foretell.cluster.__file__).parents[2])
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert prints == {load("tag").fingerprint()}


def test_different_clusters_differ() -> None:
    specs = ("dgx-a100:nodes=2", "dgx-a100:nodes=3", "dgx-a100-40:nodes=2", "a100-80:gpus=12")
    assert len({load(s).fingerprint() for s in specs}) == len(specs)
    assert load("dgx-a100") != "dgx-a100"


@given(clusters_and_ranks(least=2))
@settings(max_examples=40, deadline=None)
def test_a_subset_is_the_same_machines_with_fewer_ranks(case: tuple[Cluster, list[int]]) -> None:
    cluster, ranks = case
    part = cluster.subset(ranks)
    assert part.size == len(ranks)
    assert part.bandwidth(0, 1) == cluster.bandwidth(ranks[0], ranks[1])
    assert part.levels(range(part.size)) == cluster.levels(ranks)
    assert part.subset([1]).devices == (cluster.devices[ranks[1]],)


@pytest.mark.parametrize("ranks", [[], [0, 0], [99]])
def test_a_subset_must_make_sense(ranks: list[int]) -> None:
    with pytest.raises(InputError):
        load("dgx-a100").subset(ranks)


def test_description_says_what_is_in_it() -> None:
    text = str(load("abci:nodes=40"))
    for part in ("160 x v100-16 on 40 nodes", "nvlink of 50 GB/s", "2 infiniband", "3:1", "spine"):
        assert part in text
    assert "24.48 $ an hour" in load("p3").describe()


def test_devices_by_kind_covers_every_rank_once() -> None:
    kinds = load("hap").devices_by_kind()
    assert sorted(np.concatenate(list(kinds.values())).tolist()) == list(range(64))


def test_the_public_names() -> None:
    assert set(foretell.cluster.__all__) == {
        *(
            "Calibration",
            "Cluster",
            "Device",
            "Level",
            "Link",
            "Node",
            "Problem",
            "Switch",
            "Tier",
            "Topology",
        ),
        *("load", "names", "validate"),
    }
    for name in foretell.cluster.__all__:
        assert getattr(foretell.cluster, name) is not None
    with pytest.raises(AttributeError, match="has no `nothing`"):
        foretell.cluster.nothing


def test_the_example_in_the_package_runs() -> None:
    import doctest

    assert doctest.testmod(foretell.cluster).failed == 0


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, foretell.cluster; print([m for m in ('numpy', 'tomllib') if m in sys.modules])"
    )
    source = str(Path(foretell.cluster.__file__).parents[2])
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "[]"
