"""Plans of the laboratory by short names, written out for a model and a number of ranks.

| name | what |
|---|---|
| `ddp` | gradients in buckets of 25 MiB, the first of 1 MiB, as DDP |
| `1mb`, `100mb` | buckets of that size |
| `one` | one bucket for all |
| `layers` | one bucket a layer |
| `late` | as `ddp`, but sent only when the backward is over |
| `accumulate` | two micro-batches, gradients sent once |
| `uneven` | samples 3 : 1 between the first and the second half of the ranks |
| `server` | rank 0 adds gradients up and updates for everyone |
| `sharded` | each parameter updated by one of the ranks (ZeRO 1) |
| `factors` | linear layers send their factors, the rest as `ddp` |

Anything with a `=` is a plan as `foretell run` takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretell.errors import InputError, unknown
from foretell.plan import Plan

Profile = dict[str, Any]


def plan(name: str, profile: Profile, ranks: int) -> Plan:
    """The plan that a name or a text stands for."""
    if "=" in name:
        found = Plan.parse(name)
        if found.ranks != ranks:
            raise InputError(f"`{name}` is for {found.ranks} ranks, not {ranks}")
        return found
    if name not in PLANS:
        raise unknown("plan of the lab", name, PLANS)
    return Plan(dp=1) if ranks == 1 else PLANS[name](profile, ranks)


def applies(name: str, profile: Profile, ranks: int) -> bool:
    """Whether a plan is anything of its own for this model: with one rank all are the same."""
    if "=" in name:
        return Plan.parse(name).ranks == ranks
    if ranks == 1:
        return name == "ddp"
    return name != "factors" or bool(profile["linear"])


def samples(made: Plan, profile: Profile) -> list[int]:
    """Samples of each rank's step."""
    return list(made.shares) or [int(profile["samples"])] * made.ranks


def _one(profile: Profile, ranks: int) -> Plan:
    return Plan(dp=ranks, buckets=(tuple(reversed(profile["parameters"])),))


def _layers(profile: Profile, ranks: int) -> Plan:
    found: dict[str, list[str]] = {}
    for name in reversed(profile["parameters"]):
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return Plan(dp=ranks, buckets=tuple(tuple(names) for names in found.values()))


def _accumulate(profile: Profile, ranks: int) -> Plan:
    return Plan(dp=ranks, micro_batch=int(profile["samples"]) // 2)


def _uneven(profile: Profile, ranks: int) -> Plan:
    mean, heavy = int(profile["samples"]), ranks // 2
    more = [mean * 3 // 2] * heavy
    less = [mean // 2] * heavy
    return Plan(dp=ranks, shares=tuple(more + [mean] * (ranks - 2 * heavy) + less))


def _server(profile: Profile, ranks: int) -> Plan:
    return Plan(dp=ranks, sync=tuple((name, "ps:0") for name in profile["parameters"]))


def _factors(profile: Profile, ranks: int) -> Plan:
    names = [n for n in profile["parameters"] if n.rpartition(".")[0] in profile["linear"]]
    return Plan(dp=ranks, sync=tuple((name, "factors") for name in names))


PLANS: dict[str, Callable[[Profile, int], Plan]] = {
    "ddp": lambda _, ranks: Plan(dp=ranks),
    "1mb": lambda _, ranks: Plan(dp=ranks, bucket_mb=1.0),
    "100mb": lambda _, ranks: Plan(dp=ranks, bucket_mb=100.0),
    "one": _one,
    "layers": _layers,
    "late": lambda _, ranks: Plan(dp=ranks, overlap=False),
    "accumulate": _accumulate,
    "uneven": _uneven,
    "server": _server,
    "sharded": lambda _, ranks: Plan(dp=ranks, zero=1),
    "factors": _factors,
}
