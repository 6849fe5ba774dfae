"""A schedule as lists of actions, as text for a terminal, and as SVG."""

from collections.abc import Callable, Sequence
from html import escape
from math import ceil
from textwrap import wrap

from foretell.errors import InputError
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.schedule import Schedule, Span

# A schedule as what each device does in turn: `3F0`, `3B0`, `3I0`, `3W0`.
#
# Stages are the forward blocks, numbered in the order of forward. A backward block belongs to the
# stage on its devices whose followers' backwards it waits for (or whose forward, for the last). The
# lists are what `torch.distributed.pipelining` runs and what torchtitan reads from a file.


def actions(schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """The actions of each device, in order."""
    stages = stage_of(schedule.problem)
    blocks = schedule.problem.blocks
    return tuple(
        tuple(
            f"{stages[s.block]}{blocks[s.block].kind}{s.micro_batch}" for s in schedule.on(device)
        )
        for device in range(schedule.problem.num_devices)
    )


def after(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The stages that each stage takes its input from."""
    stages = stage_of(problem)
    forward = _forward(problem)
    return tuple(
        tuple(sorted({stages[w.on] for w in problem.after[block] if w.on in forward}))
        for block in sorted(forward, key=lambda b: stages[b])
    )


def copies(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Stages that hold the same parameters: the k-th of every separate pipeline of equal length."""
    lines = _lines(after(problem))
    if len(lines) < 2 or len({len(line) for line in lines}) > 1:
        return ()
    return tuple(zip(*lines, strict=True))


def stage_of(problem: Problem) -> dict[int, int]:
    """The stage of each block, by place in the problem."""
    found = {block: stage for stage, block in enumerate(_numbered(problem))}
    follow = _followers(problem, found)
    for block in problem.order:
        if problem.blocks[block].kind in "BIW":
            found[block] = _stage(problem, block, found, follow)
        elif problem.blocks[block].kind != "F":
            raise InputError(
                f"block {problem.blocks[block].id} is communication that holds its devices",
                hint="give messages as lags: the runtime sends them beside the compute",
            )
    return found


def _numbered(problem: Problem) -> list[int]:
    """The forward blocks as they are listed, where that is an order of forward."""
    listed = [i for i, b in enumerate(problem.blocks) if b.kind == "F"]
    is_order = all(w.on < w.block for w in problem.waits if {w.on, w.block} <= set(listed))
    return listed if is_order else [b for b in problem.order if b in set(listed)]


def _stage(
    problem: Problem, block: int, found: dict[int, int], follow: dict[int, frozenset[int]]
) -> int:
    """The stage whose backward a block is."""
    kind, devices = problem.blocks[block].kind, set(problem.blocks[block].devices)
    waits = [w.on for w in problem.after[block]]
    if kind == "W":
        return found[next(w for w in waits if problem.blocks[w].kind == "I")]
    on = frozenset(found[w] for w in waits if problem.blocks[w].kind in "BI")
    own = [w for w in waits if problem.blocks[w].kind == "F"]
    taken = {found[b] for b in found if problem.blocks[b].kind in "BI"}
    for place in [*own, *(b for b in follow if follow[b] == on)]:
        is_here = set(problem.blocks[place].devices) == devices
        if is_here and follow[place] == on and found[place] not in taken:
            return found[place]
    raise InputError(
        f"backward block {problem.blocks[block].id} belongs to no forward block",
        hint="let backward go back over the devices of forward",
    )


def _followers(problem: Problem, stages: dict[int, int]) -> dict[int, frozenset[int]]:
    forward = _forward(problem)
    return {
        b: frozenset(stages[w.block] for w in problem.waits if w.on == b and w.block in forward)
        for b in forward
    }


def _forward(problem: Problem) -> set[int]:
    return {i for i, b in enumerate(problem.blocks) if b.kind == "F"}


def _lines(befores: Sequence[Sequence[int]]) -> list[list[int]]:
    """Stages by the separate pipeline they are in."""
    found = list(range(len(befores)))
    for stage, ones in enumerate(befores):
        for one in ones:
            old, new = max(found[stage], found[one]), min(found[stage], found[one])
            found = [new if f == old else f for f in found]
    return [[s for s, f in enumerate(found) if f == name] for name in sorted(set(found))]


# A schedule as a picture: text that fits a terminal, or SVG.


_FORWARD, _BACKWARD, _WEIGHT = "0123456789", "ABCDEFGHIJ", "abcdefghij"
_SIGNS = {"F": _FORWARD, "B": _BACKWARD, "I": _BACKWARD, "W": _WEIGHT, "C": "~"}
_IDLE, _CUT = "·", " … "
_LONGEST = 40  # lines so many times too long show their ends; longer ones are scaled down
# hues of forward, backward, input and weight gradients, communication: apart for most eyes
_HUES = {"F": 210, "B": 30, "I": 30, "W": 130, "C": 280}
_ROW, _BAR, _TOP, _SIDE = 26, 20, 34, 44  # pixels


def text(
    schedule: Schedule, width: int = 80, unit: Callable[[float], str] = "{:.4g}".format
) -> str:
    """One line per device, one sign per column: a micro-batch modulo ten; long ones keep ends."""
    names = {d: f"{d} " for d in range(schedule.problem.num_devices) if not _is_link(schedule, d)}
    side = max(map(len, names.values()))
    room = max(width - side, 8)
    step, columns = _scale(schedule, room)
    lines = []
    for device, name in names.items():
        line = _line(schedule, schedule.on(device), step, columns)
        lines.append(name.rjust(side) + _ends(line, room))
    key = f"a column is {unit(step)}; 0-9 forward, A-J backward, a-j weight gradient, {_IDLE} idle"
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
