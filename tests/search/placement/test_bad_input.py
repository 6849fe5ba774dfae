"""What a person may get wrong about a placement: one message with what would help, nothing left."""

import pytest
from click.testing import CliRunner

from foretell.cli.main import foretell
from foretell.errors import ForetellError

NODE = '[[node]]\ncount = 1\ndevice = "{}"\ndevices = 2\nnic = "{}"\n'
FAST, SLOW = NODE.format("v100-32", "ethernet-25g"), NODE.format("p100-pcie", "ethernet-25g")
MIXED = FAST + SLOW
WIRED = NODE.format("v100-32", "slow") + NODE.format("p100-pcie", "slow")
LINK = '[link.slow]\nkind = "ethernet"\nbandwidth = {}\nlatency = "20 us"\n'
OWN = '[device.own]\nlike = "a100-80"\nmemory = {}\n' + NODE.format("own", "ethernet-25g")
SWITCHED = FAST.replace("count = 1", "count = 4")
SWITCH = '[[switch]]\nname = "{}"\nnodes = {}\n'

CLUSTERS = {
    "no way out of a node": (FAST + SLOW.replace('nic = "ethernet-25g"\n', ""), "nic"),
    "two islands": (
        SWITCHED + SWITCH.format("a", "[0, 1]") + SWITCH.format("b", "[2, 3]"), "island",
    ),
    "a node that no switch names": (SWITCHED + SWITCH.format("a", "[0, 1, 2]"), "node 3"),
    "a switch that names a node twice": (SWITCHED + SWITCH.format("a", "[0, 0, 1, 2, 3]"), "twice"),
    "a switch that names no node": (SWITCHED + SWITCH.format("a", "[0, 1, 2, 9]"), "not there"),
    "switches of one name": (SWITCHED + 2 * SWITCH.format("a", "[0, 1, 2, 3]"), "is taken"),
    "no bandwidth": (LINK.format(0) + WIRED, "more than zero"),
    "bandwidth below zero": (LINK.format('"-5 Gb/s"') + WIRED, "more than zero"),
    "bandwidth that is no number": (LINK.format("nan") + WIRED, "not a number"),
    "bandwidth without end": (LINK.format("1e400") + WIRED, "infinite"),
    "bandwidth in words": (LINK.format('"fast"') + WIRED, "fast"),
    "bandwidth as a list": (LINK.format("[]") + WIRED, "bandwidth"),
    "no memory": (OWN.format(0) + SLOW, "more than zero"),
    "memory below zero": (OWN.format('"-1 GB"') + SLOW, "more than zero"),
    "memory that is no number": (OWN.format("nan") + SLOW, "not a number"),
    "a device of which little is said": (
        '[device.own]\narch = "volta"\n' + NODE.format("own", "ethernet-25g"), "has no memory",
    ),
    "an unknown device": (FAST.replace("v100-32", "v100-33"), "v100-32"),
    "an unknown link": (FAST.replace("25g", "26g"), "ethernet-25g"),
    "no devices": (FAST.replace("devices = 2", "devices = 0"), "from 1 to"),
    "devices below zero": (FAST.replace("devices = 2", "devices = -2"), "from 1 to"),
    "a million devices": (FAST.replace("devices = 2", "devices = 1000000"), "from 1 to"),
    "no nodes": ("", "node"),
    "a key twice": (FAST + "count = 2\n", "cannot overwrite"),
    "a price below zero": (FAST + "price = -1\n", "more than zero"),
    "one device for two ranks": ('ranks = ["0/0", "0/0"]\n' + FAST, "two ranks"),
    "a file cut short": ("[[node]]\ncou", "odd.toml"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed.toml").write_text(f'name = "mixed"\n{MIXED}')
    return tmp_path


def refused(*args):
    """The error that a command ends with; it exits with 2 and says nothing else."""
    done = CliRunner().invoke(foretell, args)
    if not isinstance(done.exception, ForetellError):
        assert done.exit_code == 2, done.output  # the command line's own words
        return done.output
    assert not done.stdout
    return str(done.exception)


def left(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("case", CLUSTERS)
def test_clusters(case, folder):
    text, words = CLUSTERS[case]
    (folder / "odd.toml").write_text(f'name = "odd"\n{text}')
    before = left(folder)
    said = refused(
        "plan", "vgg11:batch=4", "--on", "odd.toml", "--with", "placement", "-o", "best.plan"
    )
    assert words in said
    assert left(folder) == before


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("empty.toml", b""),
        ("latin.toml", b'name = "caf\xe9"\n'),
        ("nothing.toml", b"\0\0\0"),
        ("other.toml", b'{"name": 3}'),
        ("missing.toml", None),
    ],
)
def test_files_that_are_no_cluster(name, data, folder):
    if data is not None:
        (folder / name).write_bytes(data)
    assert name in refused("plan", "vgg11", "--on", name, "--with", "placement")
    (folder / "folder.toml").mkdir()
    assert "folder" in refused("plan", "vgg11", "--on", "folder.toml", "--with", "placement")


@pytest.mark.parametrize(
    ("workload", "planner", "words"),
    [
        ("vgg11:batch=4", "placement:global_batch=3", "hint: raise global_batch"),
        ("vgg11:batch=4", "placement:global_batch=-4", "hint: it is 0 or more"),
        ("vgg11:batch=4", "placement:global_batch=99999999999", "hint: placement takes"),
        ("vgg11:batch=4", "placement:playouts=-1", "hint: it is 0 or more"),
        ("vgg11:batch=4", "placement:playouts=many", "not a whole number"),
        ("vgg11:batch=4", "placement:groups=0", "hint: it is 1 or more"),
        ("vgg11:batch=4", "placement:method=happ", "hint: did you mean `hap`"),
        ("vgg11:batch=4", "placement:prior=none", "hint: known: even"),
        ("vgg11:batch=4", "placement:framework=dpd", "hint: did you mean `ddp`"),
        ("vgg11:batch=4", "placment", "hint: did you mean `placement`"),
        ("vgg11:batch=0", "placement", "batch"),
        ("vgg12", "placement", "hint: did you mean `vgg"),
        ("none.graph", "placement", "none.graph"),
        ("gpt:layers=24,hidden=24576,heads=96", "placement:method=hap", "hint: lower global_batch"),
    ],
)
def test_questions(workload, planner, words, folder):
    said = refused("plan", workload, "--on", "mixed.toml", "--with", planner, "-o", "best.plan")
    assert words in said
    assert left(folder) == ["mixed.toml"]


@pytest.mark.parametrize("output", ["none/best.plan", "."])
def test_a_plan_that_cannot_be_written_is_not_looked_for(output, folder):
    args = ("plan", "vgg11", "--on", "mixed.toml", "--with", "placement", "-o", output)
    assert "hint: name a file in a folder there is" in refused(*args)
    assert left(folder) == ["mixed.toml"]


ROWS = {
    "conv1.1+conv4.2+all-reduce+0:16+1:15/conv5.1+head+all-reduce+2:32": "31 samples",
    "conv1.1+conv2.1+all-reduce+0:32/conv4.1+head+all-reduce+1:32": "goes on with `conv3.1`",
    "conv1.1+conv4.2+all-reduce+0:32/conv4.1+head+all-reduce+1:32": "goes on with `conv5.1`",
    "conv1.1+conv4.2+all-reduce+0:32": "no ranks for `conv5.1`",
    "conv1.1+conv9+all-reduce+0:32/x+head+all-reduce+1:32": "hint: it was made for another model",
    "conv1.1+head+all-reduce+0:16+9:16": "hint: it was made for another cluster",
    "conv1.1+head+all-reduce+0:16+0:16": "hint: name each rank once",
    "conv1.1+head+all-reduce+0:32+1:0": "hint: name each rank once",
    "conv1.1+head+all-reduce+-1:16+0:16": "hint: name each rank once",
    "conv1.1+head+all-reduce": "hint: write FIRST+LAST+WAY",
    "conv1.1+head+allreduce+0:16+1:16": "hint: did you mean `all-reduce`",
    "conv1.1+head+split+0:30+1:2": "`split` names it for each rank",
    "conv1.1+head+split+0:32+2:32": "hint: a split stays inside one node",
    "conv1.1+head+all-reduce+0:99999999999999999999+1:1": "the batch has 32",
}
PLANS = {
    "dp=4,global_batch=32,shares=8+8+8+7": "hint: give 4 numbers that add up",
    "dp=4,global_batch=32,shares=16+16": "hint: give 4 numbers that add up",
    "dp=4,global_batch=32,shares=16+16+0+0": "hint: every rank has one sample or more",
    "dp=4,global_batch=2": "hint: each data-parallel rank needs a sample",
    "dp=4,global_batch=-8": "hint: it is 1 or more",
    "dp=4,global_batch=8,bucket_mb=0": "hint: a message has some bytes",
    "dp=4,global_batch=32,sync=head%2Ffc2.weight+ps:9": "hint: write ps:0 to ps:3",
    "dp=4,global_batch=32,sync=head%2Ffc2.weight+fast": "hint: write NAME+WAY",
    "dp=4,global_batch=32,sync=head%2Ffc2.weight": "hint: write NAME+WAY",
    "dp=4,global_batch=32,sync=fc.weight+factors": "hint: did you mean `head/fc",
    "dp=4,global_batch=32,sync=conv1.1%2Fconv0.weight+factors": "hint: only matmuls",
    "dp=2,placement=0+9,global_batch=8": "hint: it has ranks",
    "dp=2,placement=0+0,global_batch=8": "hint: name each once",
    "dp=5,global_batch=8": "hint: the degrees have to multiply to 4",
    "dp=4,global_batch=32,cluster=0123": "hint: find one for this cluster",
    **{f"global_batch=32,groups={rows}": words for rows, words in ROWS.items()},
    "global_batch=32,model=0123,groups=conv1.1+head+ps+0:32": "hint: find one for this model",
    "global_batch=32,dp=2,groups=conv1.1+head+ps+0:32": "hint: rows name ranks, samples and ways",
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans(plan, folder):
    said = refused("predict", "vgg11:batch=4", "--on", "mixed.toml", "--plan", plan)
    assert PLANS[plan] in said


@pytest.mark.parametrize(
    "text", ["", "null", "[1]", '{"dp": 4', '{"dp": "4"}', '{"pd": 4}', '{"dp": 1e999}', "[" * 9999]
)
def test_files_that_are_no_plan(text, folder):
    (folder / "odd.plan").write_text(text)
    for command in (("predict", "vgg11", "--on", "mixed.toml"), ("run", "train.py")):
        said = refused(*command, "--plan", "odd.plan")
        assert "odd.plan" in said
        assert "hint: " in said


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("global_batch=16,groups=0+2+all-reduce+0:12+1:5", "17 samples; the batch has 16"),
        ("dp=2,shares=8+4+4", "shares of 3 ranks beside dp=2"),
        ("dp=2,placement=0+0", "names a rank twice"),
        ("dp=2,placement=0+1+2", "a placement of 3 ranks"),
        ("dp=2,sync=3.weight", "not a parameter and a way"),
        ("dp=3", "hint: run it with -n 3"),
    ],
)
def test_plans_that_cannot_run_are_refused_before_they_are_launched(plan, words, folder):
    (folder / "train.py").write_text("def model(): ...\ndef batch(rank, size): ...\n")
    before = left(folder)
    assert words in refused("run", "train.py", "--plan", plan, "-n", "2", "-o", "out")
    assert left(folder) == before
    assert "no file `none.py`" in refused("run", "none.py", "--plan", "dp=2")
    assert "hint: -o names a folder" in refused(
        "run", "train.py", "--plan", "dp=1", "-o", "train.py"
    )
    assert "hint: give seconds" in refused(
        "run", "train.py", "--plan", "dp=1", "--timeout-s", "nan"
    )
