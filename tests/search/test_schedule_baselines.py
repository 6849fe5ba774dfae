"""Fixed schedules: legal where they apply, as long as their papers say, refused elsewhere."""

import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.search.schedule import schedule, shape, wrong
from foretell.search.schedule.families import BASELINES

SPLIT = "split=yes,backward=2"  # forward, input and weight gradient take 1 each


def run(spec, method, num):
    found = schedule(shape(spec), num, method=method)
    assert wrong(found.problem, found.starts, found.order) is None
    assert found.method == method
    return found


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("num", [1, 3, 16])
def test_1f1b_and_gpipe(p, num):
    """(m + p - 1)(F + B), with p micro-batches in flight or all of them."""
    for method, held in (("1f1b", min(p, num)), ("gpipe", num)):
        found = run(f"v:devices={p}", method, num)
        assert found.makespan == (num + p - 1) * 4
        assert found.peak_memory[0] == held
        assert found.per_micro_batch == 4


@pytest.mark.parametrize(
    ("spec", "num", "most"),
    [("m", 8, 74), ("m", 128, 1034), ("nn", 8, 90), ("nn", 128, 1290), ("m:devices=8", 128, 1050)],
)
def test_1f1b_with_sharded_steps(spec, num, most):
    """No longer than an independent replay of the same orders found."""
    found = run(spec, "1f1b+", num)
    assert found.makespan <= most
    assert found.peak_memory == tuple(range(found.problem.num_devices, 0, -1))


@pytest.mark.parametrize(("p", "rounds"), [(2, 2), (4, 2), (4, 3), (8, 3)])
def test_interleaving_divides_the_bubble(p, rounds):
    """(p - 1)(F + B) of one stage in idle time, whatever the number of rounds."""
    found = run(f"loop:devices={p},rounds={rounds}", "interleaved", 2 * p)
    assert found.makespan == 2 * p * rounds * 4 + (p - 1) * 4
    # Megatron's warm-up: 2(p - 1) + (v - 1)p + 1 stages in flight on the first device
    assert found.peak_memory[0] == 2 * (p - 1) + (rounds - 1) * p + 1


@pytest.mark.parametrize("p", [4, 6, 8])
def test_chimera(p):
    """2N + D - 2 for equal times; D F + (2D - 2) B when backward takes twice as long (N = D)."""
    assert run(f"x:devices={p},backward=1", "chimera", p // 2).makespan == 3 * p - 2
    assert run(f"x:devices={p},backward=2", "chimera", p // 2).makespan == p + 2 * (2 * p - 2)


def test_hanayo_needs_less_than_1f1b_of_the_same_depth():
    waves = run("wave:devices=4,rounds=2,backward=2,forward=1", "hanayo", 4)
    line = run("v:devices=4,backward=4,forward=2", "1f1b", 4)
    assert waves.makespan < line.makespan
    assert max(waves.peak_memory) <= 8


@pytest.mark.parametrize("p", [2, 4, 7, 16])
def test_zero_bubble(p):
    """H1: idle (p - 1)(F + I - W) in the memory of 1F1B; H2: none in 2p - 1; V: none in 1F1B's."""
    num = 3 * p
    first = run(f"v:devices={p},{SPLIT}", "zb-h1", num)
    assert (first.makespan, max(first.peak_memory)) == (3 * num + p - 1, p)
    second = run(f"v:devices={p},{SPLIT}", "zb-h2", num)
    assert (second.idle, max(second.peak_memory)) == (0, 2 * p - 1)
    third = run(f"wave:devices={p},{SPLIT}", "zb-v", num)
    assert (third.idle, max(third.peak_memory)) == (0, 2 * p)


@pytest.mark.parametrize("p", [4, 8, 16])
def test_v_half_and_v_min_trade_time_for_memory(p):
    """About a half and a third of the 2p stages of ZB-V, at a bubble below 1F1B's."""
    num = 4 * p
    line = (num + p - 1) * 6  # 1F1B of two stages a device
    half, least = (run(f"wave:devices={p},{SPLIT}", m, num) for m in ("v-half", "v-min"))
    assert p <= max(half.peak_memory) <= p + 3
    assert 2 * p / 3 <= max(least.peak_memory) <= 2 * p / 3 + 3
    assert half.makespan < line
    assert least.makespan < line


@pytest.mark.parametrize("p", [2, 4, 8])
def test_dualpipe(p):
    """p + 1 stages held; idle within one backward of (p/2 - 1)(F&B + B - 3W)."""
    found = run(f"x:devices={p},{SPLIT}", "dualpipe", 2 * p)
    assert max(found.peak_memory) == p + 1
    assert found.idle <= (p / 2 - 1) * (3 + 2 - 3) + 2
    there_and_back = run(f"wave:devices={p},{SPLIT}", "dualpipev", 2 * p)
    assert max(there_and_back.peak_memory) == 2 * p + 1


@pytest.mark.parametrize(
    ("spec", "method", "why"),
    [
        ("k", "1f1b", "branch or join"),
        ("x", "1f1b", "2 pipelines"),
        ("m", "1f1b", "several devices"),
        ("v:infer=yes", "1f1b", "no backward"),
        ("v", "1f1b\\+", "plain and sharded"),
        ("loop", "1f1b", "several stages"),
        ("v", "zb-h1", "not split"),
        ("v", "zb-v", "not split"),
        ("v", "chimera", "opposite directions"),
        ("v:split=yes", "dualpipe", "opposite directions"),
        ("wave", "interleaved", "do not loop"),
        ("loop", "hanayo", "in waves"),
    ],
)
def test_a_placement_of_another_kind_is_refused(spec, method, why):
    with pytest.raises(InputError, match=why):
        schedule(shape(spec), 8, method=method.replace("\\", ""))


def test_too_few_micro_batches_are_refused():
    for spec, method in (
        (f"wave:{SPLIT}", "zb-v"),
        (f"x:{SPLIT}", "dualpipe"),
        ("loop", "interleaved"),
    ):
        with pytest.raises(InputError, match="micro-batches"):
            schedule(shape(spec), 3, method=method)


def test_too_little_memory_is_reported():
    with pytest.raises(InfeasibleError, match="gpipe: device 0 holds 5 of 4"):
        schedule(shape("v"), 8, 4, method="gpipe")


@pytest.mark.parametrize("p", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_search_is_never_worse(p):
    cases = [
        (f"v:devices={p},{SPLIT}", "zb-h1", p),
        (f"v:devices={p},{SPLIT}", "zb-h2", 2 * p - 1),
        (f"wave:devices={p},{SPLIT}", "zb-v", 2 * p),
        (f"m:devices={p}", "1f1b+", p),
    ]
    for spec, method, memory in cases:
        fixed = schedule(shape(spec), 2 * p, memory, method=method)
        found = schedule(shape(spec), 2 * p, memory, work=1)
        still = schedule(shape(spec), 2 * p, memory, objective="idle", work=1)
        assert found.makespan <= fixed.makespan
        assert found.per_micro_batch <= fixed.per_micro_batch
        assert still.idle <= fixed.idle


@pytest.mark.parametrize("place", ["v", "loop", "wave", "x", "m", "nn", "k"])
@pytest.mark.parametrize("more", ["", ",split=yes", ",infer=yes", ",forward=0.37"])
def test_any_fixed_schedule_is_legal_or_refused(place, more):
    legal = 0
    for devices, num in ((1, 3), (2, 4), (4, 12)):
        problem = shape(f"{place}:devices={devices},backward=2{more}")
        for method in BASELINES:
            try:
                found = schedule(problem, num, method=method)
            except InputError:
                continue
            legal += wrong(problem, found.starts, found.order) is None
    assert legal >= (0 if "infer" in more or place == "k" else 2)


def test_every_baseline_is_tried_here():
    assert set(BASELINES) == {
        "gpipe", "1f1b", "1f1b+", "interleaved", "chimera", "hanayo", "zb-h1", "zb-h2", "zb-v",
        "v-half", "v-min", "dualpipe", "dualpipev",
    }  # fmt: skip
