"""Ranks that stay: started once for a kind of network, then given one job after another.

A job goes to every rank at once and comes back from every rank, or the pool is broken: a rank that
failed, died or took too long is named, and all are ended by their ids.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from foretell.errors import InputError
from foretell.pytorch.intake.request import free_port
from foretell.pytorch.ranks.pin import cores_of_ranks, kept_to
from foretell.pytorch.ranks.wires import Network, Wires

_START = 180.0  # seconds to import torch and meet, on a busy machine
WORKER = "foretell.pytorch.ranks.worker"  # the module that every rank runs
_PORT = 29611  # inside a namespace nothing else has it


class Pool:
    """A pool of ranks on one kind of link; used with `with`."""

    def __init__(
        self, ranks: int, network: Network, log: Path, *, pin: bool = False, worker: str = WORKER
    ) -> None:
        self.ranks, self.log, self.worker = ranks, log, worker
        self.cores = cores_of_ranks(ranks) if pin else []  # none: where the kernel puts it
        self.wires = Wires(ranks, network.wires)
        self.first = network
        self.processes: list[subprocess.Popen[str]] = []
        self.replies: list[IO[str]] = []
        self.is_broken = False

    def __enter__(self) -> Self:
        try:
            self.wires.__enter__()
            if self.first.wires == "tap":  # its links are there only once it is shaped
                self.wires.shape(self.first)
            port = _PORT if self.wires.kind != "lo" else free_port()
            for rank in range(self.ranks):
                self._start(rank, port)
            self._gather(_START, "start")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def shape(self, network: Network) -> None:
        """Set every link's rate; ranks stay."""
        self.wires.shape(network)

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [process.pid for process in self.processes]

    def ask(self, job: dict[str, Any], each: list[dict[str, Any]] | None = None,
            seconds: float = 60.0) -> list[dict[str, Any]]:  # fmt: skip
        """Give all ranks a job, with what is different for `each`; their answers by rank."""
        if self.is_broken:
            raise InputError("these ranks were ended", hint="start another")
        own = each or [{}] * self.ranks
        for process, more in zip(self.processes, own, strict=True):
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # its silence is found when answers are gathered
                process.stdin.write(json.dumps(job | more) + "\n")
                process.stdin.flush()
        return self._gather(seconds, f"{job['do']} {job.get('model', job.get('op', ''))}".strip())

    def close(self) -> None:
        """End every rank and take the links away; also what is half made."""
        self.is_broken = True
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
        for reply in self.replies:
            reply.close()
        self.processes, self.replies = [], []
        self.wires.close()

    def _start(self, rank: int, port: int) -> None:
        read, write = os.pipe()
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.wires.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": self.wires.interface,
            "FORETELL_RANK_REPLY": str(write),
            "OMP_NUM_THREADS": "1",
        }
        command = [*self.wires.prefix(rank), sys.executable, "-m", self.worker]
        own = self.cores[rank] if self.cores else None
        with self.log.open("ab") as log, kept_to(own):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, text=True,
                pass_fds=[write], start_new_session=True,
            )  # fmt: skip
        os.close(write)
        self.processes.append(process)
        self.replies.append(os.fdopen(read))

    def _gather(self, seconds: float, what: str) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        ends = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for rank, reply in enumerate(self.replies):
                selector.register(reply, selectors.EVENT_READ, rank)
            while len(found) < self.ranks:
                ready = selector.select(max(0.0, ends - time.monotonic()))
                if not ready:
                    raise self._broken(sorted(set(range(self.ranks)) - set(found)), what, "is late")
                for key, _ in ready:
                    line = self.replies[key.data].readline()
                    if not line:
                        raise self._broken([key.data], what, "died")
                    found[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        failed = [r for r, answer in sorted(found.items()) if "error" in answer]
        if failed:
            raise self._broken(failed[:1], what, f"failed: {found[failed[0]]['error']}")
        return [found[rank] for rank in range(self.ranks)]

    def _broken(self, ranks: list[int], what: str, how: str) -> InputError:
        self.close()
        names = ", ".join(map(str, ranks))
        return InputError(
            f"rank {names} {how} in `{what}`", hint=f"what ranks printed is in {self.log}"
        )
