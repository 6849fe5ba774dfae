"""Random graphs that say odd things: any character, numbers of any size, every column."""

import numpy as np
from hypothesis import strategies as st

from foretell.graph import Graph
from foretell.graph.graph import COLUMNS
from tests.strategies import graphs

WORDS = ("on", "for", "after", "drains", "uses", "lane", "fact", "history", "kernel", "graph", "é")
SIGNS = (
    "%0",
    "#",
    "a=b",
    'x="y"',
    "\\",
    '"',
    "'",
    "[x]",
    "{",
    "-",
    "+",
    ":",
    "*",
    "%",
    "0-7",
    "名",
)
CODES = ("\x00", "\ufeff", chr(0xD800))
SPACES = ("\n", "\r", "\t", " ", "\x0b", "\x85", "\u2028", "a b", "foretell graph 1")
TEXTS = st.text(max_size=6) | st.sampled_from([*WORDS, *SIGNS, *CODES, *SPACES])
NUMBERS = st.floats(0, 1e300) | st.sampled_from([-0.0, 5e-324, 0.1, 1 / 3, 2.0**53 + 2, 1e22])
WHOLE = {np.int32: st.integers(0, 2**31 - 2), np.int64: st.integers(-(2**40), 2**40)}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
POSITIONAL_OF = ("kind", "op", "name", "flops", "bytes", "comm_bytes", "layer", "phase", "dtype")
FREE = (*POSITIONAL_OF, "shape", "group", "micro_batch", "source", "sigma", "rank")


@st.composite
def odd_graphs(draw, most: int = 8) -> Graph:
    """A verified graph with some columns, buffers, facts and history at random."""
    graph = draw(graphs(most=most))
    edit = graph.edit(draw(TEXTS))
    for name in draw(st.lists(st.sampled_from(FREE), max_size=5, unique=True)):
        values = draw(st.lists(_values(name), min_size=graph.size, max_size=graph.size))
        edit.set(np.arange(graph.size), **{name: values})
    if draw(st.booleans()):
        edit.wait(graph.size - 1, [], kind="event")
    edit.buffer(draw(NUMBERS), name=draw(TEXTS), born=0, kind="gradient")
    edit.link(draw(TEXTS), draw(st.floats(1e-300, 1e300)))
    edit.lane(draw(TEXTS), rank=draw(st.integers(0, 9)), kind="comm", ordered=False)
    for key, value in draw(st.dictionaries(TEXTS, JSON, max_size=2)).items():
        edit.fact(**{key: value})
    return edit.commit()


def _values(name: str):
    spec = COLUMNS[name]
    if spec.words:
        return st.sampled_from([word.name.lower() for word in spec.words])
    if spec.is_text:
        return TEXTS
    if spec.dtype == np.float32:
        return st.floats(0, 1, width=32)
    return WHOLE.get(spec.dtype, NUMBERS)


def assert_same(a: Graph, b: Graph) -> None:
    """Two graphs are the same to the last bit, strings by what they say."""
    assert a.size == b.size
    for name, spec in COLUMNS.items():
        if spec.is_text:
            assert a.texts(name) == b.texts(name), name
        else:
            assert a.column(name).tobytes() == b.column(name).tobytes(), name
    assert a.edges.equals(b.edges)
    assert a.edges.lags.tobytes() == b.edges.lags.tobytes()
    for part in ("lanes", "links", "held", "drained", "used", "buffers"):
        for name, array in getattr(a, part).columns().items():
            other = getattr(b, part).columns()[name]
            if name == "name":
                assert [a.names[k] for k in array] == [b.names[k] for k in other], part
            else:
                assert array.tobytes() == other.tobytes(), (part, name)
    assert a.history == b.history
    assert dict(a.facts) == dict(b.facts)
    assert a.fingerprint() == b.fingerprint()
