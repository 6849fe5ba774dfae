"""Specs and files: what is understood, and what is said about what is not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.cluster import Problem, load, validate
from foretell.cluster.read import parse
from foretell.errors import ForetellError, InputError

GOOD = """\
# two kinds of machine on one switch
name = "lab"

[device.big]
like = "a100-40"
memory = "96 GB"

[link.slow]
kind = "ethernet"
bandwidth = "10.4 Gb/s"
latency = "20 us"

[[node]]
count = 2
device = "v100-16"
devices = 4
mesh = "nvlink2 x2"
nic = "slow"

[[node]]
preset = "pcie3-box"
device = "big"
devices = 2
nic = "slow"

[[tier]]
name = "leaf"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lab.toml"
    path.write_text(GOOD)
    return path


def test_a_file_is_read(file: Path) -> None:
    cluster = load(str(file))
    assert (cluster.name, cluster.size, cluster.num_nodes) == ("lab", 10, 3)
    assert [d.name for d in cluster.devices] == ["v100-16"] * 8 + ["big"] * 2
    assert cluster.devices[9].memory == 96e9
    assert cluster.devices[9].memory_bandwidth == 1555e9
    assert cluster.bandwidth(0, 1) == 50e9
    assert cluster.bandwidth(0, 9) == 1.3e9
    assert validate(file) == validate(GOOD) == ()


def test_options_apply_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text('[[node]]\npreset = "dgx-a100"\n')
    assert load(str(path)).name == "one"
    assert load(f"{path}:nodes=3").size == 24
    assert load(f"{path}:nodes=4,gpus=8").nodes.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("spec", "size", "nodes"),
    [
        ("a100-80", 1, 1),
        ("a100-80:gpus=64", 64, 8),
        ("a100-80:gpus=4", 4, 1),
        ("a100-80:gpus=12", 12, 2),
        ("A100_80:gpus=16", 16, 2),
        ("dgx-a100:nodes=8", 64, 8),
        ("dgx-2:nodes=2", 32, 2),
        ("v100:gpus=8,nodes=8", 8, 8),
        ("p4d:nodes=2", 16, 2),
        ("abci:nodes=16", 64, 16),
        ("abci:gpus=6", 6, 2),
        ("3090:gpus=2", 2, 1),
        ("cpu", 1, 1),
        ("tag", 16, 7),
        ("tag:gpus=5", 5, 2),
    ],
)
def test_specs(spec: str, size: int, nodes: int) -> None:
    cluster = load(spec)
    assert (cluster.name, cluster.size, cluster.num_nodes) == (spec, size, nodes)


def test_racks_are_shared_out_evenly() -> None:
    assert np.bincount(load("gb200:gpus=256").nodes).tolist() == [64, 64, 64, 64]
    assert np.bincount(load("gb200:gpus=80").nodes).tolist() == [40, 40]
    assert np.bincount(load("a100-80:gpus=12").nodes).tolist() == [8, 4]


def test_a_device_alone_is_one() -> None:
    assert [load(s).size for s in ("h100", "h100:gpus=3", "h100:nodes=2", "dgx-h100")] == [
        1,
        3,
        16,
        8,
    ]
    assert load("h100:gpus=64").num_nodes == 8


def test_a_device_brings_its_usual_node() -> None:
    assert load("v100-32").node(0).name == "dgx-1-v100-32"
    assert load("h200:gpus=8").bandwidth(0, 1) == 450e9
    assert load("4090").devices[0].name == "4090"


def test_options_change_the_node() -> None:
    cluster = load("dgx-a100:nodes=2,nic=ethernet-25g,nics=1,device=a100-40")
    assert cluster.devices[0].name == "a100-40"
    assert cluster.bandwidth(0, 8) == 3.125e9
    assert "nic" not in cluster.node(0).sources


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("a100-8O", "unknown cluster, node or device preset: `a100-8o`", "did you mean `a100-80`"),
        ("dgxa100:nodes=2", "unknown cluster, node or device", "did you mean `dgx-a100`"),
        ("dgx-a100:nods=2", "unknown option of `cluster`: `nods`", "did you mean `nodes`?"),
        ("dgx-a100:nodes=two", "is `two`, not a whole number", ""),
        ("dgx-a100:nodes=0", "option `nodes` is `0`", ""),
        ("dgx-a100:nodes=-3", "option `nodes` is `-3`", ""),
        ("dgx-a100:oversubscription=nan", "option `oversubscription` is `nan`", ""),
        ("dgx-a100:nodes", "is not `field=value`", "separate options"),
        ("dgx-a100:nic=infiniband-hdx", "unknown link: `infiniband-hdx`", "did you mean"),
        ("dgx-a100:device=h1000", "unknown device: `h1000`", "did you mean `h100`?"),
        ("tag:nodes=3", "has several kinds of node", "write a file"),
        ("tag:gpus=99", "requests 99 gpus, more than there are", "it has 16 devices"),
        ("a100-80:gpus=9,nodes=2", "would leave nodes uneven", "9 gpus do not divide"),
        ("", "empty name in spec", "write"),
        ("nowhere.toml", "there is no file `nowhere.toml`", "a preset has no ending"),
    ],
)
def test_bad_specs_get_one_clear_message(spec: str, message: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        load(spec)
    assert message in caught.value.message
    assert hint in caught.value.hint


NODE = '[[node]]\ndevice = "v100-16"\ndevices = 2\n'


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 0, "the file is empty"),
        ("   \n# only a remark\n", 0, "there is no [[node]]"),
        ("name = ", 1, "not TOML"),
        ("{}", 1, "not TOML"),
        ('[[node]]\ndevice = "v100-16\nnic = 3\n', 2, "not TOML"),
        ('name = "x"\n', 0, "there is no [[node]]: the cluster is empty"),
        ("node = 3\n", 1, "`node` is not a list of tables"),
        ("[node]\ndevice = 'k80'\n", 1, "`node` is not a list of tables"),
        (NODE + "nvlinc = 'nvlink2'\n", 4, "unknown key in node 0: `nvlinc`"),
        ("colour = 'red'\n" + NODE, 1, "unknown key in the cluster: `colour`"),
        ("[[node]]\ndevices = 4\n", 1, "node 0 names no device"),
        ("[[node]]\ndevices = []\n", 2, "node 0 names no device"),
        ("[[node]]\ndevice = 'v100-17'\n", 2, "unknown device: `v100-17`"),
        ("[[node]]\npreset = 'dgx-a10O'\n", 2, "unknown node preset: `dgx-a10O`"),
        ("[[node]]\ndevice = 'k80'\ndevices = 0\n", 3, "devices of node 0 is `0`"),
        ("[[node]]\ndevice = 'k80'\ndevices = -4\n", 3, "devices of node 0 is `-4`"),
        ("[[node]]\ndevice = 'k80'\ndevices = 1.5\n", 3, "devices of node 0 is `1.5`"),
        ("[[node]]\ndevice = 'k80'\ndevices = true\n", 3, "devices of node 0 is `True`"),
        ("[[node]]\ndevice = 'k80'\ndevices = 100000\n", 3, "devices of node 0 is `100000`"),
        ("[[node]]\ndevice = 'k80'\ncount = 9999999\n", 3, "count of node 0 is `9999999`"),
        (NODE + "count = 1000000\nnic = 'ethernet-1g'\n", 4, "2000000 devices are too many"),
        (NODE + "nic = 'pcie3'\n", 4, "nic of node 0 is a pcie"),
        (NODE + "nic = 'ethernet-11g'\n", 4, "unknown link: `ethernet-11g`"),
        (NODE + "mesh = 'nvlink2 xx'\n", 4, "`xx` is not a count"),
        (NODE + "mesh = 'nvlink2 x0'\n", 4, "`x0` is not a count"),
        (NODE + "nics = 2\n", 4, "node 0 has 2 nics of no kind"),
        (NODE + "links = 3\n", 4, "links of node 0 is `3`, not a list"),
        (NODE + "links = [['device0', 'device1']]\n", 4, "not [from, to, link]"),
        (NODE + "links = [['device0', 'device7', 'nvlink2']]\n", 4, "unknown vertex: `device7`"),
        (NODE + "links = [['device0', 'device0', 'nvlink2']]\n", 4, "links `device0` to itself"),
        (NODE + "ports = [['device0', 'ethernet-1g']]\n", 4, "unknown nic: `device0`"),
        (NODE + "vertices = { x = 'device' }\n", 4, "unknown kind of vertex: `device`"),
        (NODE + "forwards = 'yes'\n", 4, "not true or false"),
        (NODE + "price = 'cheap'\n", 4, "price of node 0 is `cheap`"),
        (NODE + "title = 3\n", 4, "not text in quotes"),
        (NODE + "sockets = 0\n", 1, "device1 of node `node0` is an island"),
        (NODE + "count = 2\n", 1, "node `node0` has no nic to reach the others"),
        ("[link.x]\nbandwidth = 0\n" + NODE, 2, "bandwidth of link `x` is `0`"),
        ("[link.x]\nbandwidth = -1.0\n" + NODE, 2, "bandwidth of link `x` is `-1.0`"),
        ("[link.x]\nbandwidth = nan\n" + NODE, 2, "is `nan`: not a number"),
        ("[link.x]\nbandwidth = inf\n" + NODE, 2, "is `inf`: infinite"),
        ("[link.x]\nbandwidth = '10 GB'\n" + NODE, 2, "`GB` is not a unit of B/s"),
        ("[link.x]\nlatency = '1 us'\n" + NODE, 1, "link `x` has no bandwidth"),
        ("[link.x]\nkind = 'smoke'\nbandwidth = 1\n" + NODE, 2, "unknown kind of link: `smoke`"),
        ("link = 3\n" + NODE, 1, "[[link]] is a list"),
        ("[link]\nx = 3\n" + NODE, 2, "`link.x` is `3`, not a table"),
        ("[device.x]\nlike = 'k81'\n" + NODE, 2, "unknown device: `k81`"),
        ("[device.x]\nlike = 'k80'\nmemory = 0\n" + NODE, 3, "memory of device `x` is `0`"),
        ("[device.x]\nflops = { fp32 = 1 }\nmemory_bandwidth = 1\n" + NODE, 1, "has no memory"),
        ("[device.x]\nlike = 'k80'\nflops = { fp31 = 1 }\n" + NODE, 3, "unknown number format"),
        ("[device.x]\nlike = 'k80'\nflops = 3\n" + NODE, 3, "flops of device `x` is `3`"),
        (NODE + "[[tier]]\nsize = -1\n", 5, "size of tier 0 is `-1`"),
        (NODE + "[[tier]]\noversubscription = 0\n", 5, "oversubscription of tier 0 is `0`"),
        (NODE + "[[tier]]\noversubscription = nan\n", 5, "oversubscription of tier 0 is `nan`"),
        (NODE + "[[tier]]\nsise = 2\n", 5, "unknown key in tier 0: `sise`"),
        (NODE + "nic='ethernet-1g'\ncount = 4\n[[tier]]\nsize = 2\n", 6, "leaves 2 islands"),
        (NODE + "[[tier]]\n[[switch]]\nname = 's'\n", 4, "the network is given twice"),
        (NODE + "[[switch]]\nname = 's'\nnodes = [4]\n", 6, "names node `4`"),
        (NODE + "[[switch]]\nname = 's'\nlinks = [['t', 'ethernet-1g']]\n", 6, "unknown switch"),
        (NODE + "[[switch]]\nname = 's'\nlinks = ['t']\n", 6, "not [switch, link]"),
        (NODE + "[[switch]]\nnodes = [0]\n", 4, "switch name `` is missing"),
        (NODE + "[[switch]]\nname='s'\n[[switch]]\nname='s'\n", 5, "switch name `s` is taken"),
        ("ranks = ['0/5']\n" + NODE, 1, "`0/5` in ranks names no devices"),
        ("ranks = ['0/0', '0/0']\n" + NODE, 1, "two ranks on one device"),
        ("ranks = []\n" + NODE, 1, "ranks is empty"),
        ("ranks = ['zero']\n" + NODE, 1, "`zero` in ranks"),
    ],
)
def test_bad_files_are_reported_by_line(text: str, line: int, message: str) -> None:
    problems = validate(text)
    assert any(message in p.message and p.line == line for p in problems), problems


@pytest.mark.parametrize(
    "text",
    [
        "[[node]]\ndevices = ['v100-16', 'v100', 'k80']\n",
        NODE + "mesh = 'nvlink2 2'\n",
        NODE + "price = 0\n",
        NODE + "nic = 'ethernet-1g'\ncount = 4\n[[tier]]\nsize = 2\n[[tier]]\n",
        "ranks = ['0/1', '0/0']\n" + NODE,
    ],
)
def test_unusual_files_are_sound(text: str) -> None:
    assert validate(text) == ()


def test_islands_between_nodes_are_found() -> None:
    node = NODE + "nic = 'ethernet-1g'\ncount = 4\n"
    one = "[[switch]]\nname = 'a'\nnodes = [0, 1]\n"
    two = "[[switch]]\nname = 'b'\nnodes = [2, 3]\n"
    (cut,) = validate(node + one + two)
    assert "switch `b` is an island: no way leads to `a`" in cut.message
    assert cut.line == 9
    assert "links" in cut.hint
    (left,) = validate(node + one)
    assert "node 2 is an island" in left.message
    joined = two + "links = [['a', 'ethernet-1g x2']]\n"
    assert validate(node + one + joined) == ()


def test_a_star_of_devices_without_a_host_is_an_island() -> None:
    star = "links = [['device0', 'device1', 'nvlink2'], ['device0', 'device2', 'nvlink2']]\n"
    text = "[[node]]\ndevice = 'k80'\ndevices = 3\nsockets = 0\n" + star
    (problem,) = validate(text)
    assert "device2 of node `node0` is an island: no way leads to device1" in problem.message
    assert "forwards" in problem.hint
    assert validate(text + "forwards = true\n") == ()


def test_all_problems_are_reported_at_once_in_order() -> None:
    text = GOOD.replace('"10.4 Gb/s"', "0").replace("mesh", "mash").replace("96 GB", "96 GX")
    assert [(p.line, p.message.split(" ")[0]) for p in validate(text)] == [
        (6, "memory"),
        (10, "bandwidth"),
        (17, "unknown"),
    ]


def test_a_bad_file_is_one_error_with_file_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("colour = 1\n[[node]]\npreset = 'dgx-a1000'\n")
    with pytest.raises(InputError) as caught:
        load(str(path))
    assert f"2 problems in {path}" in caught.value.message
    assert f"{path}:1: unknown key" in caught.value.message
    assert f"{path}:3: unknown node preset: `dgx-a1000` (did you mean" in caught.value.message


@pytest.mark.parametrize("content", [b"\xff\xfe\x00bad", b"\x1f\x8b\x08\x00binary"])
def test_a_file_that_is_not_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is not text|cannot be read"):
        load(str(path))
    assert "not text" in (said := validate(path)[0].message) or "cannot be read" in said


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        load(f"{tmp_path}/")


@given(st.integers(0, len(GOOD)))
@settings(max_examples=150, deadline=None)
def test_a_truncated_file_is_sound_or_refused(cut: int) -> None:
    for problem in validate(GOOD[:cut]):
        assert problem.message
        assert 0 <= problem.line <= GOOD.count("\n") + 1


_VALUES = st.one_of(
    st.integers(-5, 9),
    st.floats(width=32),
    st.booleans(),
    st.sampled_from(["", "k80", "nvlink2 x2", "pcie3", "10 GB/s", "nan GB/s", "x", "ethernet-1g"]),
    st.lists(st.sampled_from(["k80", "device0", "nvlink2"]), max_size=3),
    st.lists(
        st.lists(st.sampled_from(["device0", "nic0", "nvlink2", "s"]), max_size=3), max_size=2
    ),
    st.dictionaries(st.sampled_from(["fp32", "a", "kind"]), st.integers(-1, 2), max_size=2),
)
_WORDS = """
name title count device devices sockets socket_link pcie nic_pcie pcie_switches nvlink mesh nics nic
vertices links ports forwards rack host_memory price sources preset memory flops like kind bandwidth
latency size oversubscription uplink nodes ranks node tier switch link wrong
"""
_KEYS = st.sampled_from(_WORDS.split())
_TABLES = st.sampled_from(["", "[[node]]", "[[tier]]", "[[switch]]", "[device.d]", "[link.l]"])


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return repr(value)


@given(st.lists(st.tuples(_TABLES, st.dictionaries(_KEYS, _VALUES, max_size=5)), max_size=5))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_file_is_sound_or_refused_with_a_reason(
    tables: list[tuple[str, dict[str, Any]]],
) -> None:
    text = "\n".join(
        "\n".join([head, *(f"{key} = {_toml(value)}" for key, value in values.items())])
        for head, values in tables
    )
    for problem in validate(text):
        assert isinstance(problem, Problem)
        assert problem.message
        assert problem.line <= text.count("\n") + 1


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_as_a_spec_is_a_cluster_or_one_error(text: str) -> None:
    if "/" in text or "\0" in text:
        return
    try:
        size = load(text).size
    except ForetellError as error:
        size = len(error.message)
    assert size > 0


def test_lines_are_found_through_tables_strings_and_arrays() -> None:
    page = parse(
        "\n".join(
            [
                'title = """',
                "fake = 1",
                '"""',
                "[[node]]",
                "links = [",
                '  ["a", "b", "c"]',
                "]",
                'device = "x"  # [[node]]',
                "[[node]]",
                "[node.sources]",
                'a.b = "c"',
                '[device."my gpu".flops]',
                "fp32 = 1",
            ]
        )
    )
    assert page.line(("title",)) == 1
    assert page.line(("fake",)) == 0
    assert page.line(("node", 0, "device")) == 8
    assert page.line(("node", 0, "nothing")) == 4
    assert page.line(("node", 1, "sources", "a", "b")) == 11
    assert page.line(("device", "my gpu", "flops", "fp32")) == 13
