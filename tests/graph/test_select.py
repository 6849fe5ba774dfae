"""Which tasks a text means."""

import pytest

from foretell.errors import InputError
from foretell.graph.select import chosen
from tests.graph.golden import graph

STEP = graph(
    """
    %0 = host launch for 0.5
    %1 = kernel gemm "a,b" for 1.0 phase=forward layer="net.1"
    %2 = kernel conv2d for 1.0 phase=backward layer="net.2"
    %3 = collective all_reduce for 2.0 rank=1 phase=backward
    """
)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("all", [0, 1, 2, 3]),
        ("op=gemm", [1]),
        ("op=gemm/conv*", [1, 2]),
        ("op=gemm/conv*+phase=backward", [2]),
        ("kind!=kernel", [0, 3]),
        ("kind!=kernel/host", [3]),
        ("layer=net.*+op!=gemm", [2]),
        ("rank=1", [3]),
        ("seconds=0.5/2", [0, 3]),
        ("name=a,b", [1]),
        ("op=missing", []),
    ],
)
def test_chosen(text, tasks):
    assert chosen(STEP, text).tolist() == tasks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "`` in `` is not column=value"),
        ("gemm", "is not column=value"),
        ("op=gemm+", "`` in `op=gemm+` is not column=value"),
        ("ops=gemm", "unknown column: `ops`"),
        ("kind=kernl", "did you mean `kernel`"),
        ("rank=first", "`first` in `rank=first` is not a number"),
    ],
)
def test_what_means_nothing(text, words):
    with pytest.raises(InputError) as error:
        chosen(STEP, text)
    assert words in str(error.value)
