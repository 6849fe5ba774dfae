"""The rule for any graph, event by event, over plain arrays.

A ready task sits in the queue of one lane that keeps it from starting; when that lane is free it is
looked at again, and either starts or moves to the queue of another lane that is taken. The state is
laid out so that a play can begin anywhere: at time zero, or in the middle of one that is known.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from foretell.simulate.heaps import event_pop, event_push, sooner, task_pop, task_push
from foretell.simulate.readable import ARRIVE, END, FREE, LANE, SLOWEST, WAIT

# Places in `State.count`.
EVENTS, FRESH, LANES, MOVING, MOVED = 0, 1, 2, 3, 4


class Fixed(NamedTuple):
    """What does not change while a graph is played. An empty `gap` or `lag` is all zero."""

    seconds: Any
    gap: Any
    priority: Any
    lane_start: Any  # the free lanes of each task
    lane: Any
    base: Any  # where the queue of each free lane begins
    follow_start: Any  # who waits for each task
    follower: Any
    lag: Any  # along `follower`
    turn_start: Any  # whose turn on an ordered lane comes after each task
    turn: Any
    use_start: Any  # the links of each task
    use_link: Any
    use_demand: Any
    capacity: Any


class State(NamedTuple):
    """What changes."""

    waiting: Any  # how many waits and turns of a task are not over yet
    ready: Any  # when its last wait was over, and whose end that was
    ready_by: Any
    free: Any  # when its last ordered lane was freed for it, and by whom
    free_by: Any
    start: Any
    end: Any
    cause: Any
    why: Any
    taken: Any  # of each free lane: whether it is held, when it was last freed, and by whom
    freed: Any
    freed_by: Any
    queue: Any  # tasks waiting for each free lane, as heaps one behind the other
    queued: Any
    times: Any  # events to come, as a heap
    codes: Any
    fresh: Any  # tasks that became ready at this instant
    lanes: Any  # free lanes to look at, as a heap of what their first task is
    marked: Any  # the place of a lane among them, from 1; 0 where it is not
    moving: Any  # running tasks that use links, ascending, with what is left of each
    left: Any
    speed: Any
    since: Any
    count: Any


@njit(cache=True)
def run(f: Fixed, s: State, now: float) -> None:
    """Play from the fresh tasks at `now` and the events pending until nothing is left."""
    while True:
        start_fresh(f, s, now)
        start_queued(f, s, now)
        if s.count[MOVED]:
            share_links(f, s, now)
            s.count[MOVED] = 0
        now = next_instant(s)
        if now == np.inf:
            return
        happen(f, s, now)


@njit(cache=True)
def next_instant(s: State) -> float:
    now = s.times[0] if s.count[EVENTS] else np.inf
    for m in range(s.count[MOVING]):
        now = min(now, s.end[s.moving[m]])
    return now


# What happens at an instant


@njit(cache=True)
def happen(f: Fixed, s: State, now: float) -> None:
    """Let everything happen that happens now."""
    n = len(f.seconds)
    while s.count[EVENTS] and s.times[0] == now:
        what, i = s.codes[0] // n, s.codes[0] % n
        event_pop(s.times, s.codes, s.count[EVENTS])
        s.count[EVENTS] -= 1
        if what == END:
            finish(f, s, i, now)
        elif what == FREE:
            leave(f, s, i, now)
        else:
            arrive(s, i)
    if s.count[MOVING]:
        finish_moving(f, s, now)


@njit(cache=True)
def finish(f: Fixed, s: State, i: int, now: float) -> None:
    """End a task: tell its followers, and free its lanes unless a gap follows."""
    has_lag = len(f.lag) > 0
    for k in range(f.follow_start[i], f.follow_start[i + 1]):
        j = f.follower[k]
        t = now + f.lag[k] if has_lag else now
        if t > s.ready[j] or (t == s.ready[j] and (s.ready_by[j] < 0 or i < s.ready_by[j])):
            s.ready[j], s.ready_by[j] = t, i
        if t > now:
            later(f, s, t, ARRIVE, j)
        else:
            arrive(s, j)
    if len(f.gap) and f.gap[i] > 0:
        later(f, s, now + f.gap[i], FREE, i)
    else:
        leave(f, s, i, now)


@njit(cache=True)
def leave(f: Fixed, s: State, i: int, now: float) -> None:
    """Free the lanes of a task; on ordered ones the next has its turn."""
    for k in range(f.turn_start[i], f.turn_start[i + 1]):
        j = f.turn[k]
        if now > s.free[j] or (now == s.free[j] and (s.free_by[j] < 0 or i < s.free_by[j])):
            s.free[j], s.free_by[j] = now, i
        arrive(s, j)
    for k in range(f.lane_start[i], f.lane_start[i + 1]):
        lane = f.lane[k]
        s.taken[lane], s.freed[lane], s.freed_by[lane] = 0, now, i
        look_at(f, s, lane)


@njit(cache=True)
def arrive(s: State, i: int) -> None:
    s.waiting[i] -= 1
    if s.waiting[i] == 0:
        s.fresh[s.count[FRESH]] = i
        s.count[FRESH] += 1


@njit(cache=True)
def later(f: Fixed, s: State, time: float, what: int, i: int) -> None:
    event_push(s.times, s.codes, s.count[EVENTS], time, what * len(f.seconds) + i)
    s.count[EVENTS] += 1


# What starts at an instant


@njit(cache=True)
def start_fresh(f: Fixed, s: State, now: float) -> None:
    """Start the ready tasks that need no free lane; queue the others."""
    for k in range(s.count[FRESH]):
        i = s.fresh[k]
        if f.lane_start[i] == f.lane_start[i + 1]:
            begin(f, s, i, now)
        else:
            queue_up(f, s, i)
    s.count[FRESH] = 0


@njit(cache=True)
def queue_up(f: Fixed, s: State, i: int) -> None:
    """Put a task into the queue of a lane that is taken, or else of its first one."""
    at = f.lane[f.lane_start[i]]
    for k in range(f.lane_start[i], f.lane_start[i + 1]):
        if s.taken[f.lane[k]]:
            at = f.lane[k]
            break
    if s.marked[at] and sooner(i, s.queue[f.base[at]], f.priority, s.ready):
        look_away(f, s, at)  # its place among the lanes depends on its first task
    task_push(s.queue, f.base[at], s.queued[at], i, f.priority, s.ready)
    s.queued[at] += 1
    look_at(f, s, at)


@njit(cache=True)
def start_queued(f: Fixed, s: State, now: float) -> None:
    """Start what free lanes allow, most urgent first over all lanes."""
    while s.count[LANES]:
        lane = s.lanes[0]
        look_away(f, s, lane)
        i = s.queue[f.base[lane]]
        task_pop(s.queue, f.base[lane], s.queued[lane], f.priority, s.ready)
        s.queued[lane] -= 1
        if is_free(f, s, i):
            begin(f, s, i, now)
        else:
            queue_up(f, s, i)  # behind a lane that is taken
            look_at(f, s, lane)


@njit(cache=True)
def is_free(f: Fixed, s: State, i: int) -> bool:
    for k in range(f.lane_start[i], f.lane_start[i + 1]):
        if s.taken[f.lane[k]]:
            return False
    return True


@njit(cache=True)
def begin(f: Fixed, s: State, i: int, now: float) -> None:
    """Start a task: take its lanes and note what let it start."""
    free, holder = s.free[i], s.free_by[i]
    for k in range(f.lane_start[i], f.lane_start[i + 1]):
        lane = f.lane[k]
        t, p = s.freed[lane], s.freed_by[lane]
        if p >= 0 and (t > free or (t == free and (holder < 0 or p < holder))):
            free, holder = t, p
        s.taken[lane] = 1
        if s.marked[lane]:
            look_away(f, s, lane)
    if free > s.ready[i] or s.ready_by[i] < 0:
        s.cause[i], s.why[i] = holder, LANE if holder >= 0 else 0
    else:
        s.cause[i], s.why[i] = s.ready_by[i], WAIT
    s.start[i], s.end[i] = now, now + f.seconds[i]
    if f.seconds[i] > 0 and f.use_start[i] < f.use_start[i + 1]:
        start_moving(f, s, i, now)
    else:
        later(f, s, s.end[i], END, i)


# The heap of lanes to look at


@njit(cache=True)
def look_at(f: Fixed, s: State, lane: int) -> None:
    """Remember that a free lane has somebody waiting."""
    if s.marked[lane] or s.taken[lane] or s.queued[lane] == 0:
        return
    s.count[LANES] += 1
    rise(f, s, s.count[LANES] - 1, lane)


@njit(cache=True)
def look_away(f: Fixed, s: State, lane: int) -> None:
    """Forget a lane."""
    at = s.marked[lane] - 1
    s.marked[lane] = 0
    s.count[LANES] -= 1
    size = s.count[LANES]
    if at == size:
        return
    last = s.lanes[size]
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and goes_first(f, s, s.lanes[down + 1], s.lanes[down]):
            down += 1
        if not goes_first(f, s, s.lanes[down], last):
            break
        s.lanes[at] = s.lanes[down]
        s.marked[s.lanes[at]] = at + 1
        at = down
    rise(f, s, at, last)


@njit(cache=True)
def rise(f: Fixed, s: State, at: int, lane: int) -> None:
    while at > 0 and goes_first(f, s, lane, s.lanes[(at - 1) >> 1]):
        s.lanes[at] = s.lanes[(at - 1) >> 1]
        s.marked[s.lanes[at]] = at + 1
        at = (at - 1) >> 1
    s.lanes[at] = lane
    s.marked[lane] = at + 1


@njit(cache=True)
def goes_first(f: Fixed, s: State, a: int, b: int) -> bool:
    return bool(sooner(s.queue[f.base[a]], s.queue[f.base[b]], f.priority, s.ready))


# Tasks that share links


@njit(cache=True)
def start_moving(f: Fixed, s: State, i: int, now: float) -> None:
    """Add a task to those that move, kept in ascending order."""
    m = s.count[MOVING]
    while m > 0 and s.moving[m - 1] > i:
        s.moving[m], s.left[m] = s.moving[m - 1], s.left[m - 1]
        s.speed[m], s.since[m] = s.speed[m - 1], s.since[m - 1]
        m -= 1
    s.moving[m], s.left[m], s.speed[m], s.since[m] = i, f.seconds[i], 0.0, now
    s.end[i] = np.inf
    s.count[MOVING] += 1
    s.count[MOVED] = 1


@njit(cache=True)
def finish_moving(f: Fixed, s: State, now: float) -> None:
    """End the tasks that move and are due."""
    kept, size = 0, s.count[MOVING]
    for m in range(size):
        i = s.moving[m]
        if s.end[i] == now:
            finish(f, s, i, now)
            continue
        s.moving[kept], s.left[kept] = i, s.left[m]
        s.speed[kept], s.since[kept] = s.speed[m], s.since[m]
        kept += 1
    s.count[MOVING] = kept
    if kept < size:
        s.count[MOVED] = 1


@njit(cache=True)
def share_links(f: Fixed, s: State, now: float) -> None:
    """Give every moving task its speed, and its end anew where the speed has changed."""
    size = s.count[MOVING]
    speed = fair(f, s.moving[:size])
    for m in range(size):
        if speed[m] != s.speed[m]:
            s.left[m] = max(s.left[m] - (now - s.since[m]) * s.speed[m], 0.0)
            s.speed[m], s.since[m] = speed[m], now
            s.end[s.moving[m]] = now + s.left[m] / speed[m]


@njit(cache=True)
def fair(f: Fixed, moving: Any) -> Any:
    """All speeds rise together; those on a link stop when it is full, the others go on to 1."""
    room = f.capacity.copy()
    demand = np.empty(len(room))
    speed = np.full(len(moving), -1.0)
    left = len(moving)
    while left > 0:
        demand[:] = 0.0
        for m in range(len(moving)):
            if speed[m] < 0:
                for k in range(f.use_start[moving[m]], f.use_start[moving[m] + 1]):
                    demand[f.use_link[k]] += f.use_demand[k]
        level, full = np.inf, -1
        for link in range(len(room)):
            if demand[link] > 0 and room[link] / demand[link] < level:
                level, full = room[link] / demand[link], link
        level = max(level, SLOWEST)
        for m in range(len(moving)):
            if speed[m] < 0 and (level >= 1.0 or uses(f, moving[m], full)):
                speed[m] = min(level, 1.0)
                left -= 1
                for k in range(f.use_start[moving[m]], f.use_start[moving[m] + 1]):
                    room[f.use_link[k]] -= f.use_demand[k] * speed[m]
    return speed


@njit(cache=True)
def uses(f: Fixed, i: int, link: int) -> bool:
    for k in range(f.use_start[i], f.use_start[i + 1]):
        if f.use_link[k] == link:
            return True
    return False
