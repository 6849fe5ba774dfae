"""A step before and after: its timelines, its figures, what would help, and what it holds.

Without given changes, the best combination found is shown as the step after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from foretell.advise import TRIED, Recommendations, Step, advise, gain, peak, shown, untracked_ops
from foretell.errors import ForetellError
from foretell.graph.graph import Graph
from foretell.report import words
from foretell.report.page import Content, PageTimeline
from foretell.survey.diagnosis import diagnose
from foretell.survey.inputs import Sections
from foretell.survey.memory import tape_curves
from foretell.survey.window import Window, measured, window
from foretell.whatif import WhatIf, applied, ordered, parse, tried

if TYPE_CHECKING:
    from foretell.survey.planned import PlanPage
from foretell.whatif.registry import check

Progress = Callable[[str], None]
CURRENT = "current step"
_UNKNOWN = (
    "memory with {} is unknown: that of a captured step follows amp, compile, tf32 and "
    "channels-last; profile the step to see more"
)


@dataclass(frozen=True, eq=False)
class Survey:
    """Timelines, top to bottom, and the sections of the page."""

    timelines: tuple[PageTimeline, ...]
    content: Content


def survey(
    steps: Sequence[Step],
    specs: Sequence[str] = (),
    drawn: Sections | None = None,
    *,
    advice: bool = True,
    advised: Recommendations | None = None,
    progress: Progress = lambda words: None,
) -> Survey:
    """Diagnose steps and draw the rest; with `advice`, every change is tried on the first step.

    `advised` has the outcome of these trials, where it is known.
    """
    drawn = drawn or Sections()
    if advice and advised is None and steps:
        advised = advise(steps[0], TRIED, progress)
    progress("simulating")
    found = [_step_sections(one, specs, None if k else advised) for k, one in enumerate(steps)]
    names = [one.name for one in steps] or [d["name"] for d in _all(drawn)]
    content = Content(
        title=", ".join(names[:3]),
        figures=[f for t in found for f in t.figures] or _plan_figures(drawn.pages),
        notes=list(dict.fromkeys(n for t in found for n in t.notes)),
        diagnosis=_diagnosis(found, drawn),
        advice=found[0].advice if found else None,
        memory=[m for t in found for m in t.memory] + [m for p in drawn.pages for m in p.memory],
        oracle=drawn.oracle,
        plans=drawn.plans,
        schedules=drawn.schedules,
    )
    lines = [line for t in found for line in t.timelines]
    return Survey((*lines, *(line for one in drawn.pages for line in _lines(one))), content)


def _plan_figures(pages: Sequence[PlanPage]) -> list[dict[str, Any]]:
    """Where there are plans alone: all figures of one, or the step of each of several."""
    if len(pages) == 1:
        return pages[0].figures
    return [{"what": one.timelines[-1][0], "seconds": one.prediction.step} for one in pages[:4]]


def _all(drawn: Sections) -> list[dict[str, Any]]:
    return [*drawn.oracle, *drawn.plans, *drawn.schedules]


@dataclass(frozen=True, eq=False)
class _StepSections:
    timelines: list[PageTimeline]
    figures: list[dict[str, Any]]
    notes: list[str]
    diagnosis: dict[str, Any]
    advice: dict[str, object] | None
    memory: list[dict[str, Any]]


def _step_sections(
    step: Step, specs: Sequence[str], advised: Recommendations | None
) -> _StepSections:
    changes = tuple(parse(spec) for spec in specs) or _best(advised)
    now = window(step, step.graph)
    lines = [measured(step.measured)] if step.measured else []
    lines.append(now.shown(CURRENT))
    graphs = [(CURRENT, step.graph)]
    assumed, left = [], []
    if changes:
        after, made, refused = _changed_step(step, tuple(map(str, changes)))
        changes = tuple(made)
        left = [f"{spec} could not be tried: {reason}" for spec, reason in refused]
        name = "with " + " ".join(map(str, changes))
        unknown = untracked_ops(after) if len(after.buffers) else []
        lines.append(replace(window(step, after).shown(name), has_memory=not unknown))
        left += [_UNKNOWN.format(", ".join(unknown))] if unknown else []
        graphs.append((name, after))
        assumed = [f"assuming {text}" for change in changes for text in change.assumes]
    found = diagnose(step, now, advised) | {"compared": compared(step)}
    found |= {"lower_memory": _lower_memory(step, advised)}
    return _StepSections(
        lines,
        _figures(step, changes, graphs[-1][1], found["gpu"]),
        [*step.notes, *left, *dict.fromkeys(assumed)],
        found,
        _advice(step, advised) if advised else None,
        [curve for title, graph in graphs for curve in tape_curves(title, graph)],
    )


def _advice(step: Step, advised: Recommendations) -> dict[str, Any]:
    """What would help, as plain values; without the bottleneck where there are several ranks."""
    found: dict[str, Any] = shown(step.graph, advised)
    if len(np.unique(step.graph.rank)) > 1:
        for row in (*found["ranked"], *found["path"], found["together"] or {}):
            row["why"] = ""
    return found


def _lower_memory(step: Step, advised: Recommendations | None) -> list[dict[str, Any]]:
    """Changes that lower the peak by a twentieth or more, the lowest first."""
    now = peak(step.graph)
    if advised is None or not now:
        return []
    rows: list[dict[str, Any]] = [
        {"changes": [str(c) for c in a.changes], "peak_bytes": a.peak_bytes, "gain": a.gain}
        for a in advised.ranked
        if a.peak_bytes and a.peak_bytes < 0.95 * now
    ]
    return sorted(rows, key=lambda r: float(r["peak_bytes"]))[:6]


def _best(advised: Recommendations | None) -> tuple[WhatIf, ...]:
    return advised.best.changes if advised and advised.best else ()


def _diagnosis(steps: Sequence[_StepSections], drawn: Sections) -> dict[str, Any] | None:
    """Diagnosis of the first step or, with plans alone, of the step under the last one."""
    runs = [{**run} for run in drawn.runs]
    if steps:
        first = steps[0].diagnosis
        return first | {"compared": [*first["compared"], *runs]}
    if not drawn.pages:
        return {"compared": runs} if runs else None
    found = _window(drawn.pages[-1])
    return diagnose(Step(found.line.graph, drawn.pages[-1].cluster), found) | {"compared": runs}


def _window(page: PlanPage) -> Window:
    """The step under a plan; as long as its prediction says."""
    line = page.timelines[-1][1]
    return Window(page.prediction.step, line, 0.0, line)


def _lines(page: PlanPage) -> list[PageTimeline]:
    """The step under a plan below its baselines; its memory is drawn as it is predicted."""
    *others, (name, _) = page.timelines
    return [
        *(PageTimeline(*one) for one in others),
        replace(_window(page).shown(name), has_memory=False),
    ]


def compared(step: Step) -> list[dict[str, Any]]:
    """Measured beside predicted: the step as profiled, and without the profiler."""
    if step.measured is None or step.baseline is None:
        return []
    measured = float(step.measured.graph.facts["measured"])
    return [
        {"what": "with the profiler", "measured_s": measured,
         "predicted_s": measured * (1 + step.baseline.replay_error)},
        {"what": f"{CURRENT}, without the profiler", "measured_s": step.seconds,
         "predicted_s": step.baseline.simulated, "more": step.baseline.note},
    ]  # fmt: skip


def _figures(
    step: Step, changes: Sequence[WhatIf], after: Graph, gpu: dict[str, Any]
) -> list[dict[str, Any]]:
    """The few numbers that come first."""
    more = "without the profiler" if step.baseline else f"{step.graph.size:,} tasks"
    found: list[dict[str, Any]] = [{"what": CURRENT, "seconds": step.seconds, "more": more}]
    if changes:
        low, high = step.interval(after, changes)
        seconds = step.predicted(after)
        found.append(
            {"what": "with changes", "more": " + ".join(map(str, changes)),
             "seconds": seconds, "gain": gain(step, changes, seconds), "per": per(changes),
             "low": low, "high": high}
        )  # fmt: skip
    found += _device_figures(gpu)
    if (most := peak(step.graph)) is not None:
        then = peak(after) if changes else None
        later = f"{words.size(then)} with the changes" if then is not None else ""
        full = gpu.get("memory_bytes")
        share = f"{_percent(most / full, 0)} of {words.size(full)}" if full else ""
        found.append({"what": "peak memory", "bytes": most, "more": share, "then": later})
    return found


def _device_figures(gpu: dict[str, Any]) -> list[dict[str, Any]]:
    """GPU utilisation, MFU and HFU."""
    ranks = f"{gpu['ranks']} × " if gpu["ranks"] > 1 else ""
    name = ranks + gpu["name"] if gpu["name"] else "device unknown: name it with --on"
    if not gpu["kernels"]:
        return []
    found = [{"what": "GPU busy", "text": _percent(gpu["busy"], 0), "more": name}]
    if gpu.get("mfu"):
        rate = f"of {gpu['peak'] / 1e12:.0f} Tflop/s {gpu['format']}, {words.count(gpu['flops'])}"
        mfu, hfu = _percent(gpu["mfu"], 1), _percent(gpu["hfu"], 1)
        more = f"{rate}flop a step"
        found.append({"what": "MFU", "text": mfu, "then": f"HFU {hfu}", "more": more})
    return found


def _percent(share: float, digits: int) -> str:
    """A share as text; one that would round to zero is below the least shown."""
    number = f"{100 * share:.{digits}f}"
    return f"{number} %" if float(number) or not share else f"< {10**-digits:g} %"


def changed(step: Step, specs: tuple[str, ...]) -> Graph:
    """The step with changes made; the last few are remembered."""
    graph, _, refused = _changed_step(step, specs) if specs else (step.graph, [], [])
    if refused:  # say why
        return applied([parse(spec) for spec in specs], step.graph, step.setting)
    return graph


@lru_cache(24)  # each a graph of its own
def _changed_step(
    step: Step, specs: tuple[str, ...]
) -> tuple[Graph, list[WhatIf], list[tuple[str, str]]]:
    """The step with those changes made that can be, which they are, and why others are not.

    The last of them is made on top of the others, which are remembered too.
    """
    changes = ordered([parse(spec) for spec in specs])
    check(changes)
    graph, last = step.graph, changes
    made: list[WhatIf] = []
    refused: list[tuple[str, str]] = []
    if len(changes) > 1:
        try:
            graph, made, refused = _changed_step(step, tuple(map(str, changes[:-1])))
        except ForetellError:  # none of the others can be made
            return tried(changes, step.graph, step.setting)
        last = changes[-1:]
    try:
        graph, more, _ = tried(last, graph, step.setting)
    except ForetellError as error:
        if not made:
            raise
        return graph, made, [*refused, (str(last[0]), error.message)]
    return graph, [*made, *more], refused


def per(changes: Sequence[WhatIf]) -> str:
    """The unit of a gain: a step, or a sample where the batch size changes."""
    return "sample" if any(change.name == "batch" for change in changes) else "step"


def outcome(
    step: Step, specs: Sequence[str], after: Graph | None = None, *, memory: bool = True
) -> dict[str, Any]:
    """The predicted outcome of changes, under the keys of `foretell whatif --json`.

    `after` is the step with them made, where that is known; without `memory` no peak is looked for.
    """
    changes = [parse(spec) for spec in specs]
    after = applied(changes, step.graph, step.setting) if after is None else after
    seconds = step.predicted(after)
    low, high = step.interval(after, changes) if changes else (seconds, seconds)
    return {
        **_baseline_fields(step, changes),
        "predicted_s": seconds,
        "low_s": low,
        "high_s": high,
        "gain": gain(step, changes, seconds),
        "peak_bytes": peak(after) if memory else None,
    }


def _baseline_fields(step: Step, changes: Sequence[WhatIf]) -> dict[str, Any]:
    """What an outcome says of its changes and of the step before them."""
    return {
        "changes": [str(change) for change in changes],
        "baseline_s": step.seconds,
        "per": per(changes),
        "assumptions": [text for change in changes for text in change.assumes],
    }


def known_outcome(
    step: Step, specs: Sequence[str], advised: Recommendations
) -> dict[str, Any] | None:
    """The outcome of changes that were tried already, as `outcome` gives it; None where not."""
    tried_before = (*advised.ranked, *advised.path, *([advised.best] if advised.best else []))
    for one in tried_before:
        if [str(change) for change in one.changes] == list(specs):
            times = {"predicted_s": one.seconds, "low_s": one.low, "high_s": one.high}
            return _baseline_fields(step, one.changes) | times | {
                "gain": one.gain, "peak_bytes": one.peak_bytes
            }  # fmt: skip
    return None


def applies(step: Step, spec: str) -> str:
    """Why a change does not apply to a step; empty where it does."""
    try:
        applied([parse(spec)], step.graph, step.setting)
    except ForetellError as error:
        return error.message
    except Exception as error:  # shown beside the change; the others can still be tried
        return f"could not be tried ({type(error).__name__}: {error})"
    return ""
