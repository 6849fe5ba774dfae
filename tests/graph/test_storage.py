"""A whole file or none."""

import errno
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from foretell import io as storage
from foretell.errors import InputError
from foretell.graph import load, save
from foretell.io import free_memory, write_atomically
from tests.graph.golden import graph

OLD = b"what was there"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken(), KeyboardInterrupt(), MemoryError()])
def test_a_write_that_fails_midway_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "x.graph"
    path.write_bytes(OLD)

    def fail(file):
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, fail)
    assert path.read_bytes() == OLD
    assert names(tmp_path) == ["x.graph"]


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_full_disk_is_one_clear_message(tmp_path, monkeypatch, step):
    path = tmp_path / "x.graph"
    path.write_bytes(OLD)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage.os, step, full)
    with pytest.raises(InputError, match="No space left on device") as error:
        save(graph("%0 = host\n"), path)
    assert "is there room" in error.value.hint
    assert path.read_bytes() == OLD
    assert names(tmp_path) == ["x.graph"]


def test_places_that_are_read_only(tmp_path):
    made = graph("%0 = host\n")
    (tmp_path / "plain").write_bytes(OLD)
    for path in (
        tmp_path,  # a folder
        tmp_path / "missing" / "x.graph",
        tmp_path / "plain" / "x.graph",
        tmp_path / ("x" * 300),
    ):
        with pytest.raises(InputError, match="cannot write"):
            save(made, path)
    assert names(tmp_path) == ["plain"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission denied"):
        save(graph("%0 = host\n"), tmp_path / "x.graph")
    tmp_path.chmod(0o700)


def test_a_folder_that_refuses(tmp_path, monkeypatch):
    """As without permission, also where the tests run as root."""

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(InputError, match="Permission denied"):
        save(graph("%0 = host\n"), tmp_path / "x.graph")


def test_permissions_are_those_of_any_new_file(tmp_path):
    save(graph("%0 = host\n"), tmp_path / "x.graph")
    (tmp_path / "plain").write_bytes(OLD)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("x.graph", "plain")]
    assert modes[0] == modes[1]


def test_through_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "x.graph")
    save(graph("%0 = host\n"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "folder" / "x.graph").size == 1


def test_a_pipe_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    save(graph("%0 = host\n"), pipe)
    reader.join(timeout=10)
    assert got[0].startswith(b"foretell-graph")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_free_memory(tmp_path, monkeypatch):
    assert free_memory() > 0
    limit, taken = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(storage, "_LIMIT", limit)
    monkeypatch.setattr(storage, "_TAKEN", taken)
    without = free_memory()
    limit.write_text("1000\n")
    taken.write_text("400\n")
    assert free_memory() == 600
    limit.write_text("max\n")
    assert free_memory() == pytest.approx(without, rel=0.5)
