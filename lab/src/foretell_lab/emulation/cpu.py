"""Ranks of unequal speed on one machine: each may use a part of a core and no more.

The kernel's own quota does it (cgroups of either version): in every period a rank may run so long,
then waits for the next. How much slower that makes it is not what the quota says, since a slice of
time that was begun is finished: it has to be measured (→ mixed.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from foretell.errors import InputError

_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
_PERIOD = 10_000  # microseconds: short against a step, long against a switch of threads
_WEIGHT = 20  # times that of one other process: what a rank was promised it has, and no more
_NUMBERS = count()  # of pools of this process
_HINT = "leave the shares away: every rank then has what the machine gives it"


def refusal() -> str:
    """Why no quotas can be given here, or nothing."""
    if os.geteuid() != 0:
        return "quotas of a core need the rights of root"
    return "" if _root() else "no cgroup here limits the time of a core"


def parse(text: str, ranks: int) -> tuple[float, ...]:
    """Shares of a core by rank: `0.4+0.2`, the last for all that follow; 0 for no limit."""
    try:
        given = [float(part) for part in text.split("+")]
    except ValueError:
        given = []
    if not given or not all(0 <= share <= 64 for share in given):
        raise InputError(f"`{text}` of a core", hint="write 0.4, or 0.4+0.2 for each rank")
    return tuple(given[min(rank, len(given) - 1)] for rank in range(ranks))


class Quotas:
    """A control group for each of some processes, gone at the end; used with `with`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids, self.folders = list(pids), list[Path]()

    def __enter__(self) -> Self:
        root = _root()
        if root is None:
            raise InputError(refusal() or "no quotas can be given here", hint=_HINT)
        _sweep(root)
        number = next(_NUMBERS)
        for rank, pid in enumerate(self.pids):
            folder = root / f"fl{os.getpid()}cpu{number}r{rank}"
            folder.mkdir(exist_ok=True)
            self.folders.append(folder)
            (folder / "cgroup.procs").write_text(str(pid))
        return self

    def limit(self, shares: Sequence[float]) -> None:
        """Give every process its share of a core; 0 for all it can get."""
        for folder, share in zip(self.folders, shares, strict=True):
            if (folder / "cpu.max").exists():
                quota = str(round(_PERIOD * share)) if share else "max"
                (folder / "cpu.max").write_text(f"{quota} {_PERIOD}")
                (folder / "cpu.weight").write_text(str(100 * _WEIGHT if share else 100))
            else:
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
                quota = str(round(_PERIOD * share)) if share else "-1"
                (folder / "cpu.cfs_quota_us").write_text(quota)
                (folder / "cpu.shares").write_text(str(1024 * _WEIGHT if share else 1024))

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        for folder in self.folders:
            for line in (folder / "cgroup.procs").read_text().split():
                with suppress(OSError):  # it has ended
                    (folder.parent / "cgroup.procs").write_text(line)
            with suppress(OSError):
                folder.rmdir()
        self.folders = []


def _sweep(root: Path) -> None:
    """Take away what labs left behind whose process is gone."""
    for folder in root.glob("fl*cpu*r*"):
        pid = folder.name[2:].partition("cpu")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            with suppress(OSError):  # a rank of it is still ending
                folder.rmdir()


def _root() -> Path | None:
    """Where groups with a quota can be made."""
    for root in _ROOTS:
        probe = root / f"fl{os.getpid()}probe"
        try:
            probe.mkdir()
        except OSError:
            continue
        able = any((probe / name).exists() for name in ("cpu.max", "cpu.cfs_quota_us"))
        probe.rmdir()
        if able:
            return root
    return None
