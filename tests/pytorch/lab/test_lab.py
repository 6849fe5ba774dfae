"""The laboratory itself, on real ranks over loopback: rows, notes, faults, namespaces."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from foretell.cli.compare import timeline_of
from foretell.cli.lab import command
from foretell.cluster import load
from foretell.errors import InputError
from foretell.pytorch.lab import links, machines, matrix, table
from foretell.pytorch.lab.matrix import Asked, permitted
from foretell.pytorch.lab.network import network
from foretell.pytorch.lab.pool import Pool
from foretell.pytorch.lab.table import Config
from foretell.pytorch.lab.wires import Wires, refusal
from foretell.simulate.compare import compare

pytestmark = pytest.mark.filterwarnings("ignore")
WHY = refusal()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with Pool(2, network("loopback"), tmp_path_factory.mktemp("pool") / "log") as found:
        yield found


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory):
    """A lab of two plans, its profile and links measured with ranks that are there already."""
    place = tmp_path_factory.mktemp("lab")
    lab = matrix.Lab(place)
    lab.pools = {(2, "lo"): pool}
    size = 16
    job = {"do": "profile", "model": "embedding", "samples": [size * 16, size * 8], "steps": 3}
    job |= {"threads": [2]}
    profiles = {"embedding": pool.ask(job)[0]}
    table.write(place / table.PROFILES, profiles)
    found = {"machine": links.this_machine(), "cores": [links.measure_cores(pool)]}
    found["links"] = links.measure_links(pool, "loopback", (1024, 262144, 1048576), ("all_reduce",))
    found["fits"] = links.fit_links(found["links"])
    table.write(place / table.MACHINE, found)
    asked = Asked((), steps=2, warmup=1, notes=True)
    for number, plan in enumerate(("ddp", "layers")):
        config = Config("embedding", plan, "loopback", 2)
        matrix._once(lab, config, profiles["embedding"], asked, number, 0.0)
    return place


def test_rows_are_plausible(folder):
    rows = table.rows(folder)
    assert [r.plan for r in rows] == ["ddp", "layers"]
    assert all(0 < r.low_s <= r.step_s <= r.high_s < 10 for r in rows)
    assert all(r.stretch > 0.9 and 0 < r.cpu_s < 5 for r in rows)


def test_a_profile_has_every_parameter_and_its_time(folder):
    profile = table.read(folder / table.PROFILES)["embedding"]
    step = profile["steps"]["256"]
    assert {name for name, _ in step["backward"]} == set(profile["parameters"])
    assert step["forward"] > 0
    assert set(profile["linear"]) == {"body.0", "body.2"}
    two = profile["threads"]["2"]["256"]
    assert [name for name, _ in two["backward"]] == [name for name, _ in step["backward"]]
    assert two["forward"] > 0


def test_work_and_messages_are_measured_beside_each_other(pool, folder):
    found = links.measure_beside(pool, "loopback")
    assert (found["network"], found["ranks"]) == ("loopback", 2)
    assert found["work"] > 0.3
    assert found["wire"] > 0.1


def test_what_taking_gradients_costs_is_measured(pool):
    found = links.measure_hooks(pool)
    assert set(found) == {"hook_s", "wait_s", "copy_s", "cold_s"}
    assert all(0 <= value < 0.05 for value in found.values())  # core seconds
    assert found["hook_s"] + found["wait_s"] > 0


def test_links_are_measured_and_make_a_cluster(folder):
    machine = table.read(folder / table.MACHINE)
    assert all(0 < row["seconds"] < 5 for row in machine["links"])
    (fit,) = machine["fits"]
    assert fit["bandwidth"] > 1e6
    path = machines.write_cluster(folder, machine, "loopback", 2)
    cluster = load(str(path))
    assert cluster.size == 2
    assert cluster.levels((0, 1))[0].bandwidth == pytest.approx(fit["bandwidth"], rel=1e-3)
    assert len(machines.write_links(folder, machine).read_text().splitlines()) == 4


def test_lab_and_compare_tell_of_the_folder(folder):
    told = CliRunner().invoke(command, ["-o", str(folder), "--no-run", "--notes", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert len(found["rows"]) == 2
    assert all(row["predicted_s"] > 0 for row in found["rows"])
    place = folder / "timelines"
    pair = [place / f"embedding-layers-loopback-2.{w}.graph" for w in ("predicted", "measured")]
    laid = compare(*map(timeline_of, pair))
    assert laid.matched >= 8  # forward, gradients and update of two ranks, three buckets
    assert {"forward", "update"} <= {p.name for p in laid.parts} | {"forward"}
    assert sum(p.seconds for p in laid.parts) + laid.elsewhere == pytest.approx(laid.gap)


def test_what_was_run_is_not_run_again(folder):
    configs = [Config("embedding", plan, "loopback", 2) for plan in ("ddp", "layers")]
    missing = list(matrix._missing(folder, configs, 2))
    assert sorted((n, c.plan) for n, c in missing) == [(0, "layers"), (1, "ddp")]


def test_rounds_mix_the_order(tmp_path):
    configs = [Config("mlp", p, "loopback", 2) for p in ("ddp", "one", "layers", "late", "1mb")]
    orders = [
        [c.plan for n, c in matrix._missing(tmp_path, configs, 3) if n == k] for k in range(3)
    ]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_without_rights_everything_is_loopback(monkeypatch):
    monkeypatch.setattr("foretell.pytorch.lab.matrix.refusal", lambda: "no rights")
    configs = [Config("mlp", "ddp", n, 2) for n in ("100mbit", "1gbit", "loopback")]
    found, why = permitted(configs)
    assert (found, why) == ((Config("mlp", "ddp", "loopback", 2),), "no rights")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--networks", "100mb"], "is none of"),
        (["--ranks", "0"], "use 1 to 16"),
        (["--threads", "two"], "2\\+1"),
    ],
)
def test_what_a_person_got_wrong(words, told, tmp_path):
    result = CliRunner().invoke(command, ["-o", str(tmp_path), *words])
    with pytest.raises(InputError, match=told):
        raise result.exception


@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_namespaces_are_made_shaped_and_gone():
    def spaces():
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        return [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]

    with Wires(2, "veth") as wires:
        wires.shape(network("100mbit"))
        mine = [name for name in spaces() if name.startswith(wires.tag)]
        assert len(mine) == 2
        shown = subprocess.run(
            [*wires.prefix(0), "tc", "qdisc", "show", "dev", "eth0"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert "tbf" in shown
        assert "100Mbit" in shown
        wires.shape(network("veth"))
        with pytest.raises(InputError, match="cannot be had on veth links"):
            wires.shape(network("100mbit~5ms"))
    assert not [name for name in spaces() if name.startswith(wires.tag)]


@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_what_a_killed_lab_left_is_taken_away():
    code = "from foretell.pytorch.lab.wires import Wires; import os; w = Wires(1, 'veth');"
    code += "w.__enter__(); print(w.tag, flush=True); os._exit(1)"
    tag = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    ).stdout.strip()
    time.sleep(0.1)
    listed = ["ip", "netns", "list"]
    assert tag in subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    with Wires(1, "veth"):
        assert tag not in subprocess.run(listed, capture_output=True, text=True, check=True).stdout


def test_a_wrong_model_is_told_by_name(pool, folder):
    with pytest.raises(InputError, match=r"rank 0 failed: .*`mpl`"):
        pool.ask({"do": "profile", "model": "mpl", "samples": [], "steps": 1})
    assert pool.is_broken  # so this comes last of those that share it


def test_a_failed_job_names_the_rank_and_ends_all(tmp_path):
    with Pool(2, network("loopback"), tmp_path / "log") as ranks:
        pids = [p.pid for p in ranks.processes]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(InputError, match="rank 1 died in `burn`"):
            ranks.ask({"do": "burn"}, seconds=20)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        with pytest.raises(InputError, match="were ended"):
            ranks.ask({"do": "burn"})


def test_bandwidth_is_that_of_large_messages():
    x, beta = np.array([1e3, 1e4, 1e5, 1e6, 4e6]), 1 / 12.5e6
    y = np.maximum(0.002, 0.002 + beta * (x - 65536))  # a token bucket lets the first pass for free
    alpha, found = links.line(x, y)
    assert found == pytest.approx(beta)
    assert alpha == pytest.approx(0.002, rel=0.5)
    assert links.line(np.array([1.0, 2.0, 3.0]), np.array([3.0, 3.0, 2.0]))[1] > 0


def _ranks_of(pid):
    """Processes of ranks whose parent this is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
            line = (path.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(words[1]) == pid and "foretell.pytorch.lab.rank" in line:
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lab_that_is_stopped_leaves_no_rank(number, tmp_path):
    words = ["lab", "-o", str(tmp_path), "--models", "mlp", "--networks", "loopback"]
    lab = subprocess.Popen(
        [sys.executable, "-m", "foretell", *words], stderr=subprocess.PIPE, text=True
    )
    ends = time.monotonic() + 60
    while not (ranks := _ranks_of(lab.pid)) and time.monotonic() < ends:
        time.sleep(0.2)
    assert ranks
    lab.send_signal(number)
    _, told = lab.communicate(timeout=30)
    assert lab.returncode == 130
    assert "stopped" in told
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
