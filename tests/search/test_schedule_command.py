"""`foretell schedule` on placements and models: answers, tables, files, and what it refuses."""

import json

import pytest
from click.testing import CliRunner

from foretell.cli.main import foretell
from foretell.errors import ForetellError, InputError
from foretell.plan import read
from foretell.search.schedule import load
from foretell.search.schedule.find import METHODS

SMALL = "gpt:layers=4,hidden=256,heads=4,seq=256,vocab=50000"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*args):
    query = ["schedule", *map(str, args)]
    return CliRunner().invoke(foretell, query, catch_exceptions=False).stdout


def test_methods_are_listed():
    assert set(json.loads(run("--methods", "--json"))) == set(METHODS)
    assert "zb-h1" in run("--methods")


def test_what_was_found_before_is_not_searched_again(tmp_path):
    first = json.loads(run("v", "-m", "3", "--work", "0.5", "--json"))
    again = json.loads(run("v", "-m", "3", "--work", "0.5", "--json"))
    fresh = json.loads(run("v", "-m", "3", "--work", "0.5", "--json", "--no-cache"))
    assert [first["cached"], again["cached"], fresh["cached"]] == [False, True, False]
    assert first["blocks"] == again["blocks"] == fresh["blocks"]
    assert again["search_cpu_s"] == first["search_cpu_s"]
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1


def test_all_methods_that_fit_in_one_table():
    rows = {
        row["method"]: row
        for row in json.loads(run("m", "-m", "6", "--compare", "--work", "1", "--json"))
    }
    assert rows["search"]["period"] == 6
    assert rows["search"]["makespan"] == 60
    assert "holds 7 of 6" in rows["gpipe"]["why"]
    keys = {"period", "bubble", "makespan", "peak_memory", "in_flight", "proven"}
    assert keys <= set(rows["1f1b+"])
    shown = run("m", "-m", "6", "--compare", "--work", "1")
    assert "1f1b+" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_model_gets_a_plan_a_drawing_and_a_placement(tmp_path):
    out = [tmp_path / name for name in ("best.plan", "best.svg", "best.json")]
    flags = [x for path in out for x in ("-o", path)]
    found = json.loads(run(SMALL, "--on", "v100:gpus=2", "--shape", "m", "-n", 4, "--json", *flags))
    assert found["shape"] in found["shapes"]
    assert found["step_s"] >= found["makespan"]
    assert found["fits"]
    assert [list(s) for s in read(str(out[0])).stages] == found["stages"]
    assert out[1].read_text().startswith("<svg")
    assert len(load(out[2]).blocks) == len({b["block"] for b in found["blocks"]})
    answer = CliRunner().invoke(
        foretell, ["predict", SMALL, "--on", "v100:gpus=2", "--plan", str(out[0]), "--json"]
    )
    assert json.loads(answer.stdout)["step_s"] == found["step_s"]


def test_a_model_is_described_in_words():
    shown = run(SMALL, "--on", "v100:gpus=2", "--shape", "v", "--infer", "--time", 1)
    assert "shape v" in shown
    assert "a step of 8 samples" in shown
    table = run(SMALL, "--on", "v100:gpus=2", "--shape", "m", "--compare", "--time", 1)
    assert "1f1b+" in table


BAD = {
    "nothing": ((), "needs a placement"),
    "a method": (("v", "--method", "1f1c"), "unknown schedule method"),
    "a plan of a placement": (("v", "-o", "x.plan"), "has no model to plan"),
    "a shape": ((SMALL, "--on", "v100:gpus=2", "--shape", "q"), "unknown placement shape"),
    "a model": (("gtp", "--on", "v100:gpus=2"), "unknown workload: `gtp`"),
    "a cluster": ((SMALL, "--on", "v1000"), "unknown cluster"),
    "memory": (("v", "-m", "0.5"), "device 0 needs memory 1 for one micro-batch, it has 0.5"),
    "memories": (("v", "-m", "1,2"), "--memory 1,2 for 4 devices"),
    "a speed": (("v", "--speed", "0"), "speed of device 0 is 0"),
    "an option of models": (("v", "--split"), "--split is for a model"),
    "messages that are no line": (("x:devices=2", "-o", "x.comms.csv"), "along one line of stages"),
    "time": (("v", "--time", "0"), "time limit is 0"),
    "odd micro-batches": (
        (SMALL, "--on", "v100:gpus=2", "--shape", "x", "-n", "3"),
        "cannot be shared by 2 copies",
    ),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_printed(args, message):
    with pytest.raises(ForetellError, match=message):
        run(*args)


def test_bounds_and_gaps_are_reported():
    """M with memory 3: the best pattern found is 3 % above what nothing can beat."""
    answer = " ".join(run("m", "-m", 3, "--time", 1).split())
    assert "(bound 7.333, gap " in answer
    answer = " ".join(run("v", "-m", 4).split())
    assert "(proven minimal), makespan 44 for 8 micro-batches (proven minimal)" in answer


def test_devices_that_differ_and_messages_that_hold_them():
    spec = "v:devices=2,backward=2,lag=0.5"
    spans = {
        way: json.loads(run(spec, "-n", 4, "--overlap", way, "--json"))["makespan"]
        for way in ("beside", "link", "stop")
    }
    assert spans["beside"] <= spans["link"] < spans["stop"]
    quick = json.loads(run(spec, "-n", 4, "--speed", "1,2", "-m", "2,1", "--json"))
    assert quick["makespan"] < spans["beside"]
    assert quick["peak_memory"] == [2, 1]


def test_choices_of_a_placement_are_decided(tmp_path):
    """Recompute of the first stage where its memory is short, and nothing else."""
    light = [
        {"id": 0, "kind": "F", "devices": [0], "time": 1, "mem": 0.25},
        {"id": 3, "kind": "B", "devices": [0], "time": 3, "mem": -0.25},
    ]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(placement(choices={"recompute 0": light})))
    free, tight = (json.loads(run(path, "-m", m, "--json")) for m in ("4,4", "1,1"))
    assert free["choices"] == []
    assert tight["choices"] == ["recompute 0"]
    assert "decided: recompute 0" in run(path, "-m", "1,1")


def test_what_ranks_do_is_written_as_torch_reads_it(tmp_path):
    plain, full = tmp_path / "a.csv", tmp_path / "a.comms.csv"
    run("wave:devices=2,split=yes", "-n", 4, "--method", "zb-v", "-o", plain, "-o", full)
    rows = [line.split(",") for line in plain.read_text().splitlines()]
    assert {cell[0] for cell in rows[0]} == {"0", "3"}
    assert {cell[0] for cell in rows[1]} == {"1", "2"}
    cells = [line.split(",") for line in full.read_text().splitlines()]
    assert [c for c in cells[0] if c[1] in "FIW" and c[2:].isdigit()] == rows[0]
    assert "0SEND_F0" in cells[0]
    assert "1RECV_F0" in cells[1]


def placement(**change):
    blocks = [
        {"id": 0, "kind": "F", "devices": [0], "time": 1, "mem": 1},
        {"id": 1, "kind": "F", "devices": [1], "time": 1, "mem": 1},
        {"id": 2, "kind": "B", "devices": [1], "time": 2, "mem": -1},
        {"id": 3, "kind": "B", "devices": [0], "time": 2, "mem": -1},
    ]
    return {"ndevs": 2, "blocks": blocks, "deps": [[0, 1], [1, 2], [2, 3]], **change}


@pytest.mark.parametrize(
    ("change", "args", "makespan"),
    [
        ({}, ("-n", 1), 6),
        ({"ndevs": 9}, ("-n", 2), 9),
        ({"ndevs": 1, "blocks": [{"id": 0, "devices": [0], "time": 3}], "deps": []}, ("-n", 4), 12),
        ({"blocks": [{"id": 0, "devices": [0], "time": 0}], "deps": []}, ("-n", 3), 0),
        ({"speed": [2, 1]}, ("-n", 1), 4.5),
        ({"deps": [[0, 1, 0.5], [1, 2], [2, 3, 0.5]]}, ("-n", 1), 7),
    ],
    ids=["one micro-batch", "more devices", "one device", "no time", "speeds", "lags"],
)
def test_odd_placements_get_right_answers(change, args, makespan, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(placement(**change)))
    assert json.loads(run(path, *args, "--json"))["makespan"] == makespan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deps": [[0, 1], [1, 0]]}, "wait on each other in a cycle"),
        ({"blocks": [{"id": 0, "devices": [], "time": 1}], "deps": []}, "is on no device"),
        ({"memory": [0.5, 8]}, "device 0 needs memory 1 for one micro-batch, it has 0.5"),
        ({"blocks": []}, "without blocks"),
    ],
    ids=["cycle", "no device", "memory", "no blocks"],
)
def test_wrong_placements_say_what_is_wrong(change, message, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(placement(**change)))
    with pytest.raises((InputError, ForetellError), match=message):
        run(path)
