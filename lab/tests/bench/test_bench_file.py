"""Tables of measured rows: written and read."""

import math
from pathlib import Path

import pytest

from foretell.errors import InputError
from foretell_lab.bench import Row, case, load, load_header
from foretell_lab.bench.table import save, written

LINEAR = case("linear", "forward", "fp32", "nk", m=4096, n=768, k=768)


def row(query=LINEAR, seconds=1e-4, host=math.nan, **more) -> Row:
    return Row(query, seconds, 0.01, 1, host, **more)


def test_rows_are_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv.gz"
    rows = [row(seconds=1.23456e-5, host=2e-5), row(case("host.add"), math.nan, 1e-5)]
    save(rows, {"device": {"name": "X"}}, path)
    first = path.read_bytes()
    save(rows, {"device": {"name": "X"}}, path)
    assert path.read_bytes() == first
    found = load(path)
    assert found[0] == row(seconds=1.235e-5, host=2e-5)
    assert math.isnan(found[1].seconds)
    assert load_header(path) == {"device": {"name": "X"}}


def test_a_growing_table_keeps_kernel_and_clock(tmp_path: Path) -> None:
    path = tmp_path / "grows.csv"
    path.write_text(written(row(kernel="void k<a, b>(c)", clock=1.86e9)))
    assert load(path) == [row(kernel="void k<a, b>(c)", clock=1.86e9)]


@pytest.mark.parametrize("line", ["linear,forward", "a,b,c,d,m=x;n,1,1,1,1", "a,b,c,d,m=1,x,1,1,1"])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(f"{written(row())}{line}\n")
    with pytest.raises(InputError, match="line 2"):
        load(path)


def test_a_missing_table_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no measured table"):
        load(tmp_path / "none.csv")
