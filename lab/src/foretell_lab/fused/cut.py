"""Regions cut from a captured step: groups as a compiler makes them, and random parts of those.

A region grows from one op along data edges as long as every new op may join (→ `may_fuse`), the
region stays convex (no path leaves it and comes back) and it is no larger than asked. The tensors
that enter come ordered by when they were made, the latest first: that one is still in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from random import Random

from foretell.cost.fused_regions import is_fusible, kind_of, may_fuse, word_of
from foretell_lab.fused.capture import Captured, Step
from foretell_lab.fused.region import Encoded, Entry, Op, Region, references

_FREE = ("view", "constant", "input")  # kinds without work of their own
_PRODUCTS = 0.08  # share of regions that begin with a product
_MOST = 3 << 30  # bytes of one region's tensors


@dataclass(frozen=True)
class Net:
    """A captured step with its edges, and who can reach whom as bit sets."""

    captured: Captured

    @cached_property
    def kinds(self) -> list[str]:
        return [kind_of(word_of(s.name)) if s.name else "input" for s in self.captured.steps]

    @cached_property
    def before(self) -> list[list[int]]:
        """The values each op reads."""
        steps = self.captured.steps
        return [sorted({v for v, _ in references([s.args, s.kwargs])}) for s in steps]

    @cached_property
    def after(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.captured.steps]
        for i, values in enumerate(self.before):
            for v in values:
                found[v].append(i)
        return found

    @cached_property
    def ancestors(self) -> list[int]:
        found: list[int] = []
        for values in self.before:
            bits = 0
            for v in values:
                bits |= found[v] | (1 << v)
            found.append(bits)
        return found

    def looped(self, i: int) -> int:
        """Places an op visits: the most of what it reads and gives."""
        step = self.captured.steps[i]
        sizes = [prod(m.shape) for m in step.results]
        for value, result in references([step.args, step.kwargs]):
            sizes.append(prod(self.captured.steps[value].results[max(result, 0)].shape))
        return max(sizes, default=1)

    def made(self, i: int) -> int:
        return max((prod(m.shape) for m in self.captured.steps[i].results), default=1)


def regions(net: Net, chance: Random, family: str, count: int) -> Iterator[Region]:
    """Up to `count` regions: whole groups first met at random ops, and smaller parts of them."""
    busy = [i for i, kind in enumerate(net.kinds) if kind not in _FREE and is_fusible(kind)]
    products = [i for i in busy if net.kinds[i] == "template"]
    starts = [i for i in busy if net.kinds[i] != "template"]
    for _ in range(count if starts else 0):
        is_product = bool(products) and chance.random() < _PRODUCTS
        start = chance.choice(products if is_product else starts)
        size = chance.choice((2, 3, 4, 5, 6, 8, 10, 14, 20, 40, 40))
        loose = chance.random() < 0.1
        chosen = grow(net, start, size, chance, loose=loose)
        if worthwhile(net, chosen):
            yield cut(net, chosen, family)


def grow(net: Net, start: int, size: int, chance: Random, *, loose: bool) -> set[int]:
    """A convex region around one op; `loose` joins ops that loop over other places too."""
    chosen, refused = {start}, set[int]()
    while _weight(net, chosen) < size:
        border = [n for n in _border(net, chosen) if n not in refused]
        if not border:
            break
        new = chance.choice(border)
        grown = chosen | {new}
        if _joins(net, chosen, new, loose) and _convex(net, grown):
            chosen = grown
        else:
            refused.add(new)
    return _trimmed(net, chosen)


def worthwhile(net: Net, chosen: set[int]) -> bool:
    """Whether there is work inside, and it fits in memory."""
    busy = [i for i in chosen if net.kinds[i] not in _FREE]
    alone = len(busy) == 1 and net.kinds[busy[0]] in ("template", "pointwise")
    places = sum(net.made(i) for i in chosen) + sum(net.looped(i) for i in busy)
    return bool(busy) and not alone and places * 4 < _MOST


def _weight(net: Net, chosen: set[int]) -> int:
    return sum(net.kinds[i] not in _FREE for i in chosen)


def _border(net: Net, chosen: set[int]) -> list[int]:
    near = {n for i in chosen for n in (*net.before[i], *net.after[i])}
    return sorted(n for n in near - chosen if is_fusible(net.kinds[n]))


def _joins(net: Net, chosen: set[int], new: int, loose: bool) -> bool:
    """Whether an op may join, by the edges it shares with the region."""
    product = [i for i in chosen if net.kinds[i] == "template"]
    if net.kinds[new] == "template" or any(net.ancestors[p] >> new & 1 for p in product):
        return False  # a product begins its region
    pairs = [(new, c) for c in net.after[new] if c in chosen]
    pairs += [(p, new) for p in net.before[new] if p in chosen]
    return all(_pair(net, p, c) or (loose and net.kinds[p] != "scatter") for p, c in pairs)


def _pair(net: Net, p: int, c: int) -> bool:
    rows = net.looped(p) if net.kinds[p] in ("reduction", "norm") else net.made(c)
    return may_fuse(
        net.kinds[p], net.kinds[c], made=net.made(p), looped=net.looped(c), rows=rows, template=True
    )


def _convex(net: Net, chosen: set[int]) -> bool:
    """No op outside lies between two inside."""
    inside = sum(1 << i for i in chosen)
    low, high = min(chosen), max(chosen)
    above = 0
    for i in chosen:
        above |= net.ancestors[i]
    for i in range(low + 1, high):
        if i not in chosen and above >> i & 1 and net.ancestors[i] & inside:
            return False
    return True


def _trimmed(net: Net, chosen: set[int]) -> set[int]:
    """Without views and constants at the rim, which have nothing to do with the kernel."""
    while True:
        rim = {
            i
            for i in chosen
            if net.kinds[i] == "view" and not any(a in chosen for a in net.after[i])
        }
        rim |= {
            i
            for i in chosen
            if net.kinds[i] == "constant" and not any(a in chosen for a in net.after[i])
        }
        if not rim or rim == chosen:
            return chosen
        chosen = chosen - rim


def cut(net: Net, chosen: set[int], family: str) -> Region:
    """The region of some ops."""
    steps, inside = net.captured.steps, sorted(chosen)
    enters = {r for i in inside for r in references([steps[i].args, steps[i].kwargs])}
    outside = sorted((r for r in enters if r[0] not in chosen), key=lambda r: (-r[0], r[1]))
    largest = max((_size(steps, r) for r in outside), default=0)
    outside.sort(key=lambda r: not (_flows(steps[r[0]], r[1]) and _size(steps, r) * 8 >= largest))
    renamed: dict[tuple[int, int], list[int]] = {r: [k, -1] for k, r in enumerate(outside)}
    places = {i: len(outside) + k for k, i in enumerate(inside)}
    ops = tuple(
        Op(s.name, _renamed(s.args, renamed, places), _renamed(s.kwargs, renamed, places))
        for s in (steps[i] for i in inside)
    )
    leaves = sorted(_leaving(net, chosen))
    high = _high(net, inside)
    entries = tuple(_entry(steps[v], result, high) for v, result in outside)
    return Region(family, entries, ops, tuple((places[v], result) for v, result in leaves))


def _size(steps: tuple[Step, ...], reference: tuple[int, int]) -> int:
    return prod(steps[reference[0]].results[max(reference[1], 0)].shape)


def _flows(step: Step, result: int) -> bool:
    """Whether a tensor is one of numbers that an op has made, not a parameter or an index."""
    return bool(step.name) and "float" in step.results[max(result, 0)].dtype


def _entry(step: Step, result: int, high: int) -> Entry:
    meta = step.results[max(result, 0)]
    return Entry(meta.shape, meta.stride, meta.dtype, high)


def _renamed(
    value: Encoded, renamed: dict[tuple[int, int], list[int]], places: dict[int, int]
) -> Encoded:
    if isinstance(value, dict):
        return {k: _renamed(v, renamed, places) for k, v in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) == 3 and value[0] == "%":
        if value[1] in places:
            return ["%", places[value[1]], value[2]]
        return ["%", *renamed[value[1], value[2]]]
    return [_renamed(v, renamed, places) for v in value]


def _leaving(net: Net, chosen: set[int]) -> set[tuple[int, int]]:
    """Results that ops outside use or the step gives back; where nothing does, the last ones."""
    steps = net.captured.steps
    found = {r for r in net.captured.outputs if r[0] in chosen}
    for i in {a for c in chosen for a in net.after[c]} - chosen:
        found |= {r for r in references([steps[i].args, steps[i].kwargs]) if r[0] in chosen}
    last = [i for i in chosen if not any(a in chosen for a in net.after[i])]
    for i in last:
        if not any(value == i for value, _ in found):
            found.add((i, -1 if steps[i].single else 0))
    return found


def _high(net: Net, inside: list[int]) -> int:
    """Below what an index must lie: the rows of the smallest table, the classes of a loss."""
    steps, found = net.captured.steps, []
    for i in inside:
        if word_of(steps[i].name) in ("embedding", "nll_loss_forward", "nll_loss_backward"):
            table = references(steps[i].args)[0 if "nll" not in steps[i].name else -1]
            at = 0 if "embedding" in steps[i].name else 1
            if "nll" in steps[i].name:
                table = references(steps[i].args)[1 if "backward" in steps[i].name else 0]
            found.append(steps[table[0]].results[max(table[1], 0)].shape[at])
    return min(found, default=2)
