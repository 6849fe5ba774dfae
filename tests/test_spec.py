"""Specs: what is written parses back to an equal object; what cannot be read says why."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretell.errors import InputError
from foretell.spec import Spec, options, parse, read, split, write


@dataclass(frozen=True)
class Many(Spec):
    """One field of every type."""

    name: ClassVar[str] = "many"
    count: int = 1
    times: float = 2.0
    is_on: bool = False
    op: str = ""
    dtype: Literal["bf16", "fp16", "none"] = "bf16"
    level: Literal[1, 2, 4] = 1
    bucket: float | None = None
    label: str | None = None
    ranks: tuple[int, ...] = ()
    words: tuple[str, ...] = ("a", "b")
    rates: tuple[float, ...] = ()
    pair: tuple[int, str] = (0, "x")
    size: int | str = 0
    sizes: tuple[int, ...] = field(default_factory=lambda: (1, 2))


@dataclass(frozen=True)
class Needs(Spec):
    name: ClassVar[str] = "needs"
    op: str
    ranks: int
    times: float = 2.0


KINDS = {"many": Many, "needs": Needs}


def again(spec: Spec) -> Spec:
    return parse(str(spec), KINDS, "what-if")


WHOLE = st.integers(-(2**53), 2**53)  # what a spec can hold
WORDS = st.text(max_size=6) | st.sampled_from(
    [
        "a:b",
        "a=b",
        "a,b",
        "a+b",
        "+",
        "%",
        "%2C",
        "100%",
        " a ",
        "none",
        "None",
        "NONE",
        "\n",
        "é",
        "*",
    ]
)
FLOATS = st.floats(allow_nan=False) | st.sampled_from([1e15, 1e16, 1e22, 0.1, -0.0, 1e-5, 3.0])


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Many,
        count=WHOLE,
        times=FLOATS,
        is_on=st.booleans(),
        op=WORDS,
        dtype=st.sampled_from(["bf16", "fp16", "none"]),
        level=st.sampled_from([1, 2, 4]),
        bucket=st.none() | FLOATS,
        label=st.none() | WORDS,
        ranks=st.lists(WHOLE, max_size=3).map(tuple),
        words=st.lists(WORDS, max_size=3).map(tuple).filter(lambda words: words != ("",)),
        rates=st.lists(FLOATS, max_size=3).map(tuple),
        pair=st.tuples(WHOLE, WORDS),
        size=WHOLE | st.sampled_from(["big", "small"]),
        sizes=st.lists(WHOLE, max_size=2).map(tuple),
    )
)
@example(Many(label="none", words=("none",)))
def test_what_is_written_reads_back(spec):
    assert again(spec) == spec
    assert not any(c.isspace() for c in str(spec))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Many(), "many"),
        (Many(count=8), "many:count=8"),
        (Many(times=0.5, is_on=True), "many:times=0.5,is_on=yes"),
        (Many(times=3.0), "many:times=3"),
        (Many(rates=(1e20, 0.5)), "many:rates=1e20+0.5"),
        (Many(op="gemm*", label=None), "many:op=gemm*"),
        (Many(op="a:b=c"), "many:op=a:b=c"),
        (Many(op="a, b%"), "many:op=a%2C%20b%25"),
        (Many(words=("x", "c++")), "many:words=x+c%2B%2B"),
        (Many(words=()), "many:words="),
        (Many(label="none"), "many:label=%6Eone"),
        (Many(dtype="none"), "many:dtype=none"),
        (Many(bucket=25.0), "many:bucket=25"),
        (Many(sizes=(1, 2)), "many"),
        (Many(pair=(3, "y")), "many:pair=3+y"),
        (Needs("conv", 8), "needs:op=conv,ranks=8"),
    ],
)
def test_as_people_read_it(spec, text):
    assert str(spec) == text
    assert parse(text, KINDS, "what-if") == spec


def test_a_shell_leaves_a_plain_spec_alone():
    text = str(Many(count=8, times=0.5, ranks=(1, 2), op="aten::add", label="x"))
    assert shlex.split(text) == [text] == [shlex.quote(text)]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (" many ", Many()),
        ("many:", Many()),
        ("many:count=3,", Many(count=3)),
        ("many: count = 3 , times=4", Many(count=3, times=4.0)),
        ("many:is-on=on", Many(is_on=True)),
        ("many:is_on=FALSE", Many()),
        ("many:bucket=None", Many()),
        ("many:op=", Many(op="")),
        ("many:size=7", Many(size=7)),
        ("many:size=seven", Many(size="seven")),
        ("many:times=1e3", Many(times=1000.0)),
        ("many:times=inf", Many(times=float("inf"))),
        ("many:op=100%", Many(op="100%")),
        ("many:op=%zz", Many(op="%zz")),
    ],
)
def test_as_people_may_write_it(text, spec):
    assert parse(text, KINDS, "what-if") == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mani", "unknown what-if: `mani`\n\nhint: did you mean `many`?"),
        ("zzzzzz", "hint: known: many, needs"),
        ("", "empty name in spec ``"),
        (":count=1", "empty name"),
        ("many:cuont=1", "unknown option of `many`: `cuont`\n\nhint: did you mean `count`?"),
        ("many:count", "`count` in `many:count` is not `field=value`"),
        ("many:=1", "`=1` in `many:=1` is not `field=value`"),
        ("many:count=1,count=2", "`count` is given twice in `many:count=1,count=2`"),
        ("many:is-on=1,is_on=0", "`is_on` is given twice"),
        ("many:count=x", "`many` option `count` is `x`, not a whole number"),
        ("many:count=1.5", "not a whole number"),
        ("many:count=" + "9" * 5000, "not a whole number"),
        ("many:times=fast", "not a number"),
        ("many:times=nan", "`nan`, not a number"),
        ("many:bucket=x", "not a number"),
        ("many:is_on=maybe", "not yes or no"),
        ("many:dtype=bf61", "unknown value of `many` option `dtype`: `bf61`"),
        ("many:dtype=bf61", "did you mean `bf16`?"),
        ("many:level=3", "known: 1, 2, 4"),
        ("many:ranks=1+x", "not a whole number"),
        ("many:ranks=1++2", "not a whole number"),
        ("many:pair=1", "1 values, not 2"),
        ("many:pair=1+x+y", "3 values, not 2"),
        ("needs", "`needs` needs `op`, `ranks`\n\nhint: write `needs:op=…,ranks=…`"),
        ("needs:op=x", "`needs` needs `ranks`"),
    ],
)
def test_what_cannot_be_read(text, words):
    with pytest.raises(InputError) as error:
        parse(text, KINDS, "what-if")
    assert words in str(error.value)


@pytest.mark.parametrize("words", [("",), (("a",),)])
def test_what_cannot_be_written(words):
    with pytest.raises(InputError, match="cannot be written as an option"):
        str(Many(words=words))


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="manycount=:,+%2Cxé \n-_1.", max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        found = parse(text, KINDS, "what-if")
    except InputError:
        return
    assert again(found) == found


def test_parts_of_the_grammar():
    assert split("name:a=1,b-c=x=y") == ("name", {"a": "1", "b_c": "x=y"})
    assert options("") == {}
    assert options("dp=4,tp=8") == {"dp": "4", "tp": "8"}
    with pytest.raises(InputError, match="`dp` in `dp` is not"):
        options("dp")
    assert read("a/b%20c", Path, "a path") == Path("a/b c")
    assert write(np.float64(0.5)) == "0.5"
    assert write(np.int64(3)) == "3"
