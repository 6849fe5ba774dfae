"""Bytes from files, archives and folders, and what is said of those that are broken."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard

from foretell.errors import InputError
from foretell.trace import read
from foretell.trace.source import members
from tests.trace.kineto import Kineto, training_step


@pytest.fixture
def text() -> bytes:
    k = Kineto()
    training_step(k)
    return k.text().encode()


def tasks(path: Path) -> int:
    return read(path).graph.size


def test_plain_gzip_and_zstd_are_recognised_by_their_bytes(tmp_path: Path, text: bytes) -> None:
    packed = [text, gzip.compress(text), zstandard.compress(text)]
    paths = [tmp_path / f"trace{k}.json" for k in range(3)]  # the name does not tell
    for path, data in zip(paths, packed, strict=True):
        path.write_bytes(data)
    assert len({tasks(p) for p in paths}) == 1
    assert tasks(paths[0]) > 10


def test_archives_hold_one_trace_a_member(tmp_path: Path, text: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("rank0.json", text)
        archive.writestr("notes.txt", b"not a trace")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as packed:
        for name, data in (("x/rank0.json", text), ("x/._rank0.json", b"\0\5")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            packed.addfile(entry, io.BytesIO(data))
    assert tasks(tmp_path / "a.zip") == tasks(tmp_path / "a.tar.gz") > 10
    assert [m.name[-10:] for m in members(tmp_path / "a.tar.gz")] == ["rank0.json"]


def test_several_gzip_parts_are_one_file(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text[:500]) + gzip.compress(text[500:]))
    assert tasks(path) > 10


def test_a_file_cut_short_is_said_to_be(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text)[:-40])
    with pytest.raises(InputError, match=r"t\.json\.gz.*cannot be read beyond byte"):
        read(path)


@pytest.mark.parametrize("name", ["missing.json", "empty"])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"cannot read|no trace in the folder"):
        read(tmp_path / name)


def test_a_broken_archive(tmp_path: Path, text: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("rank0.json", text)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[60:90] = b"\xff" * 30  # inside the member: its checksum no longer fits
    (tmp_path / "b.zip").write_bytes(data)
    with pytest.raises(InputError):
        read(tmp_path / "b.zip")
