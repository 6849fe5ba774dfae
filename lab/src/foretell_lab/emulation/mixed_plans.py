"""Plans for ranks of unequal speed, written out for a model and what its ranks were found worth.

| name | what |
|---|---|
| `even` | as many samples for each rank, gradients in buckets |
| `proportional` | samples by speed |
| `server` | samples by speed; rank 0 adds gradients up and updates for everyone |
| `factors` | samples by speed; linear layers whose factors are fewer bytes send these |
| `stages` | each rank has layers of its own, as many as its speed allows; four micro-batches |
| `apart` | from the layer with most parameters on, the fastest rank alone; all before by speed |

All have the same samples in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

from foretell.errors import unknown
from foretell.plan import Plan
from foretell_lab.emulation.pieces import pieces

Profile = dict[str, Any]
_BATCHES = 4  # micro-batches of stages: fewer leave ranks idle, more have no samples left


def plan(name: str, profile: Profile, speeds: Sequence[float]) -> Plan | None:
    """The plan of a name; None where the model or the number of ranks has no such plan."""
    if name not in PLANS:
        raise unknown("plan of the lab", name, PLANS)
    return PLANS[name](profile, speeds)


def by_speed(speeds: Sequence[float], batch: int) -> tuple[int, ...]:
    """Whole samples in proportion to speeds, one at least: those due most get what is left."""
    due = [batch * s / sum(speeds) for s in speeds]
    found = [max(1, int(d)) for d in due]
    while sum(found) < batch:
        found[max(range(len(due)), key=lambda r: (due[r] - found[r], -r))] += 1
    while sum(found) > batch:
        several = [r for r in range(len(due)) if found[r] > 1]
        found[max(several, key=lambda r: (found[r] - due[r], -r))] -= 1
    return tuple(found)


def _batch(profile: Profile, speeds: Sequence[float]) -> int:
    return int(profile["samples"]) * len(speeds)


def _even(profile: Profile, speeds: Sequence[float]) -> Plan:
    return Plan(dp=len(speeds), global_batch=_batch(profile, speeds))


def _proportional(profile: Profile, speeds: Sequence[float]) -> Plan:
    return _even(profile, speeds).but(shares=by_speed(speeds, _batch(profile, speeds)))


def _server(profile: Profile, speeds: Sequence[float]) -> Plan:
    served = tuple((name, "ps:0") for name in profile["parameters"])
    return _proportional(profile, speeds).but(sync=served)


def _factors(profile: Profile, speeds: Sequence[float]) -> Plan | None:
    rows, chosen = _batch(profile, speeds), []
    for layer, (width, out, each) in profile["linear"].items():
        if rows * each * (width + out) < 2 * width * out:
            chosen += [n for n in profile["parameters"] if n.rpartition(".")[0] == layer]
    if not chosen:
        return None
    return _proportional(profile, speeds).but(sync=tuple((name, "factors") for name in chosen))


def _stages(profile: Profile, speeds: Sequence[float]) -> Plan | None:
    """The cut whose slowest stage is done first."""
    batch, firsts = _batch(profile, speeds), _firsts(profile)
    if len(firsts) < len(speeds) or batch < _BATCHES:
        return None
    took = _took(profile, batch // _BATCHES)

    def worst(cut: tuple[int, ...]) -> float:
        ends = [0, *cut, len(firsts)]
        each = [sum(took[n] for n in firsts[a:b]) for a, b in pairwise(ends)]
        return max(t / s for t, s in zip(each, speeds, strict=True))

    best = min(combinations(range(1, len(firsts)), len(speeds) - 1), key=worst)
    starts = [firsts[k] for k in (0, *best)]
    assigned = [{rank: batch} for rank in range(len(speeds))]
    return _grouped(profile, starts, assigned).but(micro_batch=-(-batch // _BATCHES))


def _apart(profile: Profile, speeds: Sequence[float]) -> Plan | None:
    sizes = dict.fromkeys(profile["handed"], 0)
    for name, size in profile["parameters"].items():
        layer = max((n for n in sizes if name.startswith(f"{n}.")), key=len, default="")
        sizes[layer] = sizes.get(layer, 0) + size
    largest = max(reversed(sizes), key=lambda n: sizes[n], default="")
    if not profile["handed"] or largest == _firsts(profile)[0]:
        return None
    batch, fastest = _batch(profile, speeds), max(range(len(speeds)), key=lambda r: speeds[r])
    shares = dict(enumerate(by_speed(speeds, batch)))
    return _grouped(profile, [_firsts(profile)[0], largest], [shares, {fastest: batch}])


def _firsts(profile: Profile) -> list[str]:
    """Layers with parameters: where a run of layers may begin."""
    names = list(profile["parameters"])
    return [n for n in profile["handed"] if any(p.startswith(f"{n}.") for p in names)]


def _took(profile: Profile, samples: int) -> dict[str, float]:
    """Seconds of each layer with parameters, both ways, what follows it included."""
    found = pieces(profile, samples)
    out = dict.fromkeys(_firsts(profile), 0.0)
    at = next(iter(out))
    for name, seconds in found.layers:
        at = name if name in out else at
        out[at] += seconds
    for name, seconds in found.backward:
        out[max((n for n in out if name.startswith(f"{n}.")), key=len)] += seconds
    return out


def _grouped(profile: Profile, starts: list[str], assigned: list[dict[int, int]]) -> Plan:
    names = list(profile["handed"])
    ends = [names[names.index(n) - 1] for n in starts[1:]] + [names[-1]]
    rows = tuple(
        (first, last, "all-reduce", *(f"{r}:{n}" for r, n in mine.items()))
        for first, last, mine in zip(starts, ends, assigned, strict=True)
    )
    return Plan(groups=rows, global_batch=sum(assigned[0].values()))


PLANS: dict[str, Callable[[Profile, Sequence[float]], Plan | None]] = {
    "even": _even,
    "proportional": _proportional,
    "server": _server,
    "factors": _factors,
    "stages": _stages,
    "apart": _apart,
}
