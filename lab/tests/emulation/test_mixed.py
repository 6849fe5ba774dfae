"""Ranks of unequal speed: plans by what they are worth, steps counted on one's fingers, quotas."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")

from foretell.errors import InputError  # noqa: E402
from foretell.plan import Plan  # noqa: E402
from foretell.pytorch.ranks import wires  # noqa: E402
from foretell.pytorch.ranks.pool import Pool  # noqa: E402
from foretell.pytorch.ranks.wires import network  # noqa: E402
from foretell.simulate import simulate  # noqa: E402
from foretell_lab.emulation import cpu, matrix, mixed, mixed_plans, table  # noqa: E402
from foretell_lab.emulation.mixed import Comparison, Setting  # noqa: E402
from foretell_lab.emulation.mixed_parts import RankSpeed  # noqa: E402
from foretell_lab.emulation.mixed_step import step  # noqa: E402
from foretell_lab.emulation.prices import Prices  # noqa: E402

MB = 1_000_000
RATE, LATENCY = 10 * MB, 0.001  # bytes/s and seconds of every message here
WHY = cpu.refusal() or wires.refusal()


def pieces(times):
    return {
        "forward": 0.012 * times, "rest": 0.0, "update": 0.002, "wall": 0.03,
        "backward": [["2.weight", 0.004 * times], ["0.weight", 0.008 * times]],
        "layers": [["0", 0.008 * times], ["1", 0.0], ["2", 0.003 * times]],
    }  # fmt: skip


PROFILE = {
    "model": "tiny",
    "samples": 8,
    "parameters": {"0.weight": 1 * MB, "2.weight": 4 * MB},
    "linear": {"0": [500, 500, 1.0], "2": [1000, 1000, 1.0]},
    "handed": {"0": 2000.0, "1": 2000.0, "2": 40.0},
    "factors": {"0": [0.0, 0.0005], "2": [0.0, 0.0002]},
    "steps": {"8": pieces(1.0), "4": pieces(0.5), "16": pieces(2.0)},
}


def worth(stretch, ranks=2, act=0.0):
    ops = mixed._ops(ranks)
    rows = [
        {"network": "slow", "ranks": ranks, "op": op, "bytes": s, "cpu_s": 0.0,
         "seconds": LATENCY + s / RATE}
        for op in ops for s in (1000, 100_000, MB, 4 * MB)
    ]  # fmt: skip
    return RankSpeed(Prices({"links": rows}, "slow", ranks), stretch, act)


def seconds(plan, stretch=(1.0, 2.0), **more):
    return simulate(step(plan, PROFILE, worth(stretch, **more))).seconds


def test_samples_go_by_speed_and_none_goes_without():
    assert mixed_plans.by_speed((2.0, 1.0), 12) == (8, 4)
    assert mixed_plans.by_speed((100.0, 1.0, 1.0), 6) == (4, 1, 1)
    assert sum(mixed_plans.by_speed((3.0, 2.0, 2.0), 16)) == 16


def test_every_plan_has_the_same_samples():
    for name in mixed_plans.PLANS:
        plan = mixed_plans.plan(name, PROFILE, (1.0, 0.5))
        assert plan.global_batch == 16
        assert plan.ranks == 2
        assert not plan.shares or sum(plan.shares) == 16
    with pytest.raises(InputError, match="plan of the lab"):
        mixed_plans.plan("evn", PROFILE, (1.0, 0.5))


def test_layers_go_where_their_parameters_do_not_have_to():
    apart = mixed_plans.plan("apart", PROFILE, (1.0, 2.0))
    assert apart.groups == (
        ("0", "1", "all-reduce", "0:5", "1:11"), ("2", "2", "all-reduce", "1:16")
    )  # fmt: skip
    stages = mixed_plans.plan("stages", PROFILE, (2.0, 1.0))
    assert [row[:2] for row in stages.groups] == [("0", "1"), ("2", "2")]
    assert stages.micro_batch == 4


def test_factors_are_for_layers_whose_rows_are_few():
    plan = mixed_plans.plan("factors", PROFILE, (1.0, 1.0))
    assert [name for name, _ in plan.sync] == ["0.weight", "2.weight"]
    many = PROFILE | {"linear": {"0": [500, 500, 100.0], "2": [1000, 1000, 100.0]}}
    assert mixed_plans.plan("factors", many, (1.0, 1.0)) is None


def test_the_slowest_rank_and_its_messages_make_the_step():
    # rank 1: forward 24, backward 24 ms; the first bucket (2.weight, 4 MB) leaves after 32 ms and
    # is 401 ms on the way, the second 101 ms after it on the same link; then the update, 4 ms
    found = seconds(Plan(dp=2, global_batch=16))
    assert found == pytest.approx(0.024 + 0.008 + 0.401 + 0.1 + 0.004, abs=0.004)


def test_more_samples_for_the_faster_rank_end_sooner():
    even = seconds(Plan(dp=2, global_batch=16, bucket_mb=100.0))
    shared = seconds(Plan(dp=2, global_batch=16, bucket_mb=100.0, shares=(11, 5)))
    # the first message waits for the slower of both: forward and a third of the backward
    assert even - shared == pytest.approx(0.032 - 0.022, abs=0.001)


def test_a_server_gets_and_gives_everything():
    plan = mixed_plans.plan("server", PROFILE, (1.0, 1.0))
    # 5 MB there and 5 MB back over links of 10 MB/s
    assert seconds(plan, (1.0, 1.0)) == pytest.approx(0.024 + 0.5 + 0.002 + 0.5, abs=0.006)


def test_factors_are_gathered_and_multiplied():
    plan = mixed_plans.plan("factors", PROFILE, (1.0, 1.0))
    sent = 4 * 8 * (500 + 500) + 4 * 8 * (1000 + 1000)
    # their products leave the backward, and both ranks' are made before the update
    assert seconds(plan, (1.0, 1.0)) == pytest.approx(
        0.024 - 8 * 0.0007 + LATENCY + sent / RATE + 16 * 0.0007 + 0.002, abs=0.004
    )


def test_layers_apart_wait_for_samples_and_gradients():
    plan = Plan(
        groups=(("0", "1", "all-reduce", "0:16"), ("2", "2", "all-reduce", "1:16")),
        global_batch=16,
    )
    one = seconds(plan, (1.0, 1.0))
    sent = 2 * (LATENCY + 16 * 2000 / RATE)
    update = 0.002 / 5  # of the first rank's parameters, a fifth
    # between measured sizes of messages the line is drawn in logarithms: a little above
    assert one == pytest.approx(0.016 + 0.008 + 0.008 + 0.016 + sent + update, abs=0.005)
    assert seconds(plan.but(micro_batch=4), (1.0, 1.0)) < one
    assert seconds(plan, (1.0, 1.0), act=0.001) == pytest.approx(one + 0.004, abs=2e-4)


def test_the_plan_predicted_best_is_compared_with_the_best():
    setting = Setting("tiny", "slow", 2, "1")
    rows = [
        Comparison(setting, "a", 1.0, 1.2, 0.01, 3, 0.0),
        Comparison(setting, "b", 2.0, 1.0, 0.05, 3, 0.0),
    ]
    (found,) = mixed.picks(rows)
    assert (found["ours"], found["best"]) == ("a", "b")
    assert found["regret"] == pytest.approx(0.2)
    assert found["spread"] == 0.05


def test_shares_of_a_core_in_words():
    assert cpu.parse("0.4+0.2", 3) == (0.4, 0.2, 0.2)
    for text in ("", "half", "-1"):
        with pytest.raises(InputError, match="of a core"):
            cpu.parse(text, 2)


def test_without_rights_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "refusal", lambda: "no rights")
    with pytest.raises(InputError, match="no rights"):
        mixed.run(tmp_path, [Setting("mlp", "200mbit", 2, "0.5")], ["even"])
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(bool(cpu.refusal()), reason=cpu.refusal() or "there are quotas")
def test_a_quota_holds_and_is_gone():
    work = "import time\nt = time.perf_counter()\nwhile time.process_time() < .25: pass\n"
    work = f"import sys\nsys.stdin.readline()\n{work}print(time.perf_counter() - t)"
    process = subprocess.Popen(
        [sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with cpu.Quotas([process.pid]) as quotas:
        folder = quotas.folders[0]
        quotas.limit([0.2])
        out, _ = process.communicate("go\n")
        assert folder.exists()
    assert not folder.exists()
    assert float(out) > 0.5  # a quarter of a second at a fifth of a core is more than one


@pytest.mark.skipif(bool(cpu.refusal()), reason=cpu.refusal() or "there are quotas")
def test_what_a_killed_lab_left_is_taken_away():
    left = cpu._root() / "fl999999999cpu0r0"
    left.mkdir()
    with cpu.Quotas([]):
        assert not left.exists()


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY), reason=WHY or "there are namespaces and quotas")
def test_plans_train_as_one_process_over_unequal_links(tmp_path):
    rows = "0+6+all-reduce+0:7+1:3+2:2/7+9+factors+0:8+2:4"
    server = "+".join(("7.weight", "ps:1")) + "/" + "+".join(("7.bias", "ps:0"))
    plans = (
        f"groups={rows},global_batch=12,micro_batch=6",
        "groups=0+2+sharded+0:12/3+6+ps+1:6+2:6/7+9+all-reduce+2:12,global_batch=12",
        "groups=0+2+all-reduce+0:7+1:5/3+6+split+1:12+2:12/7+9+factors+0:8+2:4,global_batch=12",
        f"dp=3,shares=7+3+2,global_batch=12,sync={server}",
    )
    with Pool(
        3, network("400mbit+100mbit+200mbit"), tmp_path / "log", worker=matrix.WORKER
    ) as pool:
        pool.shape(network("400mbit+100mbit+200mbit"))
        for plan in plans:
            found = pool.ask({"do": "same", "model": "vgg", "plan": plan, "steps": 3})
            assert max(rank["off"] for rank in found) < 1e-5
            assert sum(rank["parameters"] for rank in found) >= 8


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY), reason=WHY or "there are namespaces and quotas")
def test_a_setting_is_measured_run_and_predicted(tmp_path):
    settings = [Setting("wide", "400mbit+200mbit", 2, "0.5+0.25")]
    mixed.run(tmp_path, settings, ["even", "factors", "stages"], rounds=1, steps=3)
    found = mixed.compared(tmp_path)
    assert [row.plan for row in sorted(found, key=lambda r: r.plan)] == [
        "even",
        "factors",
        "stages",
    ]
    assert all(0.3 < row.predicted / row.measured < 3 for row in found)
    known = mixed.Mixed(tmp_path, ExitStack())
    stretch = known.speeds[str(settings[0])][0]
    assert stretch[1] > stretch[0] > 1  # half of a core is worth more than a quarter
    assert table.read(tmp_path / mixed.MACHINE)["profiles"]["wide"]["handed"]
    assert not [name for name in wires._spaces() if name.startswith(f"fl{os.getpid()}")]
