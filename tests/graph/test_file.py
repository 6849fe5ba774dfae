"""The file form: reads back to the bit, and whatever is wrong with a file is one clear error."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.errors import ForetellError, GraphError, InputError
from foretell.graph import Graph, assemble, edges, load, parse, save
from foretell.graph import file as form
from tests.graph.odd import assert_same, odd_graphs
from tests.graph.test_text import EVERYTHING

QUIET = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> bytes:
    """The bytes of a graph that has a bit of everything."""
    path = tmp_path_factory.mktemp("stored") / "x.graph"
    save(parse(EVERYTHING), path)
    return path.read_bytes()


def loaded(raw: bytes, folder: Path) -> Graph | ForetellError:
    """The graph in these bytes, or the error it meets; any other exception is a bug."""
    path = folder / "try.graph"
    path.write_bytes(raw)
    try:
        return load(path)
    except ForetellError as error:
        return error


@QUIET
@given(graph=odd_graphs())
def test_files_and_text_read_back(graph, tmp_path):
    save(graph, tmp_path / "x.graph")
    save(graph, tmp_path / "x.txt")
    binary, words = load(tmp_path / "x.graph"), load(tmp_path / "x.txt")
    assert_same(binary, graph)
    assert_same(words, graph)
    assert str(binary) == str(graph) == (tmp_path / "x.txt").read_text()
    save(words, tmp_path / "y.graph")
    assert_same(parse(str(load(tmp_path / "y.graph"))), graph)
    assert list(binary.names) == list(graph.names)


def test_an_empty_graph(tmp_path):
    save(Graph(), tmp_path / "x.graph")
    assert_same(load(tmp_path / "x.graph"), Graph())


def test_the_same_graph_gives_the_same_bytes(stored, tmp_path):
    save(load_of(stored, tmp_path), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == stored


def load_of(raw: bytes, folder: Path) -> Graph:
    found = loaded(raw, folder)
    assert isinstance(found, Graph)
    return found


def test_what_is_read_cannot_be_written_to(stored, tmp_path):
    made = load_of(stored, tmp_path)
    for array in (made.seconds, made.edges.after, made.lanes.rank, made.held.task):
        assert not array.flags.writeable


def test_a_file_is_smaller_than_its_columns(tmp_path):
    size = 20_000
    seconds, chain = np.round(np.random.default_rng(0).random(size), 3), np.arange(size - 1)
    made = assemble(size, {"seconds": seconds}, edges(size, chain + 1, chain))
    save(made, tmp_path / "x.graph")
    whole = sum(array.nbytes for array in (seconds, made.edges.start, made.edges.after))
    assert os.path.getsize(tmp_path / "x.graph") < whole / 3


# Damage


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3, 0.6, 0.9, 0.999])
def test_cut_short(stored, tmp_path, share):
    found = loaded(stored[: int(len(stored) * share)], tmp_path)
    assert isinstance(found, InputError)
    assert found.hint


def test_cut_anywhere(stored, tmp_path):
    for length in range(0, len(stored), 7):
        assert isinstance(loaded(stored[:length], tmp_path), InputError), length


def test_more_at_the_end(stored, tmp_path):
    found = loaded(stored + b"\0", tmp_path)
    assert isinstance(found, InputError)
    assert "damaged" in found.message


def test_a_flipped_bit_is_found_out(stored, tmp_path):
    """No flip gives a graph, right or wrong; the error is ours."""
    for at in [*range(60), *range(60, len(stored), 5)]:
        raw = bytearray(stored)
        raw[at] ^= 1 << (at % 8)
        assert isinstance(loaded(bytes(raw), tmp_path), InputError), at


def resealed(body: bytes) -> bytes:
    """A file with a right digest, as somebody could make it on purpose."""
    return form.MAGIC + hashlib.blake2b(body, digest_size=16).digest() + body


def body_of(raw: bytes) -> bytes:
    return raw[len(form.MAGIC) + 16 :]


@QUIET
@given(st.data())
def test_damage_with_a_right_digest(stored, tmp_path, data):
    """Without the digest to find it out: a graph that verifies or one of our errors."""
    body = bytearray(body_of(stored))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    found = loaded(resealed(bytes(body)), tmp_path)
    if isinstance(found, Graph):
        form.verify(found)
    else:
        assert "try.graph" in found.message


def with_header(stored: bytes, change) -> bytes:
    """The file with another header and the same frames."""
    body = body_of(stored)
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(zstandard.ZstdDecompressor().decompress(body[8:end]))
    change(header)
    packed = zstandard.ZstdCompressor().compress(json.dumps(header).encode())
    return resealed(len(packed).to_bytes(8, "little") + packed + body[end:])


def entry(header, name):
    return next(a for a in header["arrays"] if a[0] == name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.clear(), "damaged"),
        (lambda h: h.update(size=-1), "damaged"),
        (lambda h: h.update(size=1.5), "damaged"),
        (lambda h: h.update(size=True), "damaged"),
        (lambda h: h.update(size=2**80), "damaged"),
        (lambda h: h.update(size=h["size"] + 1), "has 4 values for 5 tasks"),
        (lambda h: h.update(names=["x"]), "damaged"),
        (lambda h: h.update(names=["", 1]), "damaged"),
        (lambda h: h.update(names=["", "a", "a"]), "kept twice"),
        (lambda h: h.update(names=[""]), "stands for nothing"),
        (lambda h: h.update(history="x"), "damaged"),
        (lambda h: h.update(facts=[]), "damaged"),
        (lambda h: h.update(arrays={}), "damaged"),
        (lambda h: h["arrays"].append(["column.new", "<f8", 0, 0]), "damaged"),
        (lambda h: h["arrays"].append(["column.gap", "<f8", 0, 0]), "damaged"),
        (lambda h: h["arrays"].pop(), "damaged"),
        (lambda h: entry(h, "column.seconds").__setitem__(1, "<f4"), "damaged"),
        (lambda h: entry(h, "column.seconds").__setitem__(1, "|O"), "damaged"),
        (lambda h: entry(h, "column.seconds").__setitem__(2, 3), "damaged"),
        (lambda h: entry(h, "column.seconds").__setitem__(2, -1), "damaged"),
        (lambda h: entry(h, "column.seconds").__setitem__(3, 2**61), "damaged"),
        (lambda h: entry(h, "column.seconds").__setitem__(2, 2**61), "GiB are free"),
    ],
)
def test_headers_made_on_purpose(stored, tmp_path, change, words):
    found = loaded(with_header(stored, change), tmp_path)
    assert isinstance(found, ForetellError)
    assert words in str(found)
    assert "try.graph" in found.message


def test_a_part_that_is_not_there(stored, tmp_path):
    body = body_of(stored)
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(zstandard.ZstdDecompressor().decompress(body[8:end]))
    last = header["arrays"].pop()
    packed = zstandard.ZstdCompressor().compress(json.dumps(header).encode())
    raw = len(packed).to_bytes(8, "little") + packed + body[end : len(body) - last[3]]
    found = loaded(resealed(raw), tmp_path)
    assert "lacks a part of a graph: 'buffers.kind'" in str(found)


@pytest.mark.parametrize(
    "header",
    [b"", b"not json", b"[" * 100_000, b"\xff\xfe", b"{}" * 2, b"[1]", b"{}", b"null", b"1"],
)
def test_headers_that_are_none(tmp_path, header):
    packed = zstandard.ZstdCompressor().compress(header)
    found = loaded(resealed(len(packed).to_bytes(8, "little") + packed), tmp_path)
    assert isinstance(found, InputError)


@pytest.mark.parametrize("length", [0, 1, 2**30, 2**63, 2**64 - 1])
def test_absurd_lengths(stored, tmp_path, length):
    raw = length.to_bytes(8, "little") + body_of(stored)[8:]
    assert isinstance(loaded(resealed(raw), tmp_path), InputError)


def test_a_frame_that_says_it_is_huge(tmp_path):
    """A header of a few bytes that claims to unfold to more than there is."""
    frame = b"\x28\xb5\x2f\xfd" + b"\xe0" + (2**60).to_bytes(8, "little") + b"\x01\x00\x00"
    found = loaded(resealed(len(frame).to_bytes(8, "little") + frame), tmp_path)
    assert isinstance(found, InputError)
    assert "GiB are free" in found.message


def test_a_broken_graph_names_its_file(stored, tmp_path):
    broken = load_of(stored, tmp_path).edit()
    broken.set(0, seconds=-1.0)
    save(broken.commit(check=False), tmp_path / "bad.graph")
    with pytest.raises(GraphError, match=r"bad\.graph`: `seconds` is below 0"):
        load(tmp_path / "bad.graph")


# Other files


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is empty"),
        (b"{}", "does not begin with"),
        (b"\x1f\x8b\x08\x00", "neither a graph nor text"),
        (b"foretell-graph\n", "version ``"),
        (b"foretell-graph 2\n" + b"x" * 100, "version `2`; this foretell reads version 1"),
        (b"foretell-graph 11\n" + b"x" * 100, "version `11`"),
        (b"foretell-graph 1\n", "damaged"),
        (b"foretell graph 2\n", "line 1: does not begin with `foretell graph 1`"),
        (b"foretell graph 1\n\xff", "neither a graph nor text"),
        (b"foretell graph 1\n%0 = x", "line 2"),
    ],
)
def test_not_a_graph(tmp_path, raw, words):
    found = loaded(raw, tmp_path)
    assert isinstance(found, InputError)
    assert words in found.message
    assert "try.graph" in found.message
    assert found.hint


def test_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "missing", tmp_path / "x" / "y", "a\0b"):
        with pytest.raises(InputError, match="cannot read"):
            load(path)
    with pytest.raises(InputError, match="cannot read"):
        form.is_graph_file(tmp_path)


def test_what_begins_like_a_graph(stored, tmp_path):
    for raw, is_graph in (
        (stored, True),
        (EVERYTHING.encode(), True),
        (b"{}", False),
        (b"", False),
    ):
        (tmp_path / "x").write_bytes(raw)
        assert form.is_graph_file(tmp_path / "x") is is_graph


def test_more_than_memory_has_room_for(stored, tmp_path, monkeypatch):
    path = tmp_path / "x.graph"
    for raw in (stored, EVERYTHING.encode()):
        path.write_bytes(raw)
        load(path)
        monkeypatch.setattr(form, "free_memory", lambda: 100.0)
        with pytest.raises(InputError, match="GiB are free") as error:
            load(path)
        assert "more memory" in error.value.hint
        monkeypatch.undo()


def test_running_out_of_memory_is_no_traceback(stored, tmp_path, monkeypatch):
    def full(*_):
        raise MemoryError

    (tmp_path / "x.graph").write_bytes(stored)
    monkeypatch.setattr(form, "_read", full)
    with pytest.raises(InputError, match="more memory than there is"):
        load(tmp_path / "x.graph")


def test_facts_in_files(tmp_path):
    with parse(EVERYTHING).edit() as edit:
        edit.fact(sizes=np.arange(2), near=float("inf"))
    save(edit.graph, tmp_path / "x.graph")
    assert load(tmp_path / "x.graph").facts["sizes"] == [0, 1]
    assert load(tmp_path / "x.graph").facts["near"] == float("inf")
    with parse(EVERYTHING).edit() as edit:
        edit.fact(odd={1, 2})
    for name in ("y.graph", "y.txt"):
        with pytest.raises(GraphError, match="fact `odd` is a set"):
            save(edit.graph, tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.graph"]
