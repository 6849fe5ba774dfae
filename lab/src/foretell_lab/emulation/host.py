"""What a rank's own thread pays for sending, beside its work: from bench, or as measured elsewhere.

`hooks` of a laboratory's machine.json says what taking gradients costs there (→ ranks.worker).
Laboratories of before have none: then the constants below count, in core seconds of the machine
they were measured on, times what the same piece of work takes here over what it took there.

Messages that meet stall. Gloo has a thread for each of two messages at once and one that listens;
with fewer processors a rank than threads, one of them waits for a lock whose holder waits for a
processor, until the kernel's slice is over:

    slice = 0.75 ms · (1 + log₂ min(processors, 8))        Linux, kernel/sched/fair.c
    stall = STALL · slice · log₂ ranks                     a message that meets another
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from statistics import mean
from typing import Any

from foretell_lab.emulation.table import Config

THREADS = 4  # of a rank that sends: its own, gloo's two and the one that listens
STALL = 2 / 3  # of a slice; found in `lab-pinned`, in the models that are not held back
# 2 ranks, loopback, EPYC, chains of 2 to 40 linear layers: their steps in buckets less plain ones
_PROBE = 21.6e-3  # core seconds of the fixed piece of work (→ ranks.worker) there, meanwhile
_HOOK, _WAIT = 12e-6, 150e-6  # a parameter, a step
_TAKEN, _COLD = 2.0, 0.4  # of a copy by itself: into a bucket, and in the update that reads it


@dataclass(frozen=True)
class Host:
    """What bench found of a rank's own costs, in seconds."""

    launch: float = 1.5e-4  # of the rank's own thread, to start and end one small message
    copy: float = 2.5e-10  # a byte, into a bucket
    cold: float = 0.0  # a byte, in the update: another core wrote it
    hook: float = 0.0  # a parameter whose gradient is taken
    wait: float = 0.0  # a step that has waited: a core is slow at first
    woke: float = 0.0  # how late the slowest rank wakes
    slow: float = 1.0  # a core's seconds beside other ranks, over those of the profile
    beside: float = 1.0  # of work while messages are on their way, over work alone
    stall: float = 0.0  # of a message that meets another


def host(machine: dict[str, Any], config: Config, slow: float, probe: float, woke: float) -> Host:
    """The costs of a rank; `probe` is what the fixed piece of work takes here, 0 if unknown."""
    copy, cold, hook, wait = _taking(machine, probe / _PROBE if probe else 1.0)
    work = [row["work"] for row in machine.get("beside", ())]
    return Host(
        _launch(machine, config), copy, cold, hook, wait, woke, slow,
        max(1.0, mean(work)) if work else 1.0, stall(machine["machine"], config.ranks),
    )  # fmt: skip


def stall(facts: dict[str, Any], ranks: int) -> float:
    """Seconds that a message which meets another takes longer; none with processors enough."""
    each = facts.get("each") or facts["cores"] / ranks
    if ranks == 1 or each >= THREADS:
        return 0.0
    return STALL * 0.75e-3 * (1 + log2(min(facts["cores"], 8))) * log2(ranks)


def _launch(machine: dict[str, Any], config: Config) -> float:
    small = [
        row.get("main_s", row["cpu_s"])
        for row in sorted(machine["links"], key=lambda row: row["bytes"])
        if (row["op"], row["ranks"], row["network"]) == ("all_reduce", config.ranks, config.network)
    ]
    return float(small[0]) if small else Host.launch


def _taking(machine: dict[str, Any], unit: float) -> tuple[float, float, float, float]:
    """Copy and update a byte, hook a parameter, wait a step."""
    found = machine.get("hooks")
    if found:
        return found["copy_s"], found["cold_s"], found["hook_s"], found["wait_s"]
    rates = machine.get("ceilings", {})
    rate = rates.get("taken") or rates.get("bytes", 0.0) / 2  # a copy reads and writes each byte
    copy, cold = (_TAKEN / rate, _COLD / rate) if rate else (Host.copy, 0.0)
    return copy, cold, _HOOK * unit, _WAIT * unit
