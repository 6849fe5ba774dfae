"""The command line as people use it: as processes where start-up matters, else within this one."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
from click.testing import CliRunner
from tests.transformer import transformer

from foretell.cli.main import COMMANDS, foretell
from foretell.errors import ForetellError, InputError
from foretell.graph import Builder, save


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "foretell", *args], capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def step(tmp_path):
    make = Builder()
    lane = make.lane("stream", kind="compute")
    first = make.task(kind="kernel", op="gemm", lane=lane, seconds=0.002)
    make.task(kind="kernel", op="relu", lane=lane, seconds=0.001, after=[first])
    path = tmp_path / "step.graph"
    save(make.graph(), path)
    return path


def invoke(*args):
    return CliRunner().invoke(foretell, [str(a) for a in args], catch_exceptions=False)


def test_simulate_answers_as_json(step):
    done = invoke("simulate", step, "--json")
    answer = json.loads(done.stdout)
    assert answer["step_s"] == pytest.approx(0.003)
    assert answer["critical_path"]["ops"] == {"gemm": 0.002, "relu": pytest.approx(0.001)}


def test_simulate_speaks_to_people(step):
    done = invoke("simulate", step)
    assert "step 3 ms, 2 tasks" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_both_engines_say_the_same(step):
    answers = {
        invoke("simulate", step, "--json", "--engine", e).stdout for e in ("readable", "compiled")
    }
    assert len(answers) == 1


def test_show_prints_text_that_reads_back(step):
    from foretell.graph import load, parse

    done = invoke("show", step, "--text")
    assert parse(done.stdout).fingerprint() == load(step).fingerprint()


def test_show_a_cluster_by_name():
    answer = json.loads(invoke("show", "dgx-a100:nodes=2", "--json").stdout)
    assert answer["ranks"] == 16
    assert answer["devices"] == {"a100-80": 16}


def test_a_report_holds_the_timeline_and_nothing_else_beside_it(step, tmp_path):
    from tests.report.test_page import data_of

    out = tmp_path / "report.html"
    invoke("simulate", step, "-o", out)
    page = out.read_text()
    assert "critical path" in page.lower()
    assert round(data_of(page)["lines"][0]["step_s"], 3) == 0.003
    assert "http://" not in page
    assert "https://" not in page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "step.graph"]


def test_names_cannot_break_out_of_the_page(tmp_path):
    from foretell.report.page import page
    from foretell.simulate import simulate

    make = Builder()
    make.task(kind="host", op="x", name="</script><script>alert(1)</script>", seconds=1.0)
    text = page([("<b>", simulate(make.graph()))])
    assert "</script><script>alert" not in text


def test_prices_come_with_their_source(tmp_path):
    path = tmp_path / "step.graph"
    save(transformer(ranks=2, layers=1), path)
    answer = json.loads(invoke("simulate", path, "--on", "dgx-a100:nodes=1", "--json").stdout)
    assert 1e-4 < answer["step_s"] < 1
    assert sum(answer["sources"].values()) == pytest.approx(1)
    assert {"formula", "learned"} & set(answer["sources"])


MISTAKES = [
    (["simulat"], "did you mean `simulate`?"),
    (["simulate", "missing.graph"], "cannot read `missing.graph`"),
    (["show", "dgx-a101:nodes=2"], "did you mean `dgx-a100`?"),
    (["simulate"], "Missing argument"),
    (["simulate", "x", "--engine", "slow"], "slow"),
    (["validate", "--truth", "nowhere"], "no folder of measured data"),
]


@pytest.mark.parametrize(("args", "words"), MISTAKES)
def test_a_mistake_gets_one_message_and_exit_code_2(args, words):
    done = run(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


BAD_FILES = {
    "empty": b"",
    "not a graph": b"\x00\x01\x02\xff",
    "text of another version": b"foretell graph 99\n",
    "cut short": b"foretell-graph\n\x10\x00\x00\x00\x00\x00\x00\x00abc",
    "a cycle": b"foretell graph 1\n%0 = host x for 1.0 after %1\n%1 = host y for 1.0 after %0\n",
    "a lane that is not there": b"foretell graph 1\n%0 = host x on 3 for 1.0\n",
    "negative time": b"foretell graph 1\n%0 = host x for -1.0\n",
    "not a number": b"foretell graph 1\n%0 = host x for nan\n",
    "json": b'{"tasks": []}',
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_file_gets_a_clear_error(what, tmp_path):
    path = tmp_path / "bad.graph"
    path.write_bytes(BAD_FILES[what])
    with pytest.raises(ForetellError) as error:
        invoke("simulate", path, "-o", tmp_path / "out.html")
    assert len(error.value.message) > 10
    assert not (tmp_path / "out.html").exists()


def test_version_help_and_completion_are_there():
    assert run("--version").stdout.startswith("foretell ")
    shown = run("--help").stdout
    assert all(name in shown for name in COMMANDS)
    assert "_FORETELL_COMPLETE" in run("completion", "bash").stdout


def test_help_of_every_command():
    for name in COMMANDS:
        assert "Usage" in invoke(name, "--help").stdout


def test_whatif_composes_changes(step):
    done = invoke("whatif", step, "faster:op=gemm,times=2", "remove:select=op=relu", "--json")
    found = json.loads(done.stdout)
    assert found["baseline_s"] == pytest.approx(0.003)
    assert found["predicted_s"] == pytest.approx(0.001)
    assert found["path_after"] == {"gemm": pytest.approx(0.001)}
    assert "3.00 × faster" in invoke("whatif", step, *found["changes"]).stdout


def test_demo_ends_with_a_report(tmp_path):
    out = tmp_path / "demo.html"
    done = invoke("demo", "-o", out)
    assert "replayed" in done.stdout
    assert "with amp" in done.stdout
    assert "best on 64: dp=64" in done.stdout
    if find_spec("torch"):
        assert "messages" in done.stdout
        assert "predicted" in done.stdout
    assert out.stat().st_size < 6e6


def test_the_name_of_the_output_says_what_it_is(step, tmp_path):
    invoke("whatif", step, "faster:op=gemm", "-o", tmp_path / "both.json.gz")
    assert (tmp_path / "both.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    with pytest.raises(ForetellError, match="neither a page nor a trace"):
        invoke("simulate", step, "-o", tmp_path / "x.pdf")


def test_a_schedule_of_a_shape(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = json.loads(invoke("schedule", "v:devices=4", "--json").stdout)
    assert (found["per_micro_batch"], found["proven"]) == (4, True)
    drawn = tmp_path / "v.svg"
    shown = invoke("schedule", "v:devices=4", "-o", drawn).stdout
    assert "proven minimal" in shown
    assert drawn.read_text().startswith("<svg")
    with pytest.raises(ForetellError):
        invoke("schedule", "vv:devices=4")


def test_a_file_without_prices_is_refused(tmp_path):
    empty = tmp_path / "prices.toml"
    empty.write_text("")
    with pytest.raises(ForetellError, match="names no price"):
        invoke("oracle", "vgg16", "--on", "dgx-1-v100", "--gpus", "8", "--prices", empty)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["explain"], "amp"),
        (["explain"], "placement"),
        (["explain"], "pipeline"),
        (["whatif", "step.json"], "cuda-graph"),
        (["plan", "vgg16", "--with"], "fusion"),
        (["oracle", "vgg16", "--on"], "dgx-a100"),
    ],
)
def test_a_shell_offers_names(words, offered):
    from click.shell_completion import ShellComplete

    query = ShellComplete(foretell, {}, "foretell", "_FORETELL_COMPLETE")
    assert offered in [item.value for item in query.get_completions(words, offered[:2])]
    assert not any(
        item.value == offered for item in query.get_completions(words, f"{offered}-none-such")
    )


@pytest.mark.parametrize(
    "words",
    [["validate"], ["lab"], ["train-policy", "--help"], ["bench", "--ops", "--no-links"]],
)
def test_commands_of_the_lab_say_how_to_get_it(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("foretell.cli.lab_package.PACKAGE", "foretell_lab_that_is_not_installed")
    with pytest.raises(ForetellError, match=r"(?s)foretell-lab.*hint: .*pip install ./lab"):
        invoke(*words)


def test_bench_leaves_operators_out_where_the_lab_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("foretell.cli.lab_package.PACKAGE", "foretell_lab_that_is_not_installed")
    done = invoke("bench", "--no-links", "-o", tmp_path / "bench", "--json")
    assert json.loads(done.stdout) == {"folder": str(tmp_path / "bench")}
    assert "needs the package foretell-lab" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["whatif", "FILE", "batch"],
        ["advise", "FILE"],
        ["report", "FILE"],
        ["simulate", "FILE"],
        ["check", "FILE", "--step-under", "1s"],
        ["compare", "FILE", "FILE"],
    ],
)
@pytest.mark.parametrize("name", ["et.json", "step.graph"])
def test_a_step_without_times_is_answered_on_a_cluster_only(words, name, tmp_path):
    from tests.trace.test_chakra import NODES

    file = tmp_path / name
    if name == "et.json":
        file.write_text(json.dumps({"schema": "1", "nodes": NODES}))
    else:
        save(transformer(ranks=1, layers=1), file)
    query = [file if word == "FILE" else word for word in words]
    with pytest.raises(InputError, match=r"(?s)have no times.*--on h100"):
        invoke(*query)
    if words[0] != "compare":
        assert invoke(*query, "--on", "h100").exit_code == 0


@pytest.mark.parametrize(
    "words", [["whatif", "FILE", "amp"], ["advise", "FILE"], ["report", "FILE"]]
)
def test_arguments_for_a_script_are_refused_beside_a_file(words, step):
    query = [step if word == "FILE" else word for word in words]
    with pytest.raises(InputError, match="is no training script"):
        invoke(*query, "--", "--lr", "0.1")
