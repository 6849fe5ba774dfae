"""A pool of ranks over loopback, its faults, namespaces, and the links measured with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from foretell.cluster import load
from foretell.errors import InputError
from foretell.pytorch.ranks import links
from foretell.pytorch.ranks.machine import write_cluster, write_links
from foretell.pytorch.ranks.pool import Pool
from foretell.pytorch.ranks.wires import Wires, network, refusal

pytestmark = pytest.mark.filterwarnings("ignore")
WHY = refusal()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with Pool(2, network("loopback"), tmp_path_factory.mktemp("pool") / "log") as found:
        yield found


def test_links_are_measured_and_make_a_cluster(pool, tmp_path):
    rows = links.measure_links(pool, "loopback", (1024, 262144, 1048576), ("all_reduce",))
    machine = {"machine": links.this_machine(), "links": rows, "fits": links.fit_links(rows)}
    assert all(0 < row["seconds"] < 5 for row in machine["links"])
    (fit,) = machine["fits"]
    assert fit["bandwidth"] > 1e6
    path = write_cluster(tmp_path, machine, "loopback", 2)
    cluster = load(str(path))
    assert cluster.size == 2
    assert cluster.levels((0, 1))[0].bandwidth == pytest.approx(fit["bandwidth"], rel=1e-3)
    assert len(write_links(tmp_path, machine).read_text().splitlines()) == 4


def test_work_and_messages_are_measured_beside_each_other(pool):
    found = links.measure_beside(pool, "loopback")
    assert (found["network"], found["ranks"]) == ("loopback", 2)
    assert found["work"] > 0.3
    assert found["wire"] > 0.1


def test_what_taking_gradients_costs_is_measured(pool):
    found = links.measure_hooks(pool)
    assert set(found) == {"hook_s", "wait_s", "copy_s", "cold_s"}
    assert all(0 <= value < 0.05 for value in found.values())  # core seconds
    assert found["hook_s"] + found["wait_s"] > 0


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
def test_what_a_killed_process_left_is_taken_away():
    code = "from foretell.pytorch.ranks.wires import Wires; import os; w = Wires(1, 'veth');"
    code += "w.__enter__(); print(w.tag, flush=True); os._exit(1)"
    tag = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    ).stdout.strip()
    time.sleep(0.1)
    listed = ["ip", "netns", "list"]
    assert tag in subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    with Wires(1, "veth"):
        assert tag not in subprocess.run(listed, capture_output=True, text=True, check=True).stdout


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
