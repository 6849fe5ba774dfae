"""What a step is, from the turns that optimizers take."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner

from foretell.cli.arguments import ScriptCommand
from foretell.cli.main import foretell
from foretell.errors import InputError
from foretell.pytorch.intake.files import Journal, undo
from foretell.pytorch.intake.watch import Pattern, repeated


def ends(turns: str) -> str:
    """A mark at every turn that ends a step."""
    pattern = Pattern()
    return "".join("|" if pattern.ends(ord(turn))[0] else "." for turn in turns)


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        ("aaaa", "||||"),
        ("abababab", "|..|.|.|"),
        ("aaabaaabaaab", "|||....|...|"),
        ("xaaaaaaa", "|......."),  # an optimizer that is used once, then never again
        ("abcabcabc", "|....|..|"),
    ],
)
def test_steps_by_the_turns_of_optimizers(turns: str, found: str) -> None:
    assert ends(turns) == found


def test_the_shortest_ending_that_repeats() -> None:
    assert repeated([1, 2, 1, 2]) == 2
    assert repeated([1, 1, 2, 1, 1, 2]) == 3
    assert repeated([1, 1, 2]) == 0


def test_turns_without_a_pattern_end_with_the_rarest() -> None:
    pattern = Pattern()
    turns = [1 if (k * k) % 7 == 1 or k % 11 == 0 else 0 for k in range(9000)]
    ended = [k for k, turn in enumerate(turns) if pattern.ends(turn)[0] and k > 5000]
    assert ended


def test_files_are_as_they_were(tmp_path: Path) -> None:
    here, notes = tmp_path / "here", tmp_path / "notes"
    here.mkdir()
    notes.mkdir()
    (here / "kept.txt").write_text("before")
    journal = Journal(notes, str(here / "output"), here)
    for name in ("kept.txt", "new.txt", "output", "deep/er.txt"):
        journal.note(str(here / name))
    journal.note(str(here / "deep"))
    (here / "deep").mkdir()
    for name in ("kept.txt", "new.txt", "output", "deep/er.txt"):
        (here / name).write_text("after")
    undo(notes)
    assert {p.name: p.read_text() for p in here.iterdir()} == {
        "kept.txt": "before",
        "output": "after",
    }


@pytest.fixture
def parsed(tmp_path: Path):
    import click

    @click.command(cls=ScriptCommand)
    @click.argument("script")
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    @click.option("-o", "--output", default="")
    @click.option("--json", "as_json", is_flag=True)
    @click.option("--device", default="")
    def command(**given):
        click.echo(repr(given))

    path = tmp_path / "train.py"
    path.write_text("parser.add_argument('--device')\nparser.add_argument('--lr')\n")

    def run(*args: str) -> dict:
        words = [str(path) if a == "train.py" else a for a in args]
        done = CliRunner().invoke(command, words, catch_exceptions=False)
        return eval(done.stdout)

    return run


@pytest.mark.parametrize(
    ("words", "args", "ours"),
    [
        (["train.py", "--lr", "1"], ("--lr", "1"), {}),
        (["-o", "x", "train.py", "--lr=1"], ("--lr=1",), {"output": "x"}),
        (["train.py", "--lr", "1", "-o", "x"], ("--lr", "1"), {"output": "x"}),
        (["train.py", "--device", "cpu"], ("--device", "cpu"), {}),  # the script knows it
        (["--device", "cpu", "train.py"], (), {"device": "cpu"}),
        (["train.py", "--json", "--", "--json"], ("--json",), {"as_json": True}),
        (["train.py", "--", "-o", "x"], ("-o", "x"), {}),
    ],
)
def test_whose_an_argument_is(parsed, words, args, ours) -> None:
    found = parsed(*words)
    assert found["args"] == args
    usual = {"output": "", "as_json": False, "device": ""}
    assert {k: v for k, v in found.items() if usual.get(k, v) != v} == ours


@pytest.mark.parametrize("command", ["profile", "capture"])
def test_a_script_that_is_not_there(command: str) -> None:
    with pytest.raises(InputError, match=r"there is no file|cannot read"):
        CliRunner().invoke(foretell, [command, "nowhere.py"], catch_exceptions=False)


def test_only_processes_of_the_script_are_watched():
    from concurrent.futures.process import _process_worker

    from torch.utils.data._utils.worker import _worker_loop

    from foretell.pytorch.intake.watch import _is_own

    assert _is_own(test_only_processes_of_the_script_are_watched)
    assert not _is_own(_worker_loop)
    assert not _is_own(_process_worker)
    assert not _is_own(None)
