"""The bounded reader, the atomic writer, and what is fit to be shown."""

import ast
import errno
import gzip
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
import zstandard

import foretell
from foretell import io
from foretell.errors import InputError

SOURCE = Path(foretell.__file__).parent


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"[" * 200 + b"]" * 200, "more than 64 levels"),
        (b"[" * 100_000, "nested too deep"),
        (b"[1e999]", "out of range"),
        (b"[NaN]", "not JSON"),
        (b"[" + b"9" * 40 + b"]", "more than 64 bits"),
        (b'["' + b"x" * 100 + b'"]', "more than 64 letters"),
        (b'{"' + b"x" * 100 + b'": 1}', "more than 64 letters"),
        (b'"\xff"', "not JSON"),
        (b"{", "not JSON"),
    ],
)
def test_json_within_limits(tmp_path, monkeypatch, raw, match):
    monkeypatch.setenv("FORETELL_MAX_STRING", "64")
    (tmp_path / "x.json").write_bytes(raw)
    with pytest.raises(InputError, match=match):
        io.read_json(tmp_path / "x.json")


def test_json_of_a_type(tmp_path):
    class Row(msgspec.Struct):
        size: int

    (tmp_path / "x.json").write_bytes(b'{"size": 3}')
    assert io.read_json(tmp_path / "x.json", Row).size == 3
    (tmp_path / "x.json").write_bytes(b'{"size": "3"}')
    with pytest.raises(InputError, match=r"x\.json.*Expected `int`"):
        io.read_json(tmp_path / "x.json", Row)


PACK = {"plain": lambda raw: raw, "gzip": gzip.compress, "zstd": zstandard.compress}


@pytest.mark.parametrize("form", PACK)
def test_bytes_are_counted_after_decompression(tmp_path, form):
    path = tmp_path / "x"
    path.write_bytes(PACK[form](bytes(5000)))
    assert io.read_bytes(path, 5000) == bytes(5000)
    with pytest.raises(InputError, match="holds more than"):
        io.read_bytes(path, 4999)


def test_a_bomb_is_recognised_by_its_ratio(monkeypatch):
    monkeypatch.setattr(io, "_LEAST_RATIO", 1000)
    count = io.Counter("x", packed=10, most=1 << 30, ratio=200)
    count.add(2000)
    with pytest.raises(InputError, match="200 times its size"):
        count.add(1)


def test_members_of_an_archive_are_counted(tmp_path, monkeypatch):
    from foretell.trace.source import members

    monkeypatch.setenv("FORETELL_MAX_MEMBERS", "2")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for k in range(3):
            archive.writestr(f"{k}.json", "[]")
    with pytest.raises(InputError, match="3 files, 2 at most"):
        members(tmp_path / "x.zip")


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null"])
def test_devices_are_refused(name):
    with pytest.raises(InputError, match="not a regular file"):
        io.read_bytes(name)


def test_pipes_and_folders_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        io.read_bytes(tmp_path / "pipe")
    with pytest.raises(InputError, match="is a folder"):
        io.read_bytes(tmp_path)


def test_no_text_is_too_odd_to_be_a_path():
    assert not io.is_there("x" * 10_000)
    assert not io.is_there("a\0b")
    with pytest.raises(InputError, match="cannot read"):
        io.open_file("x" * 10_000)


def test_a_limit_is_a_number(monkeypatch):
    monkeypatch.setenv("FORETELL_MAX_DEPTH", "deep")
    with pytest.raises(InputError, match="FORETELL_MAX_DEPTH"):
        io.limits()


def test_toml_is_read_in_linear_time():
    with pytest.raises(InputError, match="more than 100 parts"):
        io.parse_toml(".".join(["a"] * 200_000) + " = 1", "x")
    assert io.parse_toml("a.b.c = 1.5", "x") == {"a": {"b": {"c": 1.5}}}
    for text in ("a = inf", "a = nan", f"a = {2**70}"):
        with pytest.raises(InputError, match="x has a"):
            io.parse_toml(text, "x")


def test_what_is_shown_has_no_control_bytes():
    assert io.shown("a\x1b[2Jb\x07\x9b\u202e") == "a\\x1b[2Jb\\x07\\x9b\\u202e"
    assert io.shown("a\tb\nc") == "a\tb\nc"
    assert io.shown("x" * 100, 10) == "xxxxx … xxxxx"
    assert io.coloured("\x1b[1mbold\x1b[0m\x1b]0;t\x07") == "\x1b[1mbold\x1b[0m\\x1b]0;t\\x07"


def test_json_has_no_number_that_is_none():
    from foretell.cli.output import as_text

    assert as_text({"a": [float("inf"), 1.0], "b": "\x7f"}) == '{"a": [null, 1.0], "b": "\\u007f"}'


# Writing

OLD = "what was there"


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("write", [io.write_text, io.append_text])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, step, write):
    path = tmp_path / "x"
    path.write_text(OLD)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(io.os, step, full)
    with pytest.raises(InputError, match="No space left"):
        write(path, "new")
    assert path.read_text() == OLD
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


KILLED = """
import os, signal, sys
from pathlib import Path
from foretell import io
def fsync(_): os.kill(os.getpid(), signal.SIGKILL)
io.os.fsync = fsync
io.write_text(Path(sys.argv[1]), "new " * 10000)
"""


def test_a_killed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "x"
    path.write_text(OLD)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == OLD


# What may stay beside the reader and the writer: logs and boards that ranks share, /proc and /sys,
# data of the package itself, scripts of the user, and journals that grow line by line.
OWN = {"io.py", "pytorch", "cost", "compiled"}


def test_files_are_written_by_the_writer_alone():
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in OWN
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _writes(node)
    ]
    assert not found, f"use foretell.io.write_text or write_atomically: {found}"


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("write_bytes", "NamedTemporaryFile") or (
        name == "write_text" and isinstance(call.func, ast.Attribute)
    ):
        return True
    modes = [a.value for a in call.args[:2] if isinstance(a, ast.Constant)]
    return name == "open" and any(m in ("w", "wb", "a", "ab", "w+") for m in modes)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (MemoryError(), 2),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 2),
        (InputError("a\x1b[2J" + "x" * 10_000), 2),
    ],
)
def test_how_a_command_ends(monkeypatch, capsys, error, code):
    from foretell.cli import main as module

    def stop(*_, **__):
        raise error

    command = sys.modules[module.__module__]
    monkeypatch.setattr(command, "foretell", stop)
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert len(said) < 3000


def test_a_refused_line_of_a_batch_answers_its_error(tmp_path, capsys):
    import json

    from foretell.cli.main import main

    row = {"workload": "gpt:layers=2,hidden=64,heads=2,seq=32,vocab=100",
           "on": "dgx-a100:nodes=1", "plan": "dp=8,global_batch=8"}  # fmt: skip
    rows = [row, row | {"plan": "dp=9999,global_batch=8"}, row | {"workload": "no"}, {"plan": 1}]
    text = "\n".join([*map(json.dumps, rows), "{", json.dumps(row)])
    (tmp_path / "batch.jsonl").write_text(text)
    main(["predict", "--batch", str(tmp_path / "batch.jsonl"), "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["error" in one for one in found] == [False, True, True, True, True, False]
    assert found[0] == found[5]
