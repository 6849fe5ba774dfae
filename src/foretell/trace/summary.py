"""What a trace file holds, before any graph is made of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretell.trace.events import What
from foretell.trace.read import Recording, recognised, recorded_ranks
from foretell.trace.words import is_collective


@dataclass(frozen=True)
class Summary:
    """What is in a file, folder or archive; counts are those of the first rank."""

    source: str
    form: str  # `events`, `execution`, `chakra` or `chakra json`
    ranks: tuple[int, ...]
    events: int = 0
    operators: int = 0
    calls: int = 0
    kernels: int = 0
    collectives: int = 0
    threads: int = 0
    streams: int = 0
    steps: tuple[tuple[int, float], ...] = ()  # number and measured seconds of each
    found_by: str = ""  # how steps were told apart
    device: str = ""
    has_shapes: bool = False
    has_modules: bool = False
    has_waits: bool = False  # says which stream a synchronisation waited for
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = [f"{self.form}, {len(self.ranks)} rank{'s' * (len(self.ranks) != 1)}", self.device]
        lines = [f"{self.source}: {', '.join(filter(None, what))}"]
        if self.form == "events":
            lines += [
                f"  {self.operators} operators and {self.calls} calls on {self.threads} threads",
                f"  {self.kernels} kernels and copies on {self.streams} streams, "
                f"{self.collectives} of them collectives",
                *(f"  step {n}: {1e3 * s:.3f} ms" for n, s in self.steps),
            ]
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])


def summary(path: str | os.PathLike[str]) -> Summary:
    """What a path holds."""
    files = recognised(path)
    name = os.path.basename(os.fspath(path))
    if files[0].form != "events":
        return Summary(name, files[0].form, tuple(range(len(files))))
    return _of_events(name, recorded_ranks(files, path))


def _of_events(name: str, recordings: Sequence[Recording]) -> Summary:
    first = recordings[0]
    e = first.events
    kernels = e.name[first.work.event].tolist()
    comm = {k for k in set(kernels) if is_collective(e.texts[k])}
    devices = e.facts.get("deviceProperties")
    known = devices[0].get("name") if isinstance(devices, list) and devices else ""
    steps = zip(first.steps.number.tolist(), first.seconds.tolist(), strict=True)
    return Summary(
        name,
        "events",
        tuple(r.rank for r in recordings),
        events=len(e),
        operators=int((e.what == What.OP).sum()),
        calls=int((e.what == What.CALL).sum()),
        kernels=len(kernels),
        collectives=sum(k in comm for k in kernels),
        threads=len(np.unique(e.place[e.is_(What.OP, What.CALL)])),
        streams=len(np.unique(first.work.stream)),
        steps=tuple(steps),
        found_by=first.steps.found_by,
        device=str(known),
        has_shapes=bool(e.shape.any()),
        has_modules=bool((e.what == What.MODULE).any() or e.module.any()),
        has_waits=bool((e.what == What.WAIT).any()),
        notes=tuple(dict.fromkeys(n for r in recordings for n in r.events.notes)),
    )
