"""Presets: all load, none lacks a source, and their numbers agree with each other."""

import dataclasses
import gzip
import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from foretell.cluster import load, names, read
from foretell.cluster.node import FORMATS
from foretell_lab.preset_docs import tables

ROOT = Path(__file__).resolve().parents[2]
TRUTH = ROOT.parent / "shared" / "truth"

WANTED = """
k80 p100 v100-16 v100-32 t4 p4 1080ti 2080ti 3090 4090 a10g a40 l4 l40s a100-40 a100-80
a100-40-pcie a100-80-pcie h100 h100-pcie h200 b200 mi100 mi250 mi300x cpu
dgx-1-p100 dgx-1-v100 dgx-2 dgx-a100 dgx-h100 dgx-h200 dgx-b200 2080ti-box
p2 p3 p3dn p4d p4de p5 g4dn g5 g6 a2-highgpu-8g a3-mega azure-ndv4 azure-ndv5
abci disco-a disco-b tag hap
gh200 gh200-144 b300 gb200 gb300 h20 h800 a800 h100-nvl a30 rtx-pro-6000 5090 rtx-6000-ada
gh200-680w mi325x mi350x mi355x gb200-nvl72 gb300-nvl72 dgx-b300 p5e p6-b200 a3-ultra a4 nd-h200-v5
"""

NO_NUMBER = {"title", "vendor", "arch", "bus", "node", "like", "aliases", "kind", "device", "name"}
NO_NUMBER |= {"preset", "sources", "forwards"}


@pytest.mark.parametrize("name", WANTED.split())
def test_wanted_presets_are_known(name: str) -> None:
    assert name in names()


@pytest.mark.parametrize("name", names())
def test_every_preset_loads(name: str) -> None:
    cluster = load(name)
    assert cluster.size >= 1
    assert cluster.describe().startswith(f"{name}: ")
    if cluster.size > 1:
        assert cluster.levels(range(cluster.size))
    again = load(name)
    assert again == cluster
    assert hash(again) == hash(cluster)


@pytest.mark.parametrize("name", sorted(read.tables("nodes")))
def test_every_node_can_be_several(name: str) -> None:
    cluster = load(f"{name}:nodes=3")
    assert cluster.levels(range(cluster.size))[-1].sizes == (3,)


def _sourced(table: dict[str, Any]) -> set[str]:
    return {name for key in table.get("sources", {}) for name in key.split()}


DEVICE = {"memory", "memory_bandwidth", "flops", "units", "clock", "l2", "watts"}


def _unsourced() -> Iterator[str]:
    for what in ("devices", "links", "nodes"):
        for name, table in read.tables(what).items():
            numbers = set(table) | (DEVICE if what == "devices" else set())
            for key in numbers - NO_NUMBER - _sourced(table):
                yield f"{what}/{name}.{key}"
    for name, page in read.clusters().items():
        entries = [*page["node"], *page.get("tier", []), *page.get("link", {}).values()]
        for key in {k for entry in entries for k in entry} - NO_NUMBER - _sourced(page):
            yield f"clusters/{name}.{key}"


def test_no_number_lacks_a_source() -> None:
    assert list(_unsourced()) == []


def test_every_source_says_when_or_how() -> None:
    """A year, a specification, a program's source or documentation, or a plain `estimate`."""
    dated = re.compile(
        r"\b(19|20)\d\d\b|^estimate|IEEE|NCCL|RCCL|ROCm|OLCF|InfiniBand Trade Association"
        r"|CUDA|torch device properties|nvidia-smi|^vendors' figures|x 2 x \d"
    )
    every = [
        text
        for what in ("devices", "links", "nodes")
        for table in read.tables(what).values()
        for text in table["sources"].values()
    ]
    assert [text for text in every if not dated.search(text)] == []


def test_no_source_is_for_a_key_that_is_not_there() -> None:
    fields = {f.name for f in dataclasses.fields(read.devices()["k80"])}
    for name, table in read.tables("devices").items():
        assert _sourced(table) <= fields, name
    for what in ("links", "nodes"):
        for name, table in read.tables(what).items():
            assert _sourced(table) <= set(table), name


@pytest.mark.parametrize("name", sorted(read.tables("devices")))
def test_rates_of_a_device_are_in_order(name: str) -> None:
    device = read.devices()[name]
    assert set(device.flops) <= set(FORMATS)
    rate = device.flops
    assert rate["fp32"] <= device.peak("tf32") <= device.peak("fp16") * 1.01
    assert device.peak("fp16") <= device.peak("fp8") <= device.peak("fp4")
    assert rate["fp64"] <= rate["fp32"]
    assert device.memory > device.l2
    assert 1e8 < device.clock < 4e9
    assert device.bus in read.cables()
    assert read.named("nodes", device.node)


@pytest.mark.parametrize("name", [n for n, d in read.devices().items() if d.vendor == "nvidia"])
def test_fp32_rate_is_cores_times_clock(name: str) -> None:
    device = read.devices()[name]
    cores = {"kepler": 192, "volta": 64, "turing": 64, "pascal": 128}.get(device.arch, 128)
    if name.startswith(("p100", "a100", "a30", "a800")):  # GP100 and GA100 have 64 a unit
        cores = 64
    expected = device.units * cores * 2 * device.clock
    assert device.flops["fp32"] == pytest.approx(expected, rel=0.12)


def test_geforce_cards_keep_the_fp32_accumulate_rate() -> None:
    # GA102 and AD102 white papers: tensor fp16 with fp32 accumulation is twice plain fp32
    for name in ("3070", "3080", "3090", "4090", "5090"):
        device = read.devices()[name]
        assert device.peak("fp16") == pytest.approx(2 * device.peak("fp32"), rel=0.01)
    assert read.devices()["2080ti"].peak("fp16") == 53.8e12


def test_missing_formats_run_as_pytorch_runs_them() -> None:
    v100, k80 = read.devices()["v100-16"], read.devices()["k80"]
    assert v100.peak("bf16") == v100.peak("tf32") == 15.7e12
    assert v100.peak("fp8") == 125e12
    assert k80.peak("fp16") == 4.37e12


@pytest.mark.parametrize(
    ("name", "price"), [("p3:nodes=2", 2 * 24.48), ("p5", 55.04), ("tag", 0.0), ("hap", 0.0)]
)
def test_prices_add_up_or_are_unknown(name: str, price: float) -> None:
    assert load(name).price == pytest.approx(price)


def test_a_subset_pays_only_for_the_nodes_it_uses() -> None:
    assert load("p3:nodes=4").subset(range(9)).price == pytest.approx(2 * 24.48)


def test_testbeds_of_the_papers() -> None:
    a, b, tag, hap = (load(n) for n in ("disco-a", "disco-b", "tag", "hap"))
    assert (a.size, a.num_nodes, a.devices[0].name) == (12, 6, "1080ti")
    assert a.levels(range(12))[-1].bandwidth == 12e9
    assert (b.size, b.num_nodes, b.devices[0].name) == (64, 8, "t4")
    kinds = {name: len(ranks) for name, ranks in tag.devices_by_kind().items()}
    assert kinds == {"v100-32": 4, "1080ti": 8, "p100-pcie": 4}
    assert (tag.bandwidth(0, 1), tag.bandwidth(4, 5), tag.bandwidth(0, 4)) == (8e9, 3e9, 2.81e9)
    assert {n: len(r) for n, r in hap.devices_by_kind().items()} == {"v100-16": 16, "p100-pcie": 48}
    assert hap.bandwidth(0, 63) == pytest.approx(10.4e9 / 8)


def test_preset_files_are_plain_toml() -> None:
    folder = files("foretell.cluster").joinpath("presets")
    for group in ("devices", "links", "nodes", "clusters"):
        for file in folder.joinpath(group).iterdir():
            assert tomllib.loads(file.read_text(encoding="utf-8")), file.name


def test_the_reference_page_shows_the_presets_of_today() -> None:
    page = (ROOT / "docs" / "reference" / "clusters.md").read_text(encoding="utf-8")
    assert tables() in page, "run `python -m foretell_lab.preset_docs` and paste it into the page"


@pytest.mark.truth
@pytest.mark.parametrize(
    ("trace", "name"),
    [
        ("h200/bert_base.base.json.gz", "h200"),
        ("traces/hta/trace_diff.test.test.json.gz", "v100-16"),
        ("traces/hta/triton_example.triton_example.json.gz", "a100-40"),
        ("traces/gpupuzzlers/streams.blocking.blocking_streams.json.gz", "a100-80"),
        ("traces/hta/amd_trace.mi250_minitoy_train_ROCm6_2_kineto.json.gz", "mi250"),
    ],
)
def test_devices_agree_with_what_traces_say_of_them(trace: str, name: str) -> None:
    path = TRUTH / trace
    if not path.exists():
        pytest.skip(f"measured data is not here: {trace}")
    with gzip.open(path, "rt", errors="replace") as file:
        head = file.read(4000)
    device = read.devices()[name]
    memory = re.search(r'"totalGlobalMem":\s*(\d+)', head)
    units = re.search(r'"numSms":\s*(\d+)', head)
    assert memory is not None
    assert units is not None
    assert device.memory == pytest.approx(int(memory[1]), rel=0.02)
    assert device.units == int(units[1])


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA GeForce RTX 2080 Ti", "2080ti"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4070", None),
        ("Quadro RTX 5000", None),
    ],
)
def test_a_device_by_its_title(title: str, name: str | None) -> None:
    """A name that only shares a family with a preset is not taken for it."""
    found = read.titled(title)
    assert (found.name if found is not None else None) == name
