"""The laboratory itself, on real ranks over loopback: rows, notes, faults."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretell.cli.compare import timeline_of
from foretell.errors import InputError
from foretell.pytorch.ranks import links
from foretell.pytorch.ranks.machine import Pools
from foretell.pytorch.ranks.pool import Pool
from foretell.pytorch.ranks.wires import network
from foretell.simulate.compare import compare
from foretell_lab.cli.lab import command
from foretell_lab.emulation import matrix, table
from foretell_lab.emulation.matrix import MatrixRequest, permitted
from foretell_lab.emulation.table import Config

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    log = tmp_path_factory.mktemp("pool") / "log"
    with Pool(2, network("loopback"), log, worker=matrix.WORKER) as found:
        yield found


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory):
    """A lab of two plans, its profile and links measured with ranks that are there already."""
    place = tmp_path_factory.mktemp("lab")
    lab = Pools(place)
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
    query = MatrixRequest((), steps=2, warmup=1, notes=True)
    for number, plan in enumerate(("ddp", "layers")):
        config = Config("embedding", plan, "loopback", 2)
        matrix._once(lab, config, profiles["embedding"], query, number, 0.0)
    return place


def test_rows_are_plausible(folder):
    rows = table.rows(folder)
    assert [r.plan for r in rows] == ["ddp", "layers"]
    assert all(0 < r.low_s <= r.step_s <= r.high_s for r in rows)
    assert all(r.stretch > 0 and r.cpu_s > 0 for r in rows)


def test_a_profile_has_every_parameter_and_its_time(folder):
    profile = table.read(folder / table.PROFILES)["embedding"]
    step = profile["steps"]["256"]
    assert {name for name, _ in step["backward"]} == set(profile["parameters"])
    assert step["forward"] > 0
    assert set(profile["linear"]) == {"body.0", "body.2"}
    two = profile["threads"]["2"]["256"]
    assert [name for name, _ in two["backward"]] == [name for name, _ in step["backward"]]
    assert two["forward"] > 0


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
    monkeypatch.setattr("foretell.pytorch.ranks.machine.refusal", lambda: "no rights")
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


def test_a_wrong_model_is_recognised_by_name(pool, folder):
    with pytest.raises(InputError, match=r"rank 0 failed: .*`mpl`"):
        pool.ask({"do": "profile", "model": "mpl", "samples": [], "steps": 1})
    assert pool.is_broken  # so this comes last of those that share it


def _ranks_of(pid):
    """Processes of ranks whose parent this is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
            line = (path.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(words[1]) == pid and "foretell_lab.emulation.rank" in line:
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lab_that_is_stopped_leaves_no_rank(number, tmp_path):
    words = ["lab", "-o", str(tmp_path), "--models", "mlp", "--networks", "loopback"]
    lab = subprocess.Popen(
        [sys.executable, "-m", "foretell", *words], stderr=subprocess.PIPE, text=True
    )
    while not (ranks := _ranks_of(lab.pid)) and lab.poll() is None:
        time.sleep(0.2)
    assert ranks
    lab.send_signal(number)
    _, told = lab.communicate()
    assert lab.returncode == 130
    assert "stopped" in told
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_more_ranks_than_cores_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    result = CliRunner().invoke(command, ["-o", str(tmp_path), "--ranks", "4", "--pin"])
    with pytest.raises(InputError, match="--pin of 4 ranks"):
        raise result.exception
