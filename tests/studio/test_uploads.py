"""Files from a browser: what is refused, and that nothing is left behind."""

import gzip
import io
import random
import zipfile

import pytest

from foretell.errors import InputError
from foretell.studio import uploads
from foretell.studio.uploads import check, display_name, ending, receive


def kept(raw, name, folder, most=uploads.MOST):
    return receive(io.BytesIO(raw).read, name, folder, most)


def test_a_file_is_kept_under_a_name_of_our_own(tmp_path):
    path = kept(b"{}", "../../etc/passwd.json", tmp_path)
    assert path.parent == tmp_path
    assert path.name.startswith("upload-")
    assert path.read_bytes() == b"{}"


@pytest.mark.parametrize(
    "name", ["x.exe", "x", "", "x.json/../../y", "trace.json\x00.sh", "a.html", ".bashrc"]
)
def test_endings_that_are_not_read(name, tmp_path):
    with pytest.raises(InputError, match="none of the files"):
        kept(b"{}", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_names_are_shown_without_paths_or_signs():
    assert display_name("C:\\temp\\x.json") == "x.json"
    assert display_name("/a/b/<b>x</b>\n.json") == "b>.json"
    assert display_name("\x00\x01") == "unnamed"
    assert len(display_name("x" * 500)) == 80
    assert ending("A.JSON.GZ") == ".json.gz"


def test_too_long_is_refused_while_it_arrives(tmp_path):
    read = []

    def endless(size):
        read.append(size)
        return b"x" * size

    with pytest.raises(InputError, match="more than 8 MiB"):
        receive(endless, "x.json", tmp_path, 8 << 20)
    assert len(read) <= 9
    assert list(tmp_path.iterdir()) == []


def test_empty_is_refused(tmp_path):
    with pytest.raises(InputError, match="is empty"):
        kept(b"", "x.json", tmp_path)


def test_a_bomb_in_gzip_is_refused(tmp_path, monkeypatch):
    bomb = gzip.compress(bytes(30 << 20))
    assert len(bomb) < 1 << 17
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(bomb)
    with pytest.raises(InputError, match="unpacks to more than"):
        check(path, "bomb.json.gz", most=10 << 20)
    check(path, "bomb.json.gz", most=40 << 20)


def zipped(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return out.getvalue()


def test_bombs_in_zip_are_refused_also_packed_twice(tmp_path):
    plain = zipped(**{"a.json": bytes(20 << 20)})
    twice = zipped(**{"a.json.gz": gzip.compress(bytes(20 << 20))})
    many = zipped(**{f"{k}.json": bytes(4 << 20) for k in range(4)})
    for k, raw in enumerate((plain, twice, many)):
        path = tmp_path / f"{k}.zip"
        path.write_bytes(raw)
        with pytest.raises(InputError, match="unpacks to more than"):
            check(path, "x.zip", most=10 << 20)


@pytest.mark.parametrize(
    "inside", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "..\\evil.json"]
)
def test_paths_in_zip_are_refused(inside, tmp_path):
    with pytest.raises(InputError, match="outside itself"):
        kept(zipped(**{inside: b"{}"}), "x.zip", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_many_files_in_zip_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "MOST_MEMBERS", 3)
    with pytest.raises(InputError, match="has 4 files"):
        kept(zipped(**{f"{k}.json": b"{}" for k in range(4)}), "x.zip", tmp_path)


def test_damaged_gzip_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be unpacked"):
        kept(gzip.compress(b"x" * 10_000)[:-20], "x.json.gz", tmp_path)


def damaged():
    """Zips of which one byte or more is not as it was, and one that asks for a password."""
    draw = random.Random(0)
    raw = zipped(**{"a.json": b'{"traceEvents": []}' * 50, "b.json": b"{}"})
    secret = bytearray(raw)
    for at in (6, raw.rindex(b"PK\x01\x02") + 8, raw.index(b"PK\x01\x02") + 8):
        secret[at] |= 1
    yield bytes(secret)
    for _ in range(300):
        found = bytearray(raw)
        for _ in range(draw.randint(1, 4)):
            found[draw.randrange(len(found))] = draw.randrange(256)
        yield bytes(found)


def test_damaged_zip_is_sound_or_refused(tmp_path):
    refused = 0
    for raw in damaged():
        path = tmp_path / "x.zip"
        path.write_bytes(raw)
        try:
            check(path, "x.zip")
        except InputError:
            refused += 1
    assert refused > 100
