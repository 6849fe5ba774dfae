"""Communication between blocks: a price for every message, and what it occupies meanwhile.

A message goes from a block to one that waits for it on other devices.

    beside   it runs beside the compute on a link nobody else uses: a lag
    link     it runs beside the compute; messages from one device to another take turns: a block of
             its own on a device that stands for the link
    stop     both ends stand still: a block of its own that holds them

Nothing here knows clusters: the price is a function of the two blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from foretell.errors import unknown
from foretell.search.schedule.problem import UNLIMITED, Block, Problem, Wait

Price = Callable[[Block, Block], float]  # seconds of the message from one block to another
Overlap = Literal["beside", "link", "stop"]
OVERLAPS = ("beside", "link", "stop")


def linked(problem: Problem, price: Price, *, overlap: Overlap | bool = "beside") -> Problem:
    """The problem with its messages priced; `overlap` may be said as yes (beside) or no (stop)."""
    if isinstance(overlap, bool):
        overlap = "beside" if overlap else "stop"
    if overlap not in OVERLAPS:
        raise unknown("way to overlap messages", overlap, OVERLAPS)
    if overlap == "beside":
        return replace(problem, waits=tuple(_lagged(problem, w, price) for w in problem.waits))
    blocks, waits = list(problem.blocks), []
    number = max(b.id for b in blocks) + 1
    links: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for wait in problem.waits:
        seconds = _seconds(problem, wait, price)
        if not seconds:
            waits.append(wait)
            continue
        place = len(blocks)
        ends = problem.blocks[wait.on].devices, problem.blocks[wait.block].devices
        held = tuple(sorted({*ends[0], *ends[1]}))
        if overlap == "link":
            held = (links.setdefault(ends, problem.num_devices + len(links)),)
        blocks.append(Block(number + place, "C", held, seconds))
        waits += [Wait(place, wait.on), Wait(wait.block, place, wait.lag)]
    more = len(links)
    return replace(
        problem,
        blocks=tuple(blocks),
        waits=tuple(waits),
        num_devices=problem.num_devices + more,
        capacity=(*problem.capacity, *(UNLIMITED,) * more),
        speed=(*problem.speed, *(1.0,) * more),
    )


def occupying(problem: Problem, overlap: Overlap) -> Problem:
    """The problem with its lags as messages that hold a link, or both of their ends."""
    took = {(w.on, w.block): w.lag for w in problem.waits}
    place = {b.id: i for i, b in enumerate(problem.blocks)}
    bare = replace(problem, waits=tuple(_bare(problem, w) for w in problem.waits))
    return linked(bare, lambda a, b: took[place[a.id], place[b.id]], overlap=overlap)


def _bare(problem: Problem, wait: Wait) -> Wait:
    """A wait without its message; a delay on the same devices is none."""
    ends = (set(problem.blocks[i].devices) for i in (wait.block, wait.on))
    return wait if set.issubset(*ends) else replace(wait, lag=0.0)


def _lagged(problem: Problem, wait: Wait, price: Price) -> Wait:
    return replace(wait, lag=wait.lag + _seconds(problem, wait, price))


def _seconds(problem: Problem, wait: Wait, price: Price) -> float:
    first, then = problem.blocks[wait.on], problem.blocks[wait.block]
    return 0.0 if set(then.devices) <= set(first.devices) else price(first, then)
