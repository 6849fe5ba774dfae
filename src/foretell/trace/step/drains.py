"""What host calls wait for on the device: streams to be empty, an event, room in the queue.

A stream whose work went on behind the end of a call was not waited for, whatever the call says.
"""

from __future__ import annotations

import numpy as np

from foretell.graph.columns import NONE, Array
from foretell.trace.runs import distinct, median
from foretell.trace.step.device import typical
from foretell.trace.step.draft import NOISE, Draft
from foretell.trace.step.issue import Issue, Told, calls_that, times_of
from foretell.trace.words import Does

# Launches that fit in a stream's queue: an H200's driver blocks with 999 to 1031 outstanding.
QUEUE_DEPTH = 1024
_LEAST_DEPTH = 512  # fewer outstanding launches than this never block
_SLOW_LAUNCH = 5.0  # medians: a launch that takes longer was held up


def drains(d: Draft, issue: Issue, told: dict[int, Told]) -> tuple[Array, Array, Array]:
    """(task, stream, last work on it) of all that waits for streams to be empty."""
    rows: list[tuple[int, int, int]] = []
    work = d.device.work
    calls = calls_that(d, Does.DRAIN_DEVICE, Does.DRAIN_STREAM, Does.FREE).tolist()
    for task in calls + np.flatnonzero(d.host.is_return).tolist():
        is_return = bool(d.host.is_return[task])
        for stream in _candidates(d, issue, told, task):
            # A blocking copy is issued by the very call that waits for it.
            last = issue.last_before(stream, float(d.host.start[task]), behind=is_return)
            if last != NONE and work.end[last] <= d.host.end[task] + NOISE:
                rows.append((task, stream, last))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _candidates(d: Draft, issue: Issue, told: dict[int, Told], task: int) -> list[int]:
    """The streams that a call may wait for."""
    if d.host.is_return[task]:
        return [int(d.device.work.stream[np.flatnonzero(d.device.host == d.host.call[task])[-1]])]
    if d.nest.does[d.host.label[task]] in (Does.DRAIN_DEVICE, Does.FREE):
        return list(issue.rows)
    known = told.get(int(d.nest.event[d.host.label[task]]))
    if known is not None:
        return [known.stream] if known.stream in issue.rows else []
    near = _stream_before(d, task)
    return [near] if near != NONE else []


def _stream_before(d: Draft, task: int) -> int:
    """The stream of the last work that the same thread launched before a task."""
    known = np.flatnonzero(d.device.host != NONE)
    launcher = d.device.host[known]
    mine = (launcher < task) & (d.host.thread[launcher] == d.host.thread[task])
    if not mine.any():
        return NONE
    return int(d.device.work.stream[known[mine][np.argmax(launcher[mine])]])


def event_drains(d: Draft, issue: Issue, told: dict[int, Told]) -> tuple[Array, Array]:
    """(task, work) of calls that wait for an event: the last work before its record.

    Where the trace does not name the stream it is the one whose work ended last of those that can
    be meant.
    """
    found: list[tuple[int, int]] = []
    records, work = times_of(d, Does.RECORD)[0], d.device.work
    for task in calls_that(d, Does.DRAIN_EVENT).tolist():
        start = float(d.host.start[task])
        known = told.get(int(d.nest.event[d.host.label[task]]), Told(NONE, NONE, None))
        at = int(np.searchsorted(records, start)) - 1
        record = known.record if known.record is not None else records[at] if at >= 0 else start
        streams = [known.source] if known.source in issue.rows else list(issue.rows)
        last = [k for s in streams if (k := issue.last_before(s, float(record))) != NONE]
        done = [k for k in last if work.end[k] <= d.host.end[task] + NOISE]
        if done:
            found.append((task, max(done, key=lambda k: work.end[k])))
    table = np.array(found, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def queue(d: Draft) -> tuple[Array, Array]:
    """(launch, work) where a launch goes on only when that work has made room in the queue.

    The launch can return once the device has taken up the work `depth` launches before it, which
    is when the work before that has ended.
    """
    tasks, before = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    work, of = d.device.work, d.device.host
    for stream in distinct(work.stream).tolist():
        mine = np.flatnonzero(work.stream == stream)
        first = np.append(True, (of[mine][1:] != of[mine][:-1]) | (of[mine][1:] == NONE))
        head = mine[first]  # the first work of every launch
        calls = np.flatnonzero(of[head] != NONE)
        depth = _depth(d, head, calls)
        late = calls[calls > depth]
        task, made_room = of[head[late]], head[late - depth] - 1
        fits = work.end[made_room] <= d.host.end[task]
        tasks.append(task[fits])
        before.append(made_room[fits])
    return np.concatenate(tasks), np.concatenate(before)


def _depth(d: Draft, head: Array, calls: Array) -> int:
    """How many launches one stream's queue takes: what held-up launches show, or the usual."""
    task = d.device.host[head[calls]]
    took = d.host.end[task] - d.host.start[task]
    starts = np.sort(d.device.work.start[head])
    outstanding = calls - np.searchsorted(starts, d.host.end[task], side="right") + 1
    slow = took > _SLOW_LAUNCH * typical(took, np.inf)
    held = slow & (outstanding >= max(_LEAST_DEPTH, 0.95 * outstanding.max(initial=0)))
    if held.sum() >= 2:
        return int(median(outstanding[held]))
    return max(QUEUE_DEPTH, int(outstanding.max(initial=0)) + 1)
