"""Host and device tasks of one step of one rank, before they become a graph.

Times are seconds after the step began on the host. A thread's time is cut at every call that starts
or waits for device work; what is left of each outermost operator between two cuts is one piece.
Time outside all operators (Python, mostly) is no piece: it becomes the gap behind the piece before
it. Reading data is one piece however many operators run inside. Calls that only query (attributes,
errors, event queries) stay in their piece.

Device tasks that were launched before the step and still ran in it are here too: they are what the
step found on the device when it began. Two delays of the device are measured where the trace shows
them pure; their median stands in elsewhere:

    turnaround   between two kernels that are both waiting in the queue: the gap behind the first
    latency      between the return of a launch and the start of its kernel on an idle stream
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from foretell.graph.graph import NONE, Array
from foretell.trace.decode import NO_ID
from foretell.trace.events import Events, What
from foretell.trace.runs import distinct, highest_before, is_follower, median, quantile
from foretell.trace.words import CallEffect, RangeKind, by_name, call_effect, op_kind, range_kind

_HOST = (What.OP, What.CALL, What.NOTE, What.MODULE)
# At the same instant the longer lies around the shorter, and of equally long ones a note around a
# module, a module around an operator, an operator around a call.
_DEPTH = np.zeros(len(What), np.int8)
_DEPTH[What.MODULE], _DEPTH[What.OP], _DEPTH[What.CALL] = 1, 2, 3


@dataclass(frozen=True, eq=False)
class EventTree:
    """The host events of a step in order of thread and start, and what each lies in.

    All columns but `event` hold places in this order, NONE where there is nothing.
    """

    event: Array  # numbers in Events
    parent: Array
    unit: Array  # the outermost operator (or data load) around it
    op: Array  # the innermost operator around it, itself where it is one
    layer: Array  # the innermost module or layer note around it
    note: Array  # the innermost note around it
    tells: Array  # what all that lies around it tells
    call_effect: Array  # what a call does
    outer_call: Array  # the outermost call around it, itself where it is one


def event_tree(events: Events, begin: float, end: float) -> EventTree:
    """How the host events that begin in [begin, end) lie in each other."""
    chosen = np.flatnonzero(events.is_(*_HOST) & (events.start >= begin) & (events.start < end))
    tells = _range_kinds(events, chosen)
    keep = (tells & RangeKind.STEP) == 0
    chosen, tells = chosen[keep], tells[keep]
    what, place = events.what[chosen], events.place[chosen]
    ranked = np.lexsort((_DEPTH[what], -events.end[chosen], events.start[chosen], place))
    chosen, tells, what = chosen[ranked], tells[ranked], what[ranked]
    parent = _parents(events, chosen)
    is_layer = (what == What.MODULE) | ((tells & RangeKind.LAYER) > 0)
    is_call = what == What.CALL
    calls = by_name(events.texts, events.name[chosen], lambda text: int(call_effect(text)))
    levels = _levels(parent)
    return EventTree(
        chosen,
        parent,
        _outermost(parent, levels, (tells & RangeKind.UNIT) > 0),
        _innermost(parent, levels, what == What.OP),
        _innermost(parent, levels, is_layer),
        _innermost(parent, levels, what == What.NOTE),
        _inherited(parent, levels, tells),
        np.where(is_call, calls, CallEffect.NOTHING),
        _outermost_unbroken(parent, levels, is_call),
    )


def _range_kinds(events: Events, chosen: Array) -> Array:
    """Range kinds of each event by its own name."""
    what, name = events.what[chosen], events.name[chosen]
    found = np.zeros(len(chosen), np.int64)
    for kind, meaning in ((What.NOTE, range_kind), (What.OP, op_kind)):
        mine = what == kind
        found[mine] = by_name(events.texts, name[mine], lambda text: int(meaning(text)))  # noqa: B023
    is_backward = (what == What.OP) & (events.forward_thread[chosen] > 0)
    found[is_backward] |= RangeKind.BACKWARD
    return found


def _parents(events: Events, chosen: Array) -> Array:
    """Parent of each event: the last earlier one on its thread that has not ended."""
    place, start = events.place[chosen].tolist(), events.start[chosen].tolist()
    end = events.end[chosen].tolist()
    parent: list[int] = []
    stack: list[int] = []
    here = NONE
    for i, (at, begin) in enumerate(zip(place, start, strict=True)):
        if at != here:
            stack.clear()
            here = at
        while stack and end[stack[-1]] <= begin:
            stack.pop()
        parent.append(stack[-1] if stack else NONE)
        stack.append(i)
    return np.array(parent, np.int64)


def _levels(parent: Array) -> list[Array]:
    """The events that lie in others, by how many these are: fewest first."""
    found, inside = [], np.flatnonzero(parent != NONE)
    above = parent[inside]  # of each, the one at the level that is looked at
    while len(inside):
        outer = parent[above]
        found.append(inside[outer == NONE])
        inside, above = inside[outer != NONE], outer[outer != NONE]
    return found


def _innermost(parent: Array, levels: list[Array], wanted: Array) -> Array:
    """The nearest wanted event at or around each."""
    found = np.where(wanted, np.arange(len(parent)), NONE)
    for rows in levels:
        rows = rows[~wanted[rows]]
        found[rows] = found[parent[rows]]
    return found


def _outermost(parent: Array, levels: list[Array], wanted: Array) -> Array:
    """The farthest wanted event at or around each."""
    found = np.where(wanted, np.arange(len(parent)), NONE)
    for rows in levels:
        above = found[parent[rows]]
        found[rows] = np.where(above != NONE, above, found[rows])
    return found


def _outermost_unbroken(parent: Array, levels: list[Array], wanted: Array) -> Array:
    """For each wanted event the outermost around it that has none but wanted ones in between."""
    found = np.where(wanted, np.arange(len(parent)), NONE)
    for rows in levels:
        rows = rows[wanted[rows] & wanted[parent[rows]]]
        found[rows] = found[parent[rows]]
    return found


def _inherited(parent: Array, levels: list[Array], tells: Array) -> Array:
    """Range kinds of each event and all its parents."""
    found = tells.copy()
    for rows in levels:
        found[rows] |= found[parent[rows]] & ~int(RangeKind.UNIT)
    return found


_LEAST = 1e-9  # seconds: what is shorter than the finest stamp is rounding
_Row = tuple[int, float, float, int, int, bool]  # thread, start, end, label, unit, is_call
# Place in the nest, thread, start, end, unit, op, is_cut; and a mark that ends what is open.
_Mark = tuple[int, int, float, float, int, int, bool]
_LAST: list[_Mark] = [(NONE, NONE, 0.0, 0.0, NONE - 1, NONE, False)]


@dataclass(frozen=True, eq=False)
class HostTasks:
    """The host tasks of a step, in order of thread and start."""

    thread: Array
    start: Array
    end: Array
    label: Array  # place in the nest: a call, or the operator that the piece works for
    unit: Array  # place in the nest of the outermost operator, NONE outside of all
    is_call: Array

    def __len__(self) -> int:
        return len(self.start)


def pieces(events: Events, n: EventTree, cuts: Array) -> HostTasks:
    """The pieces of every thread; `cuts` marks the calls of the nest that cut."""
    is_unit = n.unit == np.arange(len(n.event))
    marks = np.flatnonzero(is_unit | cuts)
    event = n.event[marks]
    columns = (
        marks, events.place[event], events.start[event], events.end[event],
        n.unit[marks], n.op[marks], cuts[marks],
    )  # fmt: skip
    rows = _cut(zip(*(c.tolist() for c in columns), strict=True))
    thread, start, end, label, unit, is_call = zip(*rows, strict=True) if rows else [()] * 6
    return HostTasks(
        np.array(thread, np.int64), np.array(start, np.float64), np.array(end, np.float64),
        np.array(label, np.int64), np.array(unit, np.int64), np.array(is_call, bool),
    )  # fmt: skip


def _cut(marks: Iterable[_Mark]) -> list[_Row]:
    """The calls among some marks, in order of thread and start, and the pieces between them.

    A piece works for the operator of the call behind it, or else of the call before it in the same
    unit; without any call for the unit itself.
    """
    rows: list[_Row] = []
    current = worker = here = NONE  # the open unit, the operator that works in it, the thread
    until = cursor = -np.inf  # the end of the open unit, and how far the thread is cut
    for i, thread, start, end, unit, op, is_cut in chain(marks, _LAST):
        if current not in (unit, NONE):
            if until > cursor + _LEAST:
                rows.append((here, cursor, until, worker, current, False))
            cursor, current = max(cursor, until), NONE
        if thread != here:
            here, cursor = thread, -np.inf
        if unit == i:
            current, worker, until, cursor = i, i, end, max(cursor, start)
        if is_cut:
            if current != NONE:
                worker = op if op != NONE else current
                if start > cursor + _LEAST:
                    rows.append((here, cursor, start, worker, current, False))
            begin = max(start, cursor)
            cursor = max(end, begin)
            rows.append((here, begin, cursor, i, current, True))
    return rows


def recorded(events: Events, n: EventTree, p: HostTasks) -> Array:
    """How many operators and notes (first column) and calls (second) began in each piece.

    What began between two pieces counts for the one before: there its cost is a gap.
    """
    found = np.zeros((len(p), 2), np.int32)
    if not len(p):
        return found
    e = n.event
    span = max(float(p.end.max()), float(events.start[e].max(initial=0.0))) + 1.0
    at = np.searchsorted(
        p.thread * span + p.start, events.place[e] * span + events.start[e], side="right"
    )
    at = np.clip(at - 1, 0, None)
    np.add.at(found, (at, (events.what[e] == What.CALL).astype(np.int64)), 1)
    return found


WORK = (What.KERNEL, What.COPY, What.FILL)
# A turnaround or latency above this many medians (and this long) has another cause than the device:
# on an H200 99 % of 10 000 queued kernels follow within 2.6 µs, median 1.2 µs.
_OUTLIER_FACTOR, _OUTLIER_SECONDS = 4.0, 5e-6
_NO_TURNAROUND, _NO_LATENCY = 1e-6, 1e-6  # where a trace shows none: the H200 medians, rounded


@dataclass(frozen=True, eq=False)
class Work:
    """All device work of a trace in order of stream and start."""

    event: Array
    stream: Array
    start: Array
    end: Array
    call: Array  # the event of the call that launched it, NONE where the trace has none

    def __len__(self) -> int:
        return len(self.event)


def device_work(events: Events) -> Work:
    """All device work and the calls that launched it, by correlation."""
    event = np.flatnonzero(events.is_(*WORK))
    ranked = np.lexsort((events.end[event], events.start[event], events.place[event]))
    event = event[ranked]
    calls = np.flatnonzero((events.what == What.CALL) & (events.correlation != NO_ID))
    call = join(events.correlation[event], events.correlation[calls], calls)
    start, end = _on_host_clock(events, event, call)
    return Work(event, events.place[event], start, end, call)


def join(wanted: Array, keys: Array, values: Array) -> Array:
    """The value whose key is wanted, NONE where there is none; the first of equal keys."""
    ranked = np.argsort(keys, kind="stable")
    keys, values = keys[ranked], values[ranked]
    at = np.searchsorted(keys, wanted)
    found = np.full(len(wanted), NONE, np.int64)
    inside = at < len(keys)
    hit = np.flatnonzero(inside)[keys[at[inside]] == wanted[inside]]
    hit = hit[wanted[hit] != NO_ID]
    found[hit] = values[at[hit]]
    return found


def _on_host_clock(events: Events, event: Array, call: Array) -> tuple[Array, Array]:
    """Start and end of device work; moved where its clock runs before the host's.

    Nothing starts before the call that launches it. A few stamps that say so are noise; more than
    one in a hundred means the clocks differ, by as much as the earliest hundredth says.
    """
    start, end = events.start[event], events.end[event]
    launched = call != NONE
    if launched.sum() >= 100:
        early = quantile(start[launched] - events.start[call[launched]], 0.01)
        if early < 0:
            return start - early, end - early
    return start, end


@dataclass(frozen=True, eq=False)
class Pace:
    """Gaps and lags that the device adds to the work of a step, one value per kernel."""

    seconds: Array  # run time, less what overlaps the work before it on the same stream
    gap: Array  # turnaround behind it
    lag: Array  # latency before it
    is_prompt: Array  # its stream was idle when it was launched, and it started at once


def pace(work: Work, call_start: Array, call_end: Array) -> Pace:
    """Run times, turnarounds and latencies; calls that are not known are NaN."""
    same = is_follower(work.stream)
    before = highest_before(work.end, work.stream)  # when the stream was last busy before this
    # On one stream only the end of a kernel can overlap the next (a programmatic launch): count
    # the time from the end of the one before.
    seconds = np.maximum(work.end - np.maximum(work.start, before), 0.0)
    wait = work.start - before
    queued = same & (np.isnan(call_end) | (call_end + _OUTLIER_SECONDS < before))
    turnaround = typical(wait[queued & (wait >= 0)], _NO_TURNAROUND)
    pure = queued & (wait >= 0) & (wait <= limit(turnaround))
    gap = np.full(len(work), turnaround)
    gap[np.flatnonzero(pure) - 1] = wait[pure]
    idle = ~np.isnan(call_end) & (before <= call_end)
    delay = np.maximum(work.start - call_end, 0.0)
    latency = typical(delay[idle & (delay > 0)], _NO_LATENCY)
    prompt = idle & (delay <= limit(latency))
    lag = np.where(prompt, delay, latency)
    return Pace(seconds, gap, lag, prompt)


def typical(values: Array, otherwise: float) -> float:
    """The median where there are enough values to have one."""
    return median(values) if len(values) >= 5 else otherwise


def limit(value: float) -> float:
    """The most that still counts as a turnaround or latency of that typical length."""
    return max(_OUTLIER_FACTOR * value, _OUTLIER_SECONDS)


# Seconds by which stamps of the host and of the device may contradict each other.
NOISE = 1e-5
_DRAINS = (
    CallEffect.DRAIN_DEVICE,
    CallEffect.DRAIN_STREAM,
    CallEffect.DRAIN_EVENT,
    CallEffect.FREE,
)


@dataclass(frozen=True, eq=False)
class Host:
    """The host tasks of a step in order of thread and start."""

    thread: Array
    start: Array
    end: Array
    label: Array  # place in the nest, NONE for untraced time
    unit: Array
    is_call: Array
    is_return: Array  # the part of a blocking copy in which the call waits for it
    call: Array  # the task that is the call of a return, NONE for others
    recorded: Array  # operators and calls that the profiler recorded in it

    def __len__(self) -> int:
        return len(self.start)

    def next_on_thread(self) -> Array:
        """The next task on the same thread, NONE behind the last."""
        following = np.arange(1, len(self) + 1)
        following[np.append(self.thread[1:] != self.thread[:-1], True)[: len(self)]] = NONE
        return following


@dataclass(frozen=True, eq=False)
class Device:
    """The device tasks of a step in order of stream and start."""

    work: Work  # times after the step began
    pace: Pace
    host: Array  # the host task that launched it, NONE where that is not known
    is_ahead: Array  # launched before the step

    def __len__(self) -> int:
        return len(self.work)


@dataclass(frozen=True, eq=False)
class RankStep:
    """One step of one rank."""

    events: Events
    rank: int
    number: int  # of the step
    begin: float  # of the step, in the time of its events
    seconds: float  # from the beginning of the step to its end on the host
    thread: int  # the main one
    event_tree: EventTree
    host: Host
    device: Device

    @property
    def end(self) -> float:
        """When the last of the step's own work was done."""
        own = self.device.work.end[~self.device.is_ahead]
        return max(self.seconds, float(own.max(initial=0.0)))

    @property
    def found(self) -> float:
        """How long the device still worked on what came before the step; none if longer than it."""
        last = float(self.device.work.end[self.device.is_ahead].max(initial=0.0))
        return last if last < self.end else 0.0


def rank_step(
    events: Events, work: Work, rank: int, number: int, window: tuple[float, float, int]
) -> RankStep:
    """The tasks of the step in a window (begin, end, main thread)."""
    begin, end, thread = window
    n = event_tree(events, begin, end)
    launches = _launches(events, n, work)
    p = pieces(events, n, _cuts(n, launches))
    count = recorded(events, n, p)
    chosen, ahead = _own_work(events, work, n, begin, end)
    own = _shifted(work, chosen, begin)
    piece = _piece_of(n, p, own.call)
    call_start, call_end = _calls(p, piece, begin)
    idle = _untraced(events, n, p, begin, end, thread)
    host, place = _host(p, count, idle, _blocking(events, own, piece, call_end))
    host = replace(host, start=host.start - begin, end=host.end - begin)
    host_of = np.append(place, NONE)[piece]  # NONE, the last, stays NONE
    return RankStep(
        events, rank, number, begin, end - begin, thread, n, host,
        Device(own, _as_found(own, pace(own, call_start, call_end), ahead), host_of, ahead),
    )  # fmt: skip


def _as_found(own: Work, p: Pace, ahead: Array) -> Pace:
    """Work from before the step ends when it was measured to end.

    It fills its stream from the beginning of the step on, whatever held it up.
    """
    before = np.where(is_follower(own.stream), np.roll(own.end, 1), 0.0)
    until = np.maximum(own.end - np.maximum(before, 0.0), 0.0)
    return Pace(np.where(ahead, until, p.seconds), np.where(ahead, 0.0, p.gap), p.lag, p.is_prompt)


def _launches(events: Events, n: EventTree, work: Work) -> Array:
    """Which calls of the nest launched device work, themselves or by a call inside."""
    is_launch = np.zeros(len(events), bool)
    is_launch[work.call[work.call != NONE]] = True
    found = np.zeros(len(n.event), bool)
    found[n.outer_call[is_launch[n.event]]] = True
    return found


def _cuts(n: EventTree, launches: Array) -> Array:
    outer: Array = n.outer_call == np.arange(len(n.event))
    return outer & (launches | np.isin(n.call_effect, _DRAINS))


def _own_work(
    events: Events, work: Work, n: EventTree, begin: float, end: float
) -> tuple[Array, Array]:
    """The work that the step launched or found running, and which of it came before the step.

    Work without a launch is of the step when it started in it, behind work the step launched.
    """
    in_step = np.zeros(len(events), bool)
    in_step[n.event] = True
    known = work.call != NONE
    launched = known & in_step[work.call]
    orphan = ~known & (work.start >= begin) & (work.start < end)
    behind = _behind_own(work, launched) if launched.any() else np.ones(len(work), bool)
    is_own = launched | (orphan & behind)
    earlier = (known & (events.start[work.call] < begin)) | (~known & (work.start < end))
    ahead = ~is_own & (work.end > begin) & earlier
    chosen = np.flatnonzero(is_own | ahead)
    return chosen, ahead[chosen]


def _behind_own(work: Work, launched: Array) -> Array:
    """Which work comes, on its stream, after something that the step launched."""
    seen = np.cumsum(launched)
    first = np.append(True, work.stream[1:] != work.stream[:-1])
    base = np.maximum.accumulate(np.where(first, seen - launched, 0))
    found: Array = seen - base > 0
    return found


def _shifted(work: Work, chosen: Array, begin: float) -> Work:
    return Work(
        work.event[chosen], work.stream[chosen], work.start[chosen] - begin,
        work.end[chosen] - begin, work.call[chosen],
    )  # fmt: skip


def _piece_of(n: EventTree, p: HostTasks, call: Array) -> Array:
    """The piece that is the call of each piece of work."""
    of_place = np.full(len(n.event) + 1, NONE, np.int64)
    of_place[p.label[p.is_call]] = np.flatnonzero(p.is_call)
    ranked = np.argsort(n.event, kind="stable")
    at = np.searchsorted(n.event[ranked], call)
    hit = (call != NONE) & (at < len(ranked))
    hit[hit] = n.event[ranked[at[hit]]] == call[hit]
    place = np.full(len(call), -1, np.int64)
    place[hit] = n.outer_call[ranked[at[hit]]]
    found: Array = of_place[place]
    return found


def _calls(p: HostTasks, piece: Array, begin: float) -> tuple[Array, Array]:
    known = piece != NONE
    start, end = np.full(len(piece), np.nan), np.full(len(piece), np.nan)
    start[known], end[known] = p.start[piece[known]] - begin, p.end[piece[known]] - begin
    return start, end


def _blocking(events: Events, own: Work, piece: Array, call_end: Array) -> Array:
    """The pieces that are copies which the host waited for: done before their call returned."""
    is_copy = events.what[own.event] == What.COPY
    waited = is_copy & (piece != NONE) & (own.end <= call_end)
    return distinct(piece[waited])


def _host(
    p: HostTasks, count: Array, idle: tuple[Array, Array, Array, Array], blocking: Array
) -> tuple[Host, Array]:
    """Host tasks from pieces, and the task of each piece.

    A blocking copy becomes two tasks, its call and its return.
    """
    thread, start, end, label = idle
    none, no = np.full(len(thread), NONE), np.zeros(len(thread), bool)
    rows = {
        "thread": (p.thread, p.thread[blocking], thread),
        "start": (p.start, p.start[blocking], start),
        "end": (p.end, p.end[blocking], end),
        "label": (p.label, p.label[blocking], label),
        "unit": (p.unit, p.unit[blocking], none),
        "is_call": (p.is_call, p.is_call[blocking], no),
        "is_return": (np.zeros(len(p), bool), np.ones(len(blocking), bool), no),
        "call": (np.full(len(p), NONE), blocking, none),
        "recorded": (count, np.zeros((len(blocking) + len(none), 2), np.int32)),
    }
    columns = {k: np.concatenate(v) for k, v in rows.items()}
    ranked = np.lexsort((columns["is_return"], columns["start"], columns["thread"]))
    place = np.empty(len(ranked), np.int64)
    place[ranked] = np.arange(len(ranked))
    columns["call"] = np.append(place, NONE)[columns["call"]]
    return Host(**{k: v[ranked] for k, v in columns.items()}), place[: len(p)]


def _untraced(
    events: Events, n: EventTree, p: HostTasks, begin: float, end: float, thread: int
) -> tuple[Array, Array, Array, Array]:
    """(thread, start, end, label) of untraced time that is a task, not a gap.

    On the main thread before its first and after its last piece; on other threads before their
    first where the main thread has done nothing yet that could have started them; at the beginning
    and behind the end of what is noted as the optimizer's, so that its own time goes with it.
    """
    mine = np.sort(p.start[p.thread == thread])
    rows = _note_rows(events, n, mine, end, thread)
    busy = [(float(mine[0]), float(p.end[p.thread == thread].max()))] if len(mine) else []
    covered = busy + [(r[1], r[2]) for r in rows]
    first = min((a for a, _ in covered), default=end)
    last = max((b for _, b in covered), default=begin)
    rows.append((thread, begin, first, NONE))
    if first < end:
        rows.append((thread, last, end, NONE))
    done = p.end[p.thread == thread].min(initial=np.inf)
    for other in distinct(p.thread[p.thread != thread]).tolist():
        start = float(p.start[p.thread == other].min())
        if start < min(done, first):
            rows.append((other, begin, start, NONE))
    table = np.array([r for r in rows if r[2] > r[1]], np.float64).reshape(-1, 4)
    return table[:, 0].astype(np.int64), table[:, 1], table[:, 2], table[:, 3].astype(np.int64)


def _note_rows(
    events: Events, n: EventTree, starts: Array, end: float, thread: int
) -> list[tuple[int, float, float, int]]:
    """From the beginning of each optimizer note to its first piece, from its end to the next."""
    updates = (n.tells & RangeKind.UPDATE) > 0
    inner = np.where(n.parent == NONE, False, updates[n.parent])
    outer = np.flatnonzero(
        updates & ~inner & (events.what[n.event] == What.NOTE) & (events.place[n.event] == thread)
    )
    rows = []
    for place in outer.tolist():
        a, b = float(events.start[n.event[place]]), float(events.end[n.event[place]])
        at = np.searchsorted(starts, [a, b])
        following = [float(starts[k]) if k < len(starts) else end for k in at]
        rows.append((thread, a, min(b, following[0]), place))
        if following[1] < end:
            rows.append((thread, b, following[1], NONE))
    return rows
