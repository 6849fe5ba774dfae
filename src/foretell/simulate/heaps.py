"""Binary heaps in plain arrays, for compiled loops.

Two sorts: events ordered by (time, code), and tasks waiting for a lane ordered by
(highest priority, earliest ready, lowest number).
"""

from __future__ import annotations

from typing import Any

from foretell.compiled import compiled


@compiled
def event_push(times: Any, codes: Any, size: int, time: float, code: int) -> None:
    """Put an event into a heap of `size` events that has room for it."""
    i = size
    while i > 0:
        up = (i - 1) >> 1
        if times[up] < time or (times[up] == time and codes[up] <= code):
            break
        times[i], codes[i] = times[up], codes[up]
        i = up
    times[i], codes[i] = time, code


@compiled
def event_pop(times: Any, codes: Any, size: int) -> None:
    """Take the first event away; `size` counts it still.

    The hole sinks to a leaf and the last event rises from there: it seldom rises far, so this
    compares half as often as letting it sink.
    """
    size -= 1
    i, down = 0, 1
    while down < size:
        right = down + 1
        if right < size and (
            times[right] < times[down]
            or (times[right] == times[down] and codes[right] < codes[down])
        ):
            down = right
        times[i], codes[i] = times[down], codes[down]
        i = down
        down = 2 * i + 1
    event_push(times, codes, i, times[size], codes[size])


@compiled
def put_event(times: Any, codes: Any, size: int, time: float, code: int) -> None:
    """`event_push` as a call: a loop that does so in several places is compiled in less time."""
    event_push(times, codes, size, time, code)


@compiled
def take_event(times: Any, codes: Any, size: int) -> None:
    """`event_pop` as a call."""
    event_pop(times, codes, size)


@compiled
def sooner(a: int, b: int, priority: Any, ready: Any) -> bool:
    """Whether task a goes before task b on a free lane."""
    if priority[a] != priority[b]:
        return bool(priority[a] > priority[b])
    if ready[a] != ready[b]:
        return bool(ready[a] < ready[b])
    return a < b


@compiled
def task_push(heap: Any, base: int, size: int, i: int, priority: Any, ready: Any) -> None:
    """Put a task into the heap that begins at `base` and holds `size` tasks."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if sooner(heap[base + up], i, priority, ready):
            break
        heap[base + at] = heap[base + up]
        at = up
    heap[base + at] = i


@compiled
def task_pop(heap: Any, base: int, size: int, priority: Any, ready: Any) -> None:
    """Take the first task away; `size` counts it still."""
    size -= 1
    i = heap[base + size]
    at = 0
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and sooner(heap[base + down + 1], heap[base + down], priority, ready):
            down += 1
        if not sooner(heap[base + down], i, priority, ready):
            break
        heap[base + at] = heap[base + down]
        at = down
    heap[base + at] = i
