"""Text that reads back as the same graph, and errors that name the line."""

import random
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretell.errors import ForetellError, GraphError, InputError
from foretell.graph import Builder, Graph, Names, assemble, edges, parse, text
from foretell.graph.graph import COLUMNS, BufferKind, Kind, LaneKind, WaitKind
from foretell.graph.text import POSITIONAL
from tests.graph.golden import HEAD, graph, lines, same
from tests.graph.odd import TEXTS, assert_same, odd_graphs

EVERYTHING = """\
foretell graph 1
history "amp:dtype=bf16"
history "faster:op=gemm"
fact measured 0.0123
fact "two words" [1, "a  b", {"c": null}]
lane 0 = host "thread 1" of rank 0 ordered
lane 1 = compute "stream 7" of rank 0 ordered
lane 2 = comm "nccl" of rank 1 free
link 0 = "ib" capacity 25000000000.0
%0 = host cudaLaunchKernel on 0 for 1e-05
%1 = kernel gemm "fc1" on 1 for 0.00125 after %0+1e-06:launch gap=0.5 flops=1000000000.0 \
bytes=1024.0 layer="net.fc1" phase=forward dtype=tf32 shape="m=1,n=2" source=measured sigma=0.25
%2 = collective all_reduce on 1,2 for 0.002 after %0 %1:event uses 0*12500000000.0 \
comm_bytes=4096.0 priority=-1 group="0-1" micro_batch=3
%3 = sync "" on -,2 for 0.0 drains 0,1 rank=1 order=-5
buffer 4096.0 activation "x" of rank 0 from %1 to %2
buffer 0.0 other "" of rank 1
"""


def test_every_clause_reads_back():
    made = parse(EVERYTHING)
    assert str(made) == EVERYTHING == text(made)
    assert_same(parse(str(made)), made)
    assert made.history == ("amp:dtype=bf16", "faster:op=gemm")
    assert made.facts["two words"] == [1, "a  b", {"c": None}]
    assert made[3].lanes == (2,)
    assert made[3].lane == -1
    assert str(made[1]) == EVERYTHING.splitlines()[10]


def test_what_may_be_left_out():
    short = """
        # a comment
        %0 = sync after %1

        %1 = host for 2
        %2 = kernel gemm flops=1e3
        %3 = kernel rank=1
        """
    same(
        lines(graph(short)),
        """
        %0 = sync "" for 0.0 after %1
        %1 = host "" for 2.0
        %2 = kernel gemm for 0.0 flops=1000.0
        %3 = kernel "" for 0.0 rank=1
        """,
    )


def test_line_ends_of_other_systems():
    assert parse(EVERYTHING.replace("\n", "\r\n")).fingerprint() == parse(EVERYTHING).fingerprint()


def test_every_kind_the_papers_need():
    make = Builder()
    lanes = [make.lane(f"{kind}", rank=r, kind=kind) for r, kind in enumerate(["compute"] * 4)]
    ops = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
    make.task(kind="load", op="load")
    for kind in ("host", "kernel", "copy"):
        make.task(kind=kind, op=kind, lane=0)
    for op in ops:
        make.task(kind="collective", op=op, lanes=lanes, group="0-3", comm_bytes=8)
    make.task(kind="send", op="send", lanes=lanes[:2])
    make.task(kind="sync", op="sync", drains=lanes)
    made = make.graph()
    assert_same(parse(str(made)), made)
    assert {made[i].kind for i in range(made.size)} == {k.name.lower() for k in Kind}
    assert made[5].lanes == (0, 1, 2, 3)
    assert made.select(kind="collective", op=ops).tolist() == list(range(4, 10))


def test_every_word_of_every_code():
    make = Builder()
    for kind in LaneKind:
        make.lane(kind.name, kind=kind.name.lower())
    make.task()
    for wait in WaitKind:
        make.task(after=[])
        make.wait(int(wait) + 1, 0, kind=wait.name.lower())
    for kind in BufferKind:
        make.buffer(1.0, kind=kind.name.lower())
    for name, spec in COLUMNS.items():
        for word in spec.words or ():
            make.task(**{name: word.name.lower()})
    made = make.graph()
    assert_same(parse(str(made)), made)


def test_unspoken_columns_are_zero_by_default():
    """The text leaves out zeros, so nothing else may be what a column says by itself."""
    assert {c for c, spec in COLUMNS.items() if spec.default != 0} <= {"lane"} <= set(POSITIONAL)


def test_the_order_of_some_is_that_of_the_others_too():
    """A place is written where it is not the task's number, and read as that where it is not."""
    made = graph("%0 = host\n%1 = host order=7\n%2 = host\n")
    assert made.order.tolist() == [0, 7, 2]
    assert_same(parse(str(made)), made)


@settings(max_examples=60, deadline=None)
@given(odd_graphs())
def test_text_reads_back(graph):
    again = parse(str(graph))
    assert_same(again, graph)
    assert str(again) == str(graph)
    assert str(graph).count("\n") == len(str(graph).splitlines())  # for any reader of lines


@settings(max_examples=60, deadline=None)
@given(TEXTS)
@example("\u2028")
def test_any_string_is_one_line(string):
    make = Builder()
    make.lane(string)
    make.task(op=string, name=string, layer=string, lane=0)
    made = make.graph(**{"key": string, string: 1})
    assert len(str(made).split("\n")) == len(made.facts) + 4
    assert_same(parse(str(made)), made)


def test_fingerprints_do_not_depend_on_how_a_graph_was_made():
    alone = edges(1, [], [])
    one = assemble(1, {"op": [1], "name": [2]}, alone, names=Names(["", "x", "y"]))
    other = assemble(1, {"op": [3], "name": [2]}, alone, names=Names(["", "z", "y", "x"]))
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint() != assemble(1, {"op": [2]}, alone, names=one.names).fingerprint()
    with one.edit("signed") as edit:
        edit.set(0, flops=1, layer="gone")
        edit.set(0, flops=0, layer="")
        edit.fact(a=1)
    assert edit.graph.fingerprint() == one.fingerprint()
    assert (
        Graph(1, {"flops": np.zeros(1)}, alone).fingerprint() == Graph(1, {}, alone).fingerprint()
    )


def test_fingerprints_tell_graphs_apart():
    base = parse(EVERYTHING)
    changes = [
        lambda e: e.scale(1, 1 + 1e-15),
        lambda e: e.set(1, name="fc2"),
        lambda e: e.set(0, name="fc1"),
        lambda e: e.wait(3, 0),
        lambda e: e.wait(1, 0, lag=1.0),
        lambda e: e.hold(0, 2),
        lambda e: e.drain(0, 1),
        lambda e: e.use(0, 0, 1.0),
        lambda e: e.buffer(1.0),
        lambda e: e.lane("new"),
        lambda e: e.link("new", 1.0),
        lambda e: e.insert(),
        lambda e: e.remove(3),
        lambda e: e.reorder(1, after=0),
        lambda e: e.set(1, gap=0.25),
    ]
    found = {base.fingerprint()}
    for change in changes:
        with base.edit() as edit:
            change(edit)
        found.add(edit.graph.fingerprint())
    assert len(found) == len(changes) + 1


# What cannot be read


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%1 = host", "numbered in order: expected `%0"),
        ("%0 host", "expected `%0 = KIND"),
        ("%0", "expected `%0 = KIND"),
        ("%0 = hots", "did you mean `host`"),
        ("%0 =", "cannot read"),
        ("%0 = host on", "cannot read"),
        ("%0 = host on x", "`x` is not a lane"),
        ("%0 = host on 0,0", "0,0 names one twice"),
        ("%0 = host on 0 on 1", "`on` is given twice"),
        ("%0 = host for soon", "cannot read"),
        ("%0 = host for 1 for 2", "`for` is given twice"),
        ("%0 = host after", "`after` names no task"),
        ("%0 = host after 1", "`after` names no task"),
        ("%0 = host after %x", "`x` is not a task"),
        ("%0 = host after %0+y", "cannot read"),
        ("%0 = host after %0:because", "unknown waitkind: `because`"),
        ("%0 = host after %-1", "`-1` is not a task"),
        ("%0 = host uses 0", "cannot read"),
        ("%0 = host uses 0*1,0*2", "0,0 names one twice"),
        ("%0 = host drains 1,1", "1,1 names one twice"),
        ("%0 = host rank=1 rank=2", "`rank` is given twice"),
        ("%0 = host rank=1.5", "`1.5` is not a value of `rank`"),
        ("%0 = host rank=99999999999", "`99999999999` is not a value of `rank`"),
        ("%0 = host rank=١", "is not a value of `rank`"),
        ("%0 = host order=" + "9" * 5000, "is not a value of `order`"),
        ("%0 = host flop=1", "did you mean `flops`"),
        ("%0 = host seconds=1", "unknown column: `seconds`"),
        ("%0 = host layer=5", "`5` is not a string"),
        ("%0 = host layer=x", "cannot read"),
        ("%0 = host phase=never", "unknown phase: `never`"),
        ('%0 = host op "name" rest', "`rest` is not column=value"),
        ('%0 = host "op', "is a quote open?"),
        ('%0 = host "op"x', "is a quote open?"),
        ('lane 0 = host "x" of rank 0 orderly', "expected `lane N"),
        ('lane 0 = host "x" of rank 0', "expected `lane N"),
        ('lane 1 = host "x" of rank 0 free', "this is lane 0"),
        ('lane 0 = host "x" of rank -1 free', "`-1` is not a rank"),
        ("lane 0 = host 7 of rank 0 free", "`7` is not a string"),
        ('lane 0 = ghost "x" of rank 0 free', "did you mean `host`"),
        ('link 0 = "x" size 5', "expected `link N"),
        ('link 1 = "x" capacity 5', "this is link 0"),
        ('buffer 1 other "x" of rank 0 until %0', "expected `buffer BYTES"),
        ('buffer 1 other "x" of rank 0 to %0 from %0', "expected `buffer BYTES"),
        ('buffer 1 others "x" of rank 0', "did you mean `other`"),
        ("fact x", "expected `fact NAME JSON`"),
        ("fact x {", "cannot read"),
        ("fact x " + "[" * 100_000, "cannot read"),
        ('fact x 1\nfact "x" 2', "fact `x` is given twice"),
        ("history 5", "`5` is not a string"),
        ("history", 'expected `history "SPEC"`'),
        ("histori x", "did you mean `history`"),
    ],
)
def test_the_line_is_named(line, words):
    with pytest.raises(InputError) as error:
        parse(f"{HEAD}\n\n{line}\n", where="some.txt")
    number = 3 + line.count("\n")
    assert error.value.message.startswith(f"some.txt, line {number}: ")
    assert words in str(error.value)
    assert len(error.value.message) < 200


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("%0 = host after %0", "wait on each other"),
        ("%0 = host after %7", "%0 waits for %7"),
        ("%0 = host on 0", "the lane does not exist"),
        ("%0 = host for -1", "below 0"),
        ("%0 = host for nan", "not a finite number"),
        ("%0 = host for inf", "not a finite number"),
        ("%0 = host uses 0*1.0", "which does not exist (0 links)"),
        ('link 0 = "x" capacity 0', "not a positive number"),
        ('buffer -1 other "x" of rank 0', "a buffer has -1.0 bytes"),
        ('buffer 1 other "x" of rank 0 from %3', "`born` is task %3"),
        ('lane 0 = host "x" of rank 0 free\n%0 = host drains 0', "no issue order"),
        ('lane 0 = host "x" of rank 0 free\n%0 = host on 0 drains 1', "which does not exist"),
    ],
)
def test_the_file_of_a_broken_graph_is_named(rest, words):
    with pytest.raises(GraphError) as error:
        parse(f"{HEAD}\n{rest}\n", where="some.txt")
    assert error.value.message.startswith("some.txt: ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("head", "hint"),
    [
        ("", "is it a graph?"),
        ("{}", "is it a graph?"),
        ("foretell graph 2", "of another version: `foretell graph 2`"),
        ("foretell graph", "of another version"),
        ("\ufeffforetell graph 1", "is it a graph?"),
    ],
)
def test_another_beginning(head, hint):
    with pytest.raises(InputError, match=r"some\.txt, line 1: does not begin") as error:
        parse(f"{head}\n%0 = host\n", where="some.txt")
    assert hint in error.value.hint


PIECES = [
    *EVERYTHING.split(),
    "%9",
    "nan",
    "-1",
    "1e999",
    '"',
    "\\",
    "\x00",
    "=",
    ":",
    "é",
    "9" * 30,
]


@settings(max_examples=250, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_mutated_text_is_refused_or_read(rng, times):
    """Whatever becomes of a text, the answer is a graph or one of our errors."""
    mutated = EVERYTHING
    for _ in range(times):
        mutated = _mutated(mutated, rng)
    found = outcome(mutated)
    if isinstance(found, InputError):
        assert re.match(r"m.txt, line \d+: ", found.message)
    elif isinstance(found, ForetellError):
        assert found.message.startswith("m.txt: ")
    else:
        assert_same(parse(str(found)), found)


def outcome(source: str) -> Graph | ForetellError:
    """The graph of a text, or the error it meets; any other exception is a bug."""
    try:
        return parse(source, where="m.txt")
    except ForetellError as error:
        return error


def test_mutations_have_every_outcome():
    """Or the test above would prove less than it says."""
    rng = random.Random(0)
    found = [type(outcome(_mutated(EVERYTHING, rng))) for _ in range(300)]
    assert min(map(found.count, (Graph, InputError, GraphError))) > 3


def _mutated(source: str, rng: random.Random) -> str:
    at = rng.randrange(len(source) + 1)
    to = min(len(source), at + rng.randrange(1, 12))
    piece = rng.choice(PIECES)
    tokens = source.split(" ")
    k = rng.randrange(len(tokens))
    digits = [m.start() for m in re.finditer(r"\d", source)] or [0]
    d = rng.choice(digits)
    return rng.choice(
        [
            source[:at] + source[to:],
            source[:at],
            source[:at] + piece + source[at:],
            source[:at] + chr(rng.choice([0, 10, 34, 37, 0x2028, 0x10FFFF])) + source[to:],
            " ".join([*tokens[:k], piece, *tokens[k + 1 :]]),
            " ".join([*tokens[:k], *tokens[k + 1 :]]),
            source[:at] + source[at:to] + source[at:],
            source[:d] + rng.choice("0123456789-") + source[d + 1 :],
            source[:d] + rng.choice(["4", "99", "-", "e300", ".5"]) + source[d:],
        ]
    )


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_after_the_first_line(rest):
    found = outcome(f"{HEAD}\n{rest}")
    assert isinstance(found, Graph) or found.message.startswith("m.txt")


def test_a_fact_that_cannot_be_written():
    made = graph("%0 = host\n")
    with made.edit() as edit:
        edit.fact(sizes=np.arange(3), one=np.float32(0.5))
    assert "fact sizes [0, 1, 2]\nfact one 0.5" in str(edit.graph)
    with made.edit() as edit:
        edit.fact(odd=object())
    with pytest.raises(GraphError, match="fact `odd` is a object that cannot be written"):
        str(edit.graph)


def test_lines_are_made_one_by_one_for_large_graphs():
    make = Builder()
    make.lane("s")
    for i in range(2000):
        make.task(kind="kernel", op="gemm", lane=0, seconds=0.1, after=[i - 1] if i else [])
    made = make.graph()
    assert (
        str(made[1999])
        == str(made).splitlines()[-1]
        == "%1999 = kernel gemm on 0 for 0.1 after %1998"
    )
