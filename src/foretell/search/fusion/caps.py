"""Buckets for DistributedDataParallel from one profile: `bucket_cap_mb_list=[…]`.

DDP takes gradients in the order they become ready and closes a bucket when it has reached its cap,
so any cut into neighbours can be said by a list of caps: the sizes of the buckets in MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import floor

import numpy as np
import numpy.typing as npt

from foretell.search.fusion.lanes import packed, talk
from foretell.search.fusion.problem import Wire

Array = npt.NDArray[np.float64]
DEFAULT = (1.0, 25.0)  # MiB: DDP's first bucket and all others (torch.nn.parallel.distributed)
SIZES = (1.0, 5.0, 10.0, 50.0, 100.0)  # MiB of even buckets that are tried besides
# Ops take longer in some steps than in the one that was profiled, most of all where sending needs
# the same cores: a cut has to do well for all of these.
STRETCHES = (0.8, 1.0, 1.25, 1.6)
_EVEN = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0)  # MiB
_MIB = 2**20


@dataclass(frozen=True)
class Caps:
    """A way to cut gradients into buckets, and what the step is predicted to take with it."""

    name: str
    caps: tuple[float, ...]  # MiB; empty where DDP is left as it is
    messages: int
    step: float

    @property
    def line(self) -> str:
        """What a person adds to the call of DistributedDataParallel."""
        return f"bucket_cap_mb_list=[{', '.join(f'{c:g}' for c in self.caps)}]"


@dataclass(frozen=True, eq=False)
class Profile:
    """What one rank showed: when each gradient was there, in order, and how long it computes."""

    ready: Array  # seconds from the start of the step, ascending
    sizes: Array  # bytes
    compute: float  # forward and backward
    update: float


def candidates(profile: Profile, wire: Wire) -> list[Caps]:
    """DDP as it is first, then others, best prediction first; each cut only once."""
    n = len(profile.ready)
    cuts = {"default": sized(profile, DEFAULT[1], DEFAULT[0])}
    cuts["searched"] = searched(profile, wire)
    cuts["one bucket"] = [0]
    cuts |= {f"{size:g} MiB": sized(profile, size) for size in SIZES}
    found: dict[tuple[int, ...], Caps] = {}
    for name, firsts in cuts.items():
        step = predicted(profile, wire, firsts)
        caps = () if name == "default" else as_caps(profile, firsts)
        found.setdefault(tuple(firsts), Caps(name, caps, len(firsts), step))
    default, *others = found.values()
    assert n, "a profile has gradients"
    return [default, *sorted(others, key=lambda c: c.step)]


def spread(profile: Profile, wire: Wire) -> tuple[float, float, float]:
    """Seconds of a step with DDP as it is: as profiled, and with ops as much shorter or longer."""
    firsts = sized(profile, DEFAULT[1], DEFAULT[0])
    worlds = (1.0, min(STRETCHES), max(STRETCHES))
    one, low, high = (predicted(_stretched(profile, s), wire, firsts) for s in worlds)
    return one, low, high


def _stretched(profile: Profile, times: float) -> Profile:
    return replace(profile, ready=profile.ready * times, compute=profile.compute * times)


def searched(profile: Profile, wire: Wire) -> list[int]:
    """Where buckets begin that lose least to the best there is, if ops take longer than profiled.

    Tried are the best cut for each stretch of the ops, and even ones.
    """
    worlds = [_stretched(profile, s) for s in STRETCHES]
    best = [packed(w.ready, w.sizes, wire.laws)[0].tolist() for w in worlds]
    cuts: list[list[int]] = [*best, *(sized(profile, size) for size in _EVEN)]
    steps = np.array([[predicted(w, wire, firsts) for w in worlds] for firsts in cuts])
    lost = (steps / steps.min(axis=0)).max(axis=1)
    return cuts[int(np.argmin(lost))]


def sized(profile: Profile, most: float, first: float | None = None) -> list[int]:
    """Where buckets of a size begin: each is closed when it has reached it."""
    firsts, held, limit = [0], 0.0, _MIB * (most if first is None else first)
    for k, size in enumerate(profile.sizes.tolist()):
        held += size
        if held >= limit and k + 1 < len(profile.sizes):
            firsts.append(k + 1)
            held, limit = 0.0, _MIB * most
    return firsts


def as_caps(profile: Profile, firsts: Sequence[int]) -> tuple[float, ...]:
    """Caps that DDP closes these buckets at: their sizes, rounded down by less than a number."""
    edges = [*firsts, len(profile.sizes)]
    sizes = [profile.sizes[a:b].sum() for a, b in pairwise(edges)]
    caps = [floor(size / _MIB * 1e6) / 1e6 for size in sizes]
    if len(caps) > 1 and caps[-1] <= caps[-2]:  # what is left over closes the last bucket anyway
        caps.pop()
    while len(caps) > 1 and caps[-1] == caps[-2]:  # DDP's last cap counts for all that follow
        caps.pop()
    return tuple(caps)


def predicted(profile: Profile, wire: Wire, firsts: Sequence[int]) -> float:
    """Seconds of a step with buckets that begin there."""
    many = len(firsts)
    first = np.array([*firsts, len(profile.sizes)], np.int64)
    member, parts = np.arange(len(profile.sizes)), np.ones(many, np.int64)
    return float(
        talk(
            profile.ready, profile.sizes, first, member, parts, wire.laws, profile.compute,
            profile.update, False, np.zeros(many), np.zeros(many), 0,
        )
    )  # fmt: skip
