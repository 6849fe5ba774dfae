"""Communication between blocks: a price for every message, beside the compute or instead of it.

A message goes from a block to one that waits for it on other devices. Where links run beside the
compute it is a lag; where they do not, it is a block of its own that holds both ends. Nothing here
knows clusters: the price is a function of the two blocks.
"""

from collections.abc import Callable
from dataclasses import replace

from foretell.search.schedule.problem import Block, Problem, Wait

Price = Callable[[Block, Block], float]  # seconds of the message from one block to another


def linked(problem: Problem, price: Price, *, overlap: bool = True) -> Problem:
    """The problem with its messages priced."""
    if overlap:
        return replace(problem, waits=tuple(_lagged(problem, w, price) for w in problem.waits))
    blocks, waits = list(problem.blocks), []
    number = max(b.id for b in blocks) + 1
    for wait in problem.waits:
        seconds = _seconds(problem, wait, price)
        if not seconds:
            waits.append(wait)
            continue
        place = len(blocks)
        ends = problem.blocks[wait.on].devices + problem.blocks[wait.block].devices
        blocks.append(Block(number + place, "C", tuple(sorted(set(ends))), seconds))
        waits += [Wait(place, wait.on), Wait(wait.block, place, wait.lag)]
    return replace(problem, blocks=tuple(blocks), waits=tuple(waits))


def _lagged(problem: Problem, wait: Wait, price: Price) -> Wait:
    return replace(wait, lag=wait.lag + _seconds(problem, wait, price))


def _seconds(problem: Problem, wait: Wait, price: Price) -> float:
    first, then = problem.blocks[wait.on], problem.blocks[wait.block]
    return 0.0 if set(then.devices) <= set(first.devices) else price(first, then)
