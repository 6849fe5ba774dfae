"""Predicted steps, counted by hand."""

import pytest

from emulation.made import MB, PROFILE, known, machine, step
from foretell.errors import ForetellError, InputError
from foretell.graph import Kind
from foretell.plan import Plan
from foretell.simulate import simulate
from foretell_lab.emulation import plans
from foretell_lab.emulation.host import stall
from foretell_lab.emulation.pieces import pieces
from foretell_lab.emulation.predicted import Busy, Known, graph, predict
from foretell_lab.emulation.prices import Prices
from foretell_lab.emulation.step import Knobs
from foretell_lab.emulation.sync_methods import same
from foretell_lab.emulation.table import Config

BARE = Knobs(launch=0.0, copy=0.0)


def seconds(plan, ranks=2, stretch=0.0, knobs=BARE, threads="1", **options):
    config = Config("tiny", plan, "slow", ranks, threads)
    return predict(known(**options), config, Busy(stretch), knobs).seconds


def test_one_rank_takes_its_core_seconds_times_how_busy_the_machine_is():
    assert seconds("ddp", 1) == pytest.approx(0.021)
    assert seconds("ddp", 1, stretch=3.0) == pytest.approx(0.063)


def test_one_bucket_is_sent_when_the_last_gradient_is_there():
    # forward 10 ms, backward 10 ms, 5 MB at 10 MB/s and 1 ms, update 1 ms
    assert seconds("one") == pytest.approx(0.020 + 0.501 + 0.001)


def test_buckets_overlap_the_backward_and_share_the_link():
    # b's megabyte leaves 6 ms before a's four: what the link carries alone is carried once
    found = seconds("dp=2,buckets=b/a")
    assert 0.014 + 0.5 < found < seconds("one")


def test_late_is_no_better_than_overlapped():
    assert seconds("late") >= seconds("ddp") - 1e-9


def test_a_server_sends_everything_twice():
    assert seconds("server") > 0.02 + 2 * 0.5


def test_sharded_parameters_take_as_long_as_those_of_a_server():
    assert seconds("sharded") == pytest.approx(seconds("server"), rel=0.01)


def test_short_messages_leave_a_thread_to_the_long_ones():
    # 4 MB on one thread; 1 MB, then another 4 MB on the other: not both long ones in a row
    assert seconds("dp=2,buckets=a/b") < seconds("one") + 0.005


def test_accumulation_does_the_same_work_and_sends_once():
    assert seconds("accumulate") == pytest.approx(seconds("one"), rel=0.03)


def test_uneven_shares_wait_for_the_larger():
    assert seconds("uneven") == pytest.approx(seconds("ddp") + 0.010, rel=0.02)


def test_threads_take_what_they_were_profiled_to_take():
    assert seconds("ddp", 1, threads="2") == pytest.approx(0.021)  # nobody clocked two: as one does
    clocked = PROFILE | {"threads": {"2": {n: step(float(n) / 8 * 0.7) for n in ("4", "8", "12")}}}
    config = Config("tiny", "one", "slow", 2, "2+1")
    found = predict(Known({"tiny": clocked}, machine()), config, None, BARE).seconds
    assert found == pytest.approx(0.020 + 0.501 + 0.001)  # the rank of one thread is waited for
    both = Config("tiny", "one", "slow", 2, "2")
    found = predict(Known({"tiny": clocked}, machine()), both, None, BARE).seconds
    assert found == pytest.approx(0.014 + 0.501 + 0.001)


def _work(made):
    """Core seconds of one of two ranks."""
    return made.seconds[made.kind == Kind.HOST].sum() / 2


def with_cores(cores, **more):
    answer = machine()["machine"] | {"cores": cores}
    return Known({"tiny": PROFILE}, machine() | {"machine": answer} | more)


def test_messages_that_meet_stall_where_ranks_have_few_processors():
    two = Config("tiny", "dp=2,buckets=b/a", "slow", 2)
    free, few = (predict(with_cores(n), two, None, BARE).seconds for n in (8, 6))
    assert stall({"cores": 8}, 2) == 0.0
    assert stall({"cores": 16, "each": 2}, 4) == pytest.approx(4e-3)  # 2/3 of 3 ms, twice doubled
    longer = stall({"cores": 6}, 2)
    assert 0.5 * longer < few - free <= longer  # the other has the wire meanwhile


def test_messages_that_do_not_meet_stall_nowhere():
    for plan in ("one", "server"):  # one alone; none that waits for what it gets
        config = Config("tiny", plan, "slow", 2)
        free, few = (predict(with_cores(n), config, None, BARE).seconds for n in (8, 2))
        assert few == pytest.approx(free)


def test_work_beside_messages_takes_what_bench_found():
    beside = [{"network": "slow", "ranks": 2, "work": 1.5, "wire": 1.0}]
    for plan, more in (("one", 0.0), ("dp=2,buckets=b/a", 0.5 * 0.006)):
        config = Config("tiny", plan, "slow", 2)
        places = (with_cores(8), with_cores(8, beside=beside))
        plain, slower = (_work(graph(place, config, None, BARE)) for place in places)
        assert slower - plain == pytest.approx(more)


def test_gradients_that_leave_cost_what_bench_found():
    hooks = {"hook_s": 1e-3, "wait_s": 5e-3, "copy_s": 1e-9, "cold_s": 2e-9}
    place, config = with_cores(8, hooks=hooks), Config("tiny", "one", "slow", 2)
    made, plain = (_work(graph(place, config, None, knobs)) for knobs in (Knobs(), BARE))
    assert made - plain == pytest.approx(2e-3 + 5e-3 + 5 * MB * 3e-9 + 1.5e-4, rel=0.2)
    alone = Config("tiny", "ddp", "slow", 1)
    assert predict(place, alone).seconds == pytest.approx(0.021)  # nothing leaves


def test_plans_that_come_to_the_same_step_share_a_mark():
    sizes = PROFILE["parameters"]
    marks = {n: same(plans.plan(n, PROFILE, 2), sizes) for n in ("one", "ddp", "100mb", "layers")}
    assert marks["one"] == marks["100mb"]
    late = [same(Plan.parse(f"dp=2,buckets={b},overlap=false"), sizes) for b in ("a+b", "a/b")]
    assert late[0] == marks["one"] != late[1] != same(Plan.parse("dp=2,buckets=a/b"), sizes)


def test_knobs_turn_what_they_name():
    assert seconds("one", knobs=Knobs(launch=0, copy=0, wire=2.0)) == pytest.approx(1.023)
    twice = Knobs(launch=0, copy=0, compute=2.0)
    assert seconds("one", knobs=twice) == pytest.approx(0.042 + 0.501)
    own = Knobs(launch=0, copy=0, models={"tiny": 2.0}, wires={"slow": 2.0})
    assert seconds("one", knobs=own) == pytest.approx(0.042 + 1.002)


def test_a_core_that_is_slower_than_the_profiles_takes_longer():
    one = {**PROFILE, "probe_s": 0.020}
    busy = Busy(stretch=1.0, probe=0.030)
    config = Config("tiny", "one", "slow", 2)
    found = predict(Known({"tiny": one}, machine()), config, busy, BARE).seconds
    assert found == pytest.approx(1.5 * 0.021 + 0.501)
    cores = [{"ranks": r, "stretch": 1.0, "cpu_s": 0.02 * r} for r in (1, 2)]
    bench = Known({"tiny": PROFILE}, machine() | {"cores": cores})
    assert predict(bench, config, None, BARE).seconds == pytest.approx(2 * 0.021 + 0.501)


def test_prices_follow_what_was_measured():
    prices = Prices(machine(), "slow", 2)
    assert prices.seconds("all_reduce", 1 * MB) == pytest.approx(0.101)
    assert prices.seconds("all_reduce", 8 * MB) == pytest.approx(0.801)
    assert 0.001 < prices.seconds("all_reduce", 10_000) < 0.011
    assert prices.share("all_reduce", 1000) < 0.1
    assert prices.share("all_reduce", 4 * MB) == pytest.approx(0.4 / 0.401)


def test_what_was_not_measured_is_refused():
    with pytest.raises(InputError, match="no measurement of all_reduce on 3 ranks over slow"):
        predict(known(), Config("tiny", "ddp", "slow", 3))
    with pytest.raises(InputError, match="no profile of `huge`"):
        predict(known(), Config("huge", "ddp", "slow", 2))


def test_pieces_between_and_beyond_profiled_samples():
    assert pieces(PROFILE, 6).forward == pytest.approx(0.0075)
    assert pieces(PROFILE, 16).forward == pytest.approx(0.02)
    assert pieces(PROFILE, 8).seconds == pytest.approx(0.021)


def test_every_named_plan_is_one_for_its_ranks():
    for name in plans.PLANS:
        if name != "factors":
            assert plans.plan(name, PROFILE, 4).ranks == 4
            assert plans.plan(name, PROFILE, 1).ranks == 1
    assert not plans.applies("factors", PROFILE, 2)
    assert not plans.applies("one", PROFILE, 1)
    assert sum(plans.plan("uneven", PROFILE, 3).shares) == 24


def test_a_plan_that_is_not_there():
    with pytest.raises(ForetellError, match="layers"):
        plans.plan("layer", PROFILE, 2)
    with pytest.raises(InputError, match="is for 4 ranks, not 2"):
        plans.plan("dp=4", PROFILE, 2)


def test_factors_send_rows_in_place_of_weights():
    profile = PROFILE | {
        "parameters": {"f.weight": 4 * MB},
        "linear": {"f": [1000, 1000, 1.0]},
        "steps": {"8": PROFILE["steps"]["8"] | {"backward": [["f.weight", 0.01]]}},
    }
    few = Known({"tiny": profile}, machine())
    found = [
        predict(few, Config("tiny", p, "slow", 2), None, BARE).seconds for p in ("ddp", "factors")
    ]
    assert found[1] < found[0] / 5  # 64 kB in place of 4 MB


def two_layers(**more):
    """Two linear layers, the second of which has its gradient first."""
    back = [["g.weight", 0.01], ["f.weight", 0.01]]
    profile = PROFILE | {
        "parameters": {"f.weight": 4 * MB, "g.weight": 4 * MB},
        "linear": {"f": [1000, 1000, 1.0], "g": [1000, 1000, 1.0]},
        "steps": {"8": PROFILE["steps"]["8"] | {"backward": back}},
        **more,
    }
    return graph(Known({"tiny": profile}, machine()), Config("tiny", "factors", "slow", 2))


def test_factors_are_gathered_as_gradients_are_made_and_multiplied_one_by_one():
    made = two_layers()
    played = simulate(made)
    names = [task.name for task in made]
    sent = [names.index(f"all_gather {k}") for k in (0, 1)]
    gradients = [names.index(f"gradient {name}.weight") for name in "gf"]
    assert [played.start[k] for k in sent] == [played.end[k] for k in gradients]
    first, second = (names.index(f"product {name}") for name in "gf")
    assert played.end[sent[0]] <= played.start[first] < played.end[first] <= played.start[second]


def test_factors_cost_what_was_clocked():
    work = [
        made.seconds[made.kind == Kind.HOST].sum()
        for made in (two_layers(factors={"f": [0.0, c], "g": [0.0, c]}) for c in (1e-4, 2e-4))
    ]
    # 8 rows less in each backward, 2 · 8 more in each product: of 2 layers on 2 ranks
    assert work[1] - work[0] == pytest.approx(2 * 2 * (16 - 8) * 1e-4)
