"""A schedule as a picture: text that fits a terminal, or SVG."""

from collections.abc import Sequence
from html import escape
from math import ceil
from textwrap import wrap

from foretell.search.schedule.schedule import Schedule, Span

_FORWARD, _BACKWARD, _WEIGHT = "0123456789", "ABCDEFGHIJ", "abcdefghij"
_SIGNS = {"F": _FORWARD, "B": _BACKWARD, "I": _BACKWARD, "W": _WEIGHT, "C": "~"}
_IDLE, _CUT = "·", " … "
_LONGEST = 40  # lines so many times too long show their ends; longer ones are scaled down
# hues of forward, backward, input and weight gradients, communication: apart for most eyes
_HUES = {"F": 210, "B": 30, "I": 30, "W": 130, "C": 280}
_ROW, _BAR, _TOP, _SIDE = 26, 20, 34, 44  # pixels


def text(schedule: Schedule, width: int = 80) -> str:
    """One line a device; a sign is a micro-batch modulo ten. What is too long shows both ends."""
    names = {d: f"{d} " for d in range(schedule.problem.num_devices) if not _is_link(schedule, d)}
    side = max(map(len, names.values()))
    room = max(width - side, 8)
    step, columns = _scale(schedule, room)
    lines = []
    for device, name in names.items():
        line = _line(schedule, schedule.on(device), step, columns)
        lines.append(name.rjust(side) + _ends(line, room))
    key = f"a column is {step:.4g}; 0-9 forward, A-J backward, a-j weight gradient, {_IDLE} idle"
    return "\n".join([*lines, *wrap(key, width)])


def svg(schedule: Schedule, width: int = 1000) -> str:
    """One bar a block, coloured by what it does, darker with every other micro-batch."""
    problem = schedule.problem
    scale = (width - _SIDE - 8) / schedule.makespan if schedule.makespan else 1.0
    height = _TOP + _ROW * problem.num_devices + 8
    name = problem.name or "schedule"
    ends = f"makespan {schedule.makespan:g}, {schedule.per_micro_batch:g} a micro-batch"
    title = escape(f"{name}: {ends}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" role="img">',
        f"<title>{title}</title>",
        f'<text x="8" y="18" font-size="13">{title}</text>',
    ]
    for device in range(problem.num_devices):
        top = _TOP + _ROW * device
        parts.append(f'<text x="8" y="{top + 14}">{device}</text>')
        parts += [_bar(schedule, span, top, scale) for span in schedule.on(device)]
    return "\n".join([*parts, "</svg>\n"])


def _is_link(schedule: Schedule, device: int) -> bool:
    """Whether a device only carries messages: it stands for a link."""
    mine = [b.kind for b in schedule.problem.blocks if device in b.devices]
    return bool(mine) and set(mine) == {"C"}


def _scale(schedule: Schedule, room: int) -> tuple[float, int]:
    """The time of a column and how many there are: one a time step, if there are not too many."""
    steps = [t for t in schedule.problem.seconds if t > 0]
    if not steps:
        return 1.0, 1
    step = min(steps)
    if any(t % step for t in steps) or schedule.makespan / step > _LONGEST * room:
        return schedule.makespan / room, room
    return step, ceil(schedule.makespan / step)


def _line(schedule: Schedule, spans: Sequence[Span], step: float, columns: int) -> str:
    signs = [_IDLE] * columns
    for span in spans:
        kind = _SIGNS[schedule.problem.blocks[span.block].kind]
        sign = kind[span.micro_batch % len(kind)]
        first, last = round(span.start / step), round(span.end / step)
        signs[first:last] = sign * (last - first)
    return "".join(signs[:columns])


def _ends(line: str, room: int) -> str:
    half = (room - len(_CUT)) // 2
    return line if len(line) <= room else line[:half] + _CUT + line[-half:]


def _bar(schedule: Schedule, span: Span, top: int, scale: float) -> str:
    block = schedule.problem.blocks[span.block]
    left, size = _SIDE + span.start * scale, (span.end - span.start) * scale
    light = 62 if span.micro_batch % 2 else 74
    what = block.name or f"block {block.id}"
    hint = (
        f"{what} ({block.kind}) of micro-batch {span.micro_batch}: {span.start:g} to {span.end:g}"
    )
    place = f'x="{left + size / 2:.2f}" y="{top + 14}" text-anchor="middle"'
    fits = size >= 7 * len(str(span.micro_batch))  # pixels of a digit
    label = f"<text {place}>{span.micro_batch}</text>" if fits else ""
    return (
        f'<g><title>{escape(hint)}</title><rect x="{left:.2f}" y="{top}" width="{size:.2f}" '
        f'height="{_BAR}" fill="hsl({_HUES[block.kind]} 60% {light}%)" stroke="#fff" '
        f'stroke-width="0.5"/>{label}</g>'
    )
