"""Tables of measured rows: written, read, joined and summed up; and the one that ships."""

import math
from importlib import resources
from pathlib import Path

import pytest

from foretell.errors import InputError
from foretell_lab.bench import Row, case, load, load_header
from foretell_lab.bench.case import work
from foretell_lab.bench.command import main
from foretell_lab.bench.digest import summary
from foretell_lab.bench.ratios import dtype_change, kind, layout_change, pairs, twice_the_batch
from foretell_lab.bench.runs import at_full_clock, join, merge
from foretell_lab.bench.table import save

LINEAR = case("linear", "forward", "fp32", "nk", m=4096, n=768, k=768)


def row(query=LINEAR, seconds=1e-4, host=math.nan, **more) -> Row:
    return Row(query, seconds, 0.01, 1, host, **more)


def test_of_several_measurements_the_fastest_counts_and_the_hosts_median() -> None:
    several = [row(seconds=3e-5), row(seconds=2e-5), row(seconds=math.nan, host=5e-6)]
    several += [row(seconds=math.nan, host=7e-6)]
    (joined,) = join(several)
    assert (joined.seconds, joined.host) == (2e-5, 6e-6)


def test_rows_slowed_by_the_case_before_are_left_out() -> None:
    heavy = case("linear", "forward", "bf16", "nk", m=8192, n=8192, k=8192)
    rates = {"fp32": 5e13, "bf16": 8e14}
    usual = [row(clock=1.86e9) for _ in range(5)]
    slowed, own = row(clock=1.5e9), row(heavy, clock=1.5e9)
    assert at_full_clock([*usual, slowed, own], rates) == [*usual, own]
    assert at_full_clock([row()], rates) == [row()]  # no clock was read


def test_tables_of_two_devices_do_not_mix(tmp_path: Path) -> None:
    for name in ("A", "B"):
        save([row()], {"device": {"name": name}}, tmp_path / f"{name}.csv")
    with pytest.raises(InputError, match="different devices: A, B"):
        merge([tmp_path / "A.csv", tmp_path / "B.csv"], tmp_path / "out.csv.gz")


def test_merge_tells_how_well_figures_repeat(tmp_path: Path) -> None:
    for name, seconds in (("a", 1.0e-4), ("b", 1.1e-4)):
        save([row(seconds=seconds)], {"ceilings": {"fp32": seconds}}, tmp_path / f"{name}.csv")
    merge([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out.csv.gz")
    header = load_header(tmp_path / "out.csv.gz")
    assert header["repeat"]["cases"] == 1
    assert header["repeat"]["p50"] == pytest.approx(0.0952, abs=1e-3)
    assert header["ceilings"] == {"fp32": 1.1e-4}
    assert len(load(tmp_path / "out.csv.gz")) == 1


def test_pairs_differ_in_one_thing() -> None:
    conv = {"n": 8, "c": 4, "k": 4, "r": 3, "s": 3, "stride": 1, "groups": 1, "h": 8, "w": 8}
    base = case("conv2d", "forward", "fp32", "nchw", **conv)
    rows = [
        row(base, 8e-5),
        row(case("conv2d", "forward", "bf16", "nchw", **conv), 2e-5),
        row(case("conv2d", "forward", "fp32", "nhwc", **conv), 4e-5),
        row(case("conv2d", "forward", "fp32", "nchw", **(conv | {"n": 16})), 12e-5),
    ]
    assert [p.ratio for p in pairs(rows, dtype_change("fp32", "bf16"))] == [0.25]
    assert [p.ratio for p in pairs(rows, layout_change("fp32"))] == [0.5]
    assert [p.ratio for p in pairs(rows, twice_the_batch)] == [1.5]
    assert kind(base) == "conv2d 3x3 forward"


@pytest.fixture(scope="module")
def h200() -> Path:
    found = resources.files("foretell.cost") / "tables" / "measured" / "h200.csv.gz"
    with resources.as_file(found) as path:
        return path


def test_the_shipped_table_is_small_whole_and_of_one_row_a_case(h200: Path) -> None:
    assert h200.stat().st_size < 1_000_000
    rows, header = load(h200), load_header(h200)
    assert len(rows) == header["rows"] == len({r.case for r in rows}) > 15_000
    assert header["device"]["name"] == "NVIDIA H200"
    assert all(r.seconds >= 0 or math.isnan(r.seconds) for r in rows)
    assert all(r.seconds > 0 or r.case.layout == "none" for r in rows if not math.isnan(r.seconds))


def test_the_shipped_table_repeats_and_obeys_physics(h200: Path) -> None:
    rows, header = load(h200), load_header(h200)
    assert header["repeat"]["cases"] >= 100
    assert header["repeat"]["p90"] < 0.05
    long = [p for p in pairs(rows, dtype_change("fp32", "bf16")) if p.seconds > 1e-3]
    products = sorted(p.ratio for p in long if p.kind.startswith("linear"))
    assert products[len(products) // 2] < 0.12  # matrix units: 791 against 51 TFLOP/s
    streams = [r for r in rows if r.case.op in ("gelu", "add", "lerp_") and r.seconds > 1e-4]
    assert len(streams) > 10
    for r in streams:
        assert 0.2 < work(r.case).bytes / r.seconds / header["ceilings"]["bytes"] < 1.1, r


def test_the_summary_holds_every_table(h200: Path) -> None:
    answer = summary(h200)
    for heading in ("matrix rate", "copy bandwidth", "Ratios", "Host cost", "Optimizer", "bus"):
        assert heading in answer
    assert "| linear forward |" in answer
    assert "| module.linear |" in answer
    widths = {line.count("|") for line in answer.splitlines() if line.startswith("| linear")}
    assert widths == {8, 14}


def test_the_command_joins_and_sums_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save([row()], {"device": {"name": "X"}}, tmp_path / "mine.csv")
    assert main(["--merge", str(tmp_path / "mine.csv"), "-o", str(tmp_path / "all.csv.gz")]) == 0
    assert main(["--summary", str(tmp_path / "all.csv.gz")]) == 0
    assert "1 rows" in capsys.readouterr().out
    assert main(["--summary", str(tmp_path / "none.csv")]) == 2
