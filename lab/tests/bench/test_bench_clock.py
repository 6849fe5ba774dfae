"""The clocks: what lies between marks, what the host spends, what a sweep does within its time."""

import math
import time

import pytest

torch = pytest.importorskip("torch", reason="measuring operators needs torch")

from foretell.errors import ForetellError  # noqa: E402
from foretell_lab.bench import host, machine  # noqa: E402
from foretell_lab.bench.call import Call, Place  # noqa: E402
from foretell_lab.bench.case import Case, case  # noqa: E402
from foretell_lab.bench.clock import (  # noqa: E402
    Kernel,
    Measured,
    WallClock,
    busy,
    issue_seconds,
    place_for,
    split,
    warm,
)
from foretell_lab.bench.sweep import Budget, ordered, shard, sweep, time_issue  # noqa: E402

CPU = Place(torch.device("cpu"))
SMALL = [case("relu", "forward", dtype, "-", n=n) for n in (64, 128) for dtype in ("fp32", "bf16")]


def kernels(*spans: tuple[str, int, int]) -> list[Kernel]:
    return [Kernel(*span) for span in spans]


def test_what_lies_between_marks_is_one_repetition() -> None:
    seen = kernels(
        ("evict", 0, 5), ("void spin_kernel(long)", 5, 6), ("b", 10, 14), ("a", 7, 9),
        ("spin_kernel", 15, 25), ("evict", 26, 30), ("spin_kernel", 31, 32),
        ("spin_kernel", 40, 52), ("spin_kernel", 60, 61), ("cut off", 62, 63),
    )  # fmt: skip
    spans = split(seen)
    assert [[k.name for k in span.kernels] for span in spans] == [["a", "b"], []]
    assert [span.probe for span in spans] == pytest.approx([9e-9, 11e-9])


def test_kernels_that_overlap_count_once() -> None:
    assert busy(kernels(("a", 0, 10), ("b", 5, 8), ("c", 6, 14), ("d", 20, 21))) == pytest.approx(
        15e-9
    )
    assert busy([]) == 0


def test_the_wall_clock_sees_a_sleep() -> None:
    ready = warm(SMALL[0], Call(lambda: time.sleep(0.002)), CPU, longest=1.0)
    (found,) = WallClock(CPU).measure([ready])
    assert isinstance(found, Measured)
    assert 0.002 <= found.seconds < 0.02
    assert issue_seconds(lambda: time.sleep(0.002), CPU, 4) >= 0.002


def test_a_call_that_takes_too_long_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"more than 0\.001 s"):
        warm(SMALL[0], Call(lambda: time.sleep(0.004)), CPU, longest=0.001)


def test_a_call_that_fails_later_is_reported_not_raised() -> None:
    calls = iter([None, None])

    def run() -> None:
        if next(calls, "stop") == "stop":
            raise RuntimeError("out of memory")

    ready = warm(SMALL[0], Call(run), CPU, longest=1.0)
    assert WallClock(CPU).measure([ready]) == ["out of memory"]


def test_a_missing_gpu_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ForetellError, match="no CUDA device"):
        place_for("cuda")
    assert str(place_for("auto").device) == "cpu"


def run_sweep(cases: list[Case], budget: Budget) -> dict[str, Measured | str]:
    found: dict[str, Measured | str] = {}
    sweep(cases, CPU, budget, lambda query, got: found.update({str(query): got}))
    return found


def test_a_sweep_measures_what_fits_and_says_what_does_not() -> None:
    strange = case("attention", "forward", "fp32", "cudnn", b=1, h=1, s=4, d=4, causal=0)
    huge = case("relu", "forward", "fp32", "-", n=10**12)
    found = run_sweep([strange, *SMALL, huge], Budget(time.monotonic() + 60, longest=1.0))
    assert isinstance(found[str(strange)], str)
    assert "too large" in str(found[str(huge)])
    for query in SMALL:
        got = found[str(query)]
        assert isinstance(got, Measured)
        assert 0 < got.seconds < 1


def test_a_sweep_without_time_does_nothing() -> None:
    assert run_sweep(SMALL, Budget(time.monotonic() - 1)) == {}


def test_a_prefix_of_the_list_covers_every_operator_and_shards_share_it() -> None:
    cases = [
        case(op, "forward", dtype, "-", n=n)
        for op in ("relu", "gelu", "add")
        for n in range(100)
        for dtype in ("fp32", "bf16")
    ]
    groups = ordered(cases)
    assert groups == ordered(cases)
    flat = [c for group in groups for c in group]
    assert set(flat) == set(cases)
    assert len(flat) > len(cases)  # some twice, to see how well figures repeat
    assert all(len({(c.op, c.shape) for c in group}) == 1 for group in groups)
    early = [group[0].op for group in groups[:30]]
    assert min(early.count(op) for op in ("relu", "gelu", "add")) >= 5
    assert sorted(map(id, shard(groups, 0, 2) + shard(groups, 1, 2))) == sorted(map(id, groups))


def test_issue_is_timed_for_a_sample_but_not_through_the_engine() -> None:
    cases = [case("relu", "forward", "fp32", "-", n=n) for n in range(8, 40)]
    backward = case("relu", "backward", "fp32", "-", n=64)
    budget = Budget(time.monotonic() + 60, rates={"fp32": 1e12, "bytes": 1e10})
    found = time_issue([*cases, backward], CPU, budget)
    assert set(found) == set(cases[:6])
    assert all(0 < seconds < 0.1 for seconds in found.values())


def test_host_costs_of_a_chain_are_per_call() -> None:
    timed = host.time_chains(CPU, time.monotonic() + 60, only=("relu", "module.linear"))
    rows = dict(host.rows(CPU, timed))
    assert len(rows) == 1 + 2 * 2 * 2
    for query, found in rows.items():
        assert isinstance(found, Measured), (query, found)
        assert math.isnan(found.seconds)
        assert 0 <= found.host < 0.05


def test_host_costs_without_time_say_so() -> None:
    timed = host.time_chains(CPU, time.monotonic() - 1, only=("relu",))
    answer = [found for query, found in host.rows(CPU, timed) if query.op == "host.relu"]
    assert answer == ["no time was left"] * 4


def test_plain_calls_are_timed_everywhere_and_launches_only_on_gpus() -> None:
    names = {query.op for query, _ in host.time_launches(CPU)}
    assert {"host.item", "host.add_"} <= names
    assert list(host.kernel_rows(CPU)) == []


def test_the_machine_is_described_without_its_paths() -> None:
    answer = machine.describe(CPU)
    assert answer["torch"] == torch.__version__
    assert answer["device"]["kind"] == "cpu"
    assert answer["host"]["cores"] >= 1
    assert "/" not in answer["host"]["system"]
    rates = machine.ceilings(CPU)
    assert 1e8 < rates["fp32"] < 1e14
    assert 1e8 < rates["bytes"] < 1e13
