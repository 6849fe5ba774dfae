"""The learned prior of TAG's tree search: what it sees, and its network in numpy.

What the learned prior sees of a problem, a placement and the ways on from it: plain arrays.

Nodes are op groups (g) and cells of devices (c); edges join groups that read one another, groups
with the cells they may run on, and cells with each other. Seconds are shares of a reference step,
bytes shares of a device's room, so that networks see the same of small and large problems. A way
on (k) is any other placement: what it changes, what its parts add up to on each cell, and how far
that is from now.

No feature depends on how many groups, cells or ways on there are.

What the simulation of a placement says about each op group and each cell. Compiled.

Shares of the step: when a group's forward begins, when its backward and its gradients are done,
how long they were waited for; how long the devices of a cell compute, communicate and hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from io import BytesIO
from math import inf, log2
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.compiled import F2, I1, I2, compiled
from foretell.cost.price import dense
from foretell.errors import InputError
from foretell.search.placement import search
from foretell.search.placement.lowering import (
    BACKWARD,
    FORWARD,
    PRODUCT,
    SEND,
    SYNC,
    TASKS,
    UPDATE,
    page,
    play,
    standing,
    written,
)
from foretell.search.placement.problem import (
    ALL_REDUCE,
    FACTORS,
    MODES,
    PS,
    SHARDED,
    SPLIT,
    WAYS,
    Placement,
    Problem,
    Tables,
    canonical,
    law,
)
from foretell.search.placement.search import (
    Array,
    Evaluator,
    Expansion,
    Prior,
    columns,
    even_chances,
    peaks,
    settled,
)

GROUP_FEEDBACK = 5  # forward begins, backward ends, gradients agree, waited for them, sends before
CELL_FEEDBACK = 5  # computes, communicates, its messages, first begins, memory


Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
MOST = 4.0  # where features end: more is more of the same
_SUMS = 9  # of a whole placement
_GUESSES = 3  # of its step
WAY_ON = 2 * _SUMS + _GUESSES + 2 * len(WAYS) + 2 * (2 + len(MODES)) + 5


def feedback(problem: Problem, placement: Placement) -> tuple[Any, Any, Any, float]:
    """[g, ·] and [c, ·] shares of the step, samples [s, c] and seconds; zeros if it has none."""
    t, (sets, ways, served) = problem.tables, settled(problem, placement)
    share = np.zeros((len(t.size), len(t.kind)), np.int64)
    group = np.zeros((len(problem.groups), GROUP_FEEDBACK))
    cell = np.zeros((len(t.kind), CELL_FEEDBACK))
    row = (sets, ways, served, placement.micros)
    if search.prepared(t, *row, placement.mode, share) < 0:
        hold = standing(t, sets, ways, served)
        cell[:, 4] = np.minimum(peaks(t, sets, ways, hold, share) / t.room, 4.0)
        return group, cell, share, np.inf
    seconds = fill_feedback(t, *row, float(placement.fuse), share, group, cell)
    return group, cell, share, float(seconds)


@compiled
def fill_feedback(
    t: Tables,
    sets: I1,
    ways: I1,
    served: I1,
    micros: int,
    fuse: float,
    share: I2,
    group: F2,
    cell: F2,
) -> float:
    """Simulate a placement and fill in what its groups and cells did."""
    cells = len(t.kind)
    p = page(t, micros)
    written(t, sets, ways, served, micros, fuse, share, p)
    start, end = play(p, cells, 3 * (t.box.max() + 1))
    total = end.max()
    first = np.full(cells, total)
    begins, done = np.full(len(sets), np.inf), np.zeros(len(sets))
    for i in range(p.count[TASKS]):
        g, c, took = p.group[i], p.cell[i], (end[i] - start[i]) / total
        if p.what[i] == FORWARD:
            begins[g] = min(begins[g], start[i] / total)
            first[c] = min(first[c], start[i])
        elif p.what[i] == BACKWARD:
            group[g, 1] = max(group[g, 1], end[i] / total)
        elif p.what[i] == SYNC:
            done[g] = max(done[g], end[i] / total)
        elif p.what[i] == SEND:
            group[g, 4] += took
            cell[c, 2] += took
        if p.what[i] in (FORWARD, BACKWARD, PRODUCT, UPDATE):
            cell[c, 0] += took
        for k in range(p.lane_start[i], p.lane_start[i + 1]):
            if p.lane[k] >= cells:
                cell[p.lane[k] - cells, 1] += took
    spread(begins, done, group)
    cell[:, 3] = first / total
    cell[:, 4] = peaks(t, sets, ways, standing(t, sets, ways, served), share) / t.room
    return total


@compiled
def spread(begins: Any, done: Any, group: Any) -> None:
    """Tasks stand for runs of groups under the name of the first: the others get its figures."""
    for g in range(len(begins)):
        seen = begins[g] < np.inf
        group[g, 0] = begins[g] if seen or g == 0 else group[g - 1, 0]
        if group[g, 1] == 0.0 and g > 0:
            group[g, 1], done[g] = group[g - 1, 1], done[g - 1]
        group[g, 2] = max(done[g], group[g, 1])
        group[g, 3] = group[g, 2] - group[g, 1]


GROUP, CELL = GROUP_FEEDBACK + len(WAYS) + 8, CELL_FEEDBACK + 6
PLACE, LINK, NEXT = 3, 3, 2
GUESS, PER_E = 2 * _SUMS + 1, -5.0  # the middle one, and what makes chances fall by e a tenth of it


class Seen(NamedTuple):
    """One question as a network sees it."""

    group: Floats  # [g, GROUP]
    cell: Floats  # [c, CELL]
    place: Floats  # [g, c, PLACE]
    link: Floats  # [c, c, LINK] from, to
    next: Floats  # [e, NEXT] along the edge from a group to one that reads it
    ends: Ints  # [e, 2] of those edges
    way_on: Floats  # [k, WAY_ON]
    changed: Floats  # [k, g] weights of the groups that change, adding up to 1
    to: Floats  # [k, c] weights of the cells they go to
    come_from: Floats  # [k, c] weights of the cells they are on


@dataclass
class View:
    """What of a problem stays as it is."""

    problem: Problem
    scale: float  # seconds of the reference step
    table: Floats  # [g·s·w, 3·c + 3] what one choice adds to each cell, and to the step
    rate: Floats  # [s, s] shares of a step a byte takes from one set to another
    group: Floats
    cell: Floats
    place: Floats
    link: Floats

    def seen(self, now: Placement, successors: list[Placement]) -> Seen:
        """One question."""
        problem, t = self.problem, self.problem.tables
        rows = [canonical(problem, p) for p in (now, *successors)]
        sets, ways, served = columns(rows)
        group_feedback, cell_feedback, share, seconds = feedback(problem, now)
        changes = (sets[1:] != sets[0]) | (ways[1:] != ways[0]) | (served[1:] != served[0])
        counts = changes.sum(axis=1)
        weights = np.where(counts[:, None] > 0, changes, 1.0) / np.maximum(
            np.where(counts > 0, counts, changes.shape[1]), 1
        ).reshape(-1, 1)
        member = t.member / t.member.sum(axis=1, keepdims=True)
        onto = (weights[:, :, None] * member[sets[1:]]).sum(axis=1)
        changing = changes.any(axis=0)
        level = min(seconds / self.scale, MOST)
        state = np.stack([changing, np.full(len(changing), level)], axis=1)
        group = [self.group, group_feedback, np.eye(len(WAYS))[ways[0]]]
        group += [t.size[sets[0]][:, None] / t.size[0], state]
        placed = t.member[sets[0]]
        assigned = share[sets[0]] * placed / t.batch
        ends = t.reads[:, :2]
        joined = sets[0][ends[:, 0]] == sets[0][ends[:, 1]]
        way_on = self._successor_features(rows, sets, ways, counts, level)
        handed = t.read_bytes * t.batch * self.rate[0, min(1, len(self.rate) - 1)]
        return Seen(
            _small(np.concatenate(group, axis=1)),
            _small(np.concatenate([self.cell, cell_feedback], axis=1)),
            _small(np.stack([self.place, placed, assigned], axis=2)),
            self.link,
            _small(np.stack([handed, joined], axis=1)),
            ends,
            way_on,
            weights.astype(np.float32),
            onto.astype(np.float32),
            (weights[:, :, None] * member[sets[0]]).sum(axis=1).astype(np.float32),
        )

    def _successor_features(
        self, rows: list[Placement], sets: Ints, ways: Ints, counts: Ints, level: float
    ) -> Floats:
        """[k, WAY_ON] of each way on: its sums, its differences, its words."""
        sums, words = self._sums(sets, ways), _eye_mean(sets, ways)
        steps = np.array([_step(p) for p in rows])
        guess = portable.log(_guesses(sums, np.array([p.micros for p in rows])))
        parts = [sums[1:], 4 * (sums[1:] - sums[0]), 2 * (guess[1:] - guess[0])]
        parts += [words[1:], words[1:] - words[0]]
        parts += [steps[1:], steps[1:] - steps[0]]
        size = self.problem.tables.size
        wide = (size[sets] / size[0]).mean(axis=1)
        few = np.stack(
            [counts / sets.shape[1], counts == 0, wide[1:], wide[1:] - wide[0],
             np.full(len(counts), level)], axis=1,
        )  # fmt: skip
        return _small(np.concatenate([*parts, few], axis=1))

    def _sums(self, sets: Ints, ways: Ints) -> Floats:
        """[k, _SUMS] what whole placements come to, without simulating them."""
        t = self.problem.tables
        count, cells = len(self.problem.groups), len(t.kind)
        index = (np.arange(count) * len(t.size) + sets) * len(WAYS) + ways
        each = self.table[index].sum(axis=1)
        load, comm, held = (each[:, i * cells : (i + 1) * cells] for i in range(3))
        share, update, serial = (each[:, 3 * cells + i] for i in range(3))
        source, reader = sets[:, t.reads[:, 0]], sets[:, t.reads[:, 1]]
        moved = t.read_bytes * t.batch * self.rate[source, reader]
        breaks = (source != reader).mean(axis=1) if len(t.reads) else np.zeros(len(sets))
        full = held.max(axis=1)
        return np.stack(
            [load.max(axis=1), comm.max(axis=1), (load + comm).max(axis=1), share + update,
             moved.sum(axis=1), breaks, full, full > 1, serial], axis=1,
        ).astype(np.float32)  # fmt: skip


def _small(values: npt.NDArray[np.float64]) -> Floats:
    return np.clip(np.nan_to_num(values, posinf=MOST, neginf=-MOST), -MOST, MOST).astype(np.float32)


def _guesses(sums: Floats, micros: Ints) -> Floats:
    """[k, _GUESSES] what a step takes if communication hides, if it does half, if it does not.

    Stages run one after another; with m micro-batches all but the longest count an m-th.
    """
    load, comm, _, after, moved = sums[:, :5].T
    serial = np.maximum(sums[:, 8], load)
    busy = load + (serial - load) / micros
    hidden, open_ = np.maximum(busy, comm), busy + comm
    found = np.stack([hidden, (hidden + open_) / 2, open_], axis=1)
    made: Floats = found + (after + 2 * moved)[:, None] + np.float32(1e-6)
    return made


def _step(p: Placement) -> tuple[float, ...]:
    """The choices for the whole step."""
    size = 1.0 if p.fuse == inf else log2(1 + p.fuse / 2**20) / 10
    return (log2(p.micros) / 4, size, *(float(p.mode == i) for i in range(len(MODES))))


def _eye_mean(sets: Ints, ways: Ints) -> Floats:
    """Shares of groups that agree in each way."""
    return np.stack([(ways == w).mean(axis=1) for w in range(len(WAYS))], axis=1).astype(np.float32)


def view(problem: Problem) -> View:
    """Look at a problem once; data parallelism that hides nothing is what steps are shares of."""
    t = problem.tables
    assigned = _rank_shares(problem)
    scale = float(_took(problem, assigned)[:, 0].sum(axis=0).max())
    scale += float(law(t.laws[0, 0], t.gradient).sum())
    took = _took(problem, assigned) / scale
    slope = np.where(np.isfinite(t.sends[..., 0]), t.sends[..., 1], inf).min(axis=2)
    wide = portable.log10(np.maximum(slope, 1e-12) * 1e10) / 2  # seconds of 10 GB
    box = t.box[:, None] == t.box[None, :]
    group = np.stack(
        [took[:, 0].max(axis=1) * 8, law(t.laws[0, 0], t.gradient) / scale * 8,
         t.kept * t.batch / t.room.sum(), t.held / t.room.max() * 4,
         portable.log10(np.maximum(t.factors[0] * t.batch, 1) / np.maximum(t.gradient, 1))], axis=1,
    )  # fmt: skip
    speed = t.speed[t.kind]
    inside, across = (_nearest(slope, mask) for mask in (box, ~box))
    cell = np.stack(
        [speed / speed.max(), t.ranks / t.ranks.sum(), t.room / t.room.max(), t.nodes / 4,
         inside, across], axis=1,
    )  # fmt: skip
    place = took[:, 0] * 8
    link = np.stack([wide, box, np.eye(len(t.kind))], axis=2)
    return View(
        problem,
        scale,
        _table(problem, assigned, scale),
        _rates(problem, slope / scale),
        *(_small(x) for x in (group, cell, place, link)),
    )


def _nearest(slope: npt.NDArray[np.float64], mask: npt.NDArray[np.bool_]) -> Floats:
    """Seconds of 1 GB to the nearest other cell, by tens; zero where there is none."""
    far = np.where(mask & (slope > 0), slope, inf).min(axis=1)
    return np.where(np.isfinite(far), portable.log10(np.maximum(far, 1e-12) * 1e9), 0.0).astype(
        np.float32
    )


def _rank_shares(problem: Problem) -> Ints:
    """[s, c] samples of a rank by speed."""
    t = problem.tables
    speed = np.where(t.member, t.speed[t.kind], 0.0)
    due = t.batch * speed / (speed * t.ranks).sum(axis=1, keepdims=True)
    found: Ints = np.where(t.member, np.clip(np.ceil(due - 0.5), 1, t.batch), 0).astype(np.int64)
    return found


def _took(problem: Problem, assigned: Ints) -> npt.NDArray[np.float64]:
    """[g, s, c] seconds of a group's forward and backward on the cells of each set."""
    t = problem.tables
    each = np.diff(t.forward, axis=1) + np.diff(t.backward, axis=1)  # [k, g, b]
    found: npt.NDArray[np.float64] = each[t.kind[None, :], :, assigned].transpose(2, 0, 1)
    return np.where(t.member[None], found, 0.0)


def _table(problem: Problem, assigned: Ints, scale: float) -> Floats:
    """[g·s·w, ·] seconds, collectives, room on each cell; behind the backward; on the slowest."""
    t = problem.tables
    shape = (len(problem.groups), len(t.size), len(WAYS), len(t.kind))
    load, comm, held = (np.zeros(shape) for _ in range(3))
    after, update = np.zeros(shape[:3]), np.zeros(shape[:3])
    took = _took(problem, assigned)
    split = (t.split_forward[0] + t.split_backward[0]).T
    inside = t.member[None].astype(float)
    slowest = np.where(t.member, t.update.T[:, t.kind][:, None, :], 0.0).max(axis=2)
    state = t.state[:, None] / t.size
    for way in range(len(WAYS)):
        sync, after[:, :, way] = _collectives(problem, way)
        comm[:, :, way] = sync[:, :, None] * inside
        if way == SPLIT:
            load[:, :, way] = np.where(np.isfinite(split), split, scale)[:, :, None] * inside
            bytes_ = (t.split_held + t.split_state + t.split_kept).T
            held[:, :, way] = np.where(np.isfinite(bytes_), bytes_, 0.0)[:, :, None] * inside
            update[:, :, way] = slowest / t.size
            continue
        shared = way in (PS, SHARDED)
        load[:, :, way] = took
        kept = t.kept[:, None, None] * assigned[None]
        mine = t.held[:, None] + (state if shared else t.state[:, None])
        held[:, :, way] = (mine[:, :, None] + kept) * inside
        update[:, :, way] = slowest / (t.size if shared else 1)
    rows = [load / scale, comm / scale, held / t.room]
    rows += [x[..., None] / scale for x in (after, update, load.max(axis=3))]
    return np.concatenate(rows, axis=3).reshape(-1, 3 * shape[3] + 3).astype(np.float32)


def _collectives(
    problem: Problem, way: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """[g, s] seconds of the gradients' collective, and of the one behind the optimizer."""
    t = problem.tables
    now, later = np.zeros((2, len(problem.groups), len(t.size)))
    for s in range(len(t.size)):
        if t.size[s] == 1 or way == SPLIT:
            continue
        if way == FACTORS:
            rows = t.factors[s] * t.batch
            now[:, s] = np.where(rows > 0, law(t.laws[s, 4], rows), 0.0)
            now[:, s] += np.where(t.rest[s] > 0, law(t.laws[s, 0], t.rest[s]), 0.0)
            continue
        ops = {ALL_REDUCE: (0, -1), PS: (1, 2), SHARDED: (3, 4)}[way]
        now[:, s] = law(t.laws[s, ops[0]], t.gradient)
        if ops[1] >= 0:
            later[:, s] = law(t.laws[s, ops[1]], t.gradient)
    return np.where(t.gradient[:, None] > 0, now, 0.0), np.where(t.gradient[:, None] > 0, later, 0)


def _rates(problem: Problem, slope: npt.NDArray[np.float64]) -> Floats:
    """[s, s] shares of a step that one byte of a batch takes between two sets."""
    t = problem.tables
    out = np.zeros((len(t.size), len(t.size)))
    for a in range(len(t.size)):
        for b in range(len(t.size)):
            if a != b:
                one, other = np.flatnonzero(t.member[a]), np.flatnonzero(t.member[b])
                worst = slope[np.ix_(one, other)].max()
                staying = len(np.intersect1d(one, other)) / max(len(one), len(other))
                out[a, b] = worst * (1 - staying) / min(t.boxes[a], t.boxes[b])
    return out.astype(np.float32)


# The learned prior of the tree search: its network in numpy, its weights, what simulation
# tells it.
#
# Op groups and cells start from their features. In every layer each hears along five kinds of edge:
# groups from those they read and those that read them, and by attention (GATv2) groups from cells,
# cells from groups and cells from cells. A way on is scored from the groups it changes, the cells
# these are on and go to, and its own features: no weight knows how many there are of any.
#
# `foretell_lab.policy.network` is the same network on PyTorch Geometric; a test holds both equal.


Weights = Mapping[str, Floats]
SLOPE = 0.2  # of leaky ReLU below zero


WIDTHS = {
    "group": GROUP, "cell": CELL, "place": PLACE, "link": LINK, "next": NEXT, "way_on": WAY_ON,
}  # fmt: skip
FLOOR = 0.05  # of all chances is split evenly: nothing is ruled out unseen


def scores(weights: Weights, seen: Sequence[Seen]) -> list[Floats]:
    """One score a way on, of questions about one problem: equal numbers of groups and cells."""
    group, cell = (
        portable.tanh(dense(np.stack(some), *_layer(weights, name))).astype(np.float32)
        for name, some in (("group", [s.group for s in seen]), ("cell", [s.cell for s in seen]))
    )
    place = np.stack([one.place for one in seen])
    behind = np.stack([one.next for one in seen])
    link = seen[0].link[None]
    for layer in range(_layers(weights)):
        group, cell = _heard(weights, f"{layer}.", group, cell, place, behind, seen[0].ends, link)
    return [_decoded(weights, one, group[i], cell[i]) for i, one in enumerate(seen)]


def chances(values: Floats) -> npt.NDArray[np.float64]:
    """Scores as chances that add up to 1."""
    raised = portable.exp(values.astype(float) - float(values.max()))
    found: npt.NDArray[np.float64] = raised / raised.sum()
    return found


def _heard(
    weights: Weights, at: str, group: Floats, cell: Floats, place: Floats, behind: Floats,
    ends: Ints, link: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """One layer: what all kinds of edge bring is added up, and added to what was there."""
    to_group = _attend(weights, f"{at}serve", cell, group, place)
    to_group += _beside(weights, f"{at}before", group, behind, ends[:, 0], ends[:, 1])
    to_group += _beside(weights, f"{at}behind", group, behind, ends[:, 1], ends[:, 0])
    to_cell = _attend(weights, f"{at}place", group, cell, place.swapaxes(1, 2))
    to_cell += _attend(weights, f"{at}link", cell, cell, link.swapaxes(1, 2))
    return group + np.maximum(to_group, 0), cell + np.maximum(to_cell, 0)


def _attend(weights: Weights, name: str, source: Floats, target: Floats, edge: Floats) -> Floats:
    """Attention of every target to every source; `edge` [b, target, source, ·]."""
    left = dense(source, *_layer(weights, f"{name}.left"))[:, None]
    right = dense(target, *_layer(weights, f"{name}.right"))[:, :, None]
    mixed = left + right + dense(edge, weights[f"{name}.edge.weight"])
    mixed = np.maximum(mixed, SLOPE * mixed)
    heads = weights[f"{name}.attention"]
    split = (*mixed.shape[:3], *heads.shape)
    score = (mixed.reshape(split) * heads).sum(axis=-1)
    score = portable.exp(score - score.max(axis=2, keepdims=True)).astype(np.float32)
    score /= score.sum(axis=2, keepdims=True)
    values = left.reshape(left.shape[0], left.shape[2], *heads.shape)
    heard = (score[..., None] * values[:, None]).sum(axis=2)
    out: Floats = heard.reshape(*heard.shape[:2], -1) + weights[f"{name}.bias"]
    return out


def _beside(
    weights: Weights, name: str, group: Floats, edge: Floats, source: Ints, target: Ints
) -> Floats:
    """What each group hears along its edges, added up."""
    sent = dense(group, *_layer(weights, f"{name}.left"))
    messages = np.maximum(sent[:, source] + dense(edge, weights[f"{name}.edge.weight"]), 0)
    out = np.zeros_like(sent)
    np.add.at(out.swapaxes(0, 1), target, messages.swapaxes(0, 1))
    return out


def _decoded(weights: Weights, seen: Seen, group: Floats, cell: Floats) -> Floats:
    x = np.concatenate(
        [
            dense(seen.changed, group.T),
            dense(seen.to, cell.T),
            dense(seen.come_from, cell.T),
            seen.way_on,
        ],
        axis=1,
    )
    x = np.maximum(dense(x, *_layer(weights, "first")), 0)
    x = np.maximum(dense(x, *_layer(weights, "second")), 0)
    plain = dense(seen.way_on, *_layer(weights, "plain"))
    return (dense(x, *_layer(weights, "score")) + plain)[:, 0]


def _layer(weights: Weights, name: str) -> tuple[Floats, Floats]:
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def _layers(weights: Weights) -> int:
    return sum(name.endswith("serve.bias") for name in weights)


@dataclass
class Learned:
    """Chances by a network, which looks at the last placement's simulation and simulates none."""

    weights: Weights
    _view: View | None = field(default=None, init=False, repr=False)

    def __call__(self, on: Evaluator, expansions: Sequence[Expansion]) -> list[Array]:
        """For each question, chances that add up to 1."""
        if self._view is None or self._view.problem is not on.problem:
            self._view = view(on.problem)
        seen = [self._view.seen(one.now, one.successors) for one in expansions]
        return [_floored(chances(found)) for found in scores(self.weights, seen)]


def _floored(chances: Array) -> Array:
    return (1 - FLOOR) * chances + FLOOR / len(chances)


@cache
def shipped() -> Prior:
    """The prior of the package; even chances where it has no weights."""
    path = files("foretell.search.placement").joinpath("policy.npz")
    return Learned(read(path.read_bytes())) if path.is_file() else even_chances


def read(raw: bytes) -> Weights:
    """Weights from the bytes of their file."""
    with np.load(BytesIO(raw)) as arrays:
        found = {name: arrays[name].astype(np.float32) for name in arrays.files}
    if found["group.weight"].shape[1] != GROUP or found["score.weight"].shape[0] != 1:
        raise InputError(
            "these weights are for other features than this version sees",
            hint="train them again: foretell train-policy",
        )
    return found
