"""A matrix on a real Ray cluster, with the worker that measures killed half-way."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from foretell.pool import opened
from foretell_lab.emulation import remote, table
from foretell_lab.emulation.matrix import MatrixRequest
from foretell_lab.emulation.predicted import Known, compared
from foretell_lab.emulation.table import Config, Row

pytest.importorskip("ray")
QUERIES = MatrixRequest((Config("embedding", "ddp", "loopback", 1),), rounds=3, steps=1, warmup=0)


class Watch(threading.Thread):
    """Kills the worker at its task as soon as there is a row."""

    def __init__(self, rows: Path) -> None:
        super().__init__(daemon=True)
        self.rows, self.killed, self.kept = rows, 0, ""

    def run(self) -> None:
        ends = time.monotonic() + 60
        while time.monotonic() < ends and not self.killed:
            time.sleep(0.002)
            if self.rows.exists() and self.rows.read_text().count("\n") > 1:
                self._kill()

    def _kill(self) -> None:
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if place.read_bytes().startswith(b"ray::_done"):
                    self.killed = int(place.parent.name)
                    os.kill(self.killed, signal.SIGKILL)
                    self.kept = self.rows.read_text()
            except OSError:
                continue


@pytest.mark.slow
def test_a_killed_worker_goes_on_where_it_was(tmp_path):
    folder = tmp_path / "lab"
    with opened(on_ray="local") as pool:
        key = remote.key_of(folder)
        watch = Watch(remote.here(key) / table.ROWS)
        watch.start()
        try:
            answer = []
            done = remote.run_on(pool, folder, QUERIES, lambda words, share: answer.append(words))
        finally:
            shutil.rmtree(remote.here(key), ignore_errors=True)
    assert watch.killed
    assert done["died"] == 1
    assert answer == ["1 of 1 models"]
    assert Path(done["folders"][0]) == folder
    rows = table.rows(folder)
    assert [row.round for row in rows] == [0, 1, 2]
    assert (folder / table.ROWS).read_text().startswith(watch.kept)
    assert compared(Known.read(folder), rows)[0].runs == 3


def test_several_machines_have_folders_of_their_own(tmp_path):
    row = Row("embedding", "ddp", "loopback", 1, "1", 0, 0.1, 0.1, 0.1, 1, 0.1, 1.0, 0.0)
    hosts = iter("ab")

    class Two:
        died, size = 0, 2

        def map(self, work, items, tell, *, by_machine):
            assert by_machine
            assert [a.configs[0].model for _, a in items] == ["embedding", "mlp"]
            counts = {"configs": 1, "done": 1, "failed": 0, "left": 0}
            return [
                {"host": next(hosts), "why": "", "done": counts, "profiles": {}, "machine": {},
                 "rows": [vars(row) | {"model": query.configs[0].model}]}
                for _, query in items
            ]  # fmt: skip

    configs = tuple(Config(m, "ddp", "loopback", 1) for m in ("embedding", "mlp"))
    done = remote.run_on(Two(), tmp_path, MatrixRequest(configs))
    assert done["folders"] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert done["done"] == 2
    assert [r.model for r in table.rows(tmp_path / "b")] == ["mlp"]
