"""Pipeline schedules as they run: ours and PyTorch's own on gloo ranks, beside their simulation.

    python benchmarks/pipeline.py [--ranks 4] [--micro-batches 8] [--repeats 4] [--unit-ms 16]
    python benchmarks/pipeline.py --real --ranks 2       units that multiply, on a core a rank

Ranks share few cores here, so compute is a calibrated sleep: a unit of the model sleeps in its
forward, in the gradient of its input and in the gradient of its weight, and multiplies small
matrices besides; units differ in length. A rank that sleeps takes no core from another, and what
is measured is the schedule: its order, its waits, its messages and the runtime's own cost.

With `--real` units are linear layers of unequal width, a thread a rank. Other people's load on the
machine then changes how long an action takes; so each repetition is simulated with the times that
its own actions took, and the mean of its own waits, and compared with itself ("own times").

Action times, the delay of a message and the runtime's own time between two actions are taken
from two orders (a whole one and a split one) of each number of stages; every schedule is then
simulated from those alone. The run-to-run spread is
printed first: no simulation can be nearer than that.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from pipeline_units import LENGTHS, UNITS, batch, stage
from table import Row, show
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from foretell.graph import Builder
from foretell.pytorch.deploy.actions import Pipeline, Ran, needs, parse, run_order
from foretell.pytorch.deploy.blocks import Blocks
from foretell.search.schedule import Problem, schedule, shape
from foretell.search.schedule.schedule import actions, stage_of
from foretell.simulate import simulate

Times = dict[tuple[int, str], float]  # seconds by stage and kind


class Case(NamedTuple):
    """One schedule on one number of stages: an order of ours, or a class of torch's."""

    name: str
    stages: int
    rows: tuple[tuple[str, ...], ...] = ()
    torch_class: str = ""


def problem(spec: str, stages: int, unit: float) -> Problem:
    """A placement with the times that the stages were given."""
    found = shape(spec)
    of, each = stage_of(found), UNITS // stages
    blocks = []
    for place, block in enumerate(found.blocks):
        mine = LENGTHS[of[place] * each : (of[place] + 1) * each]
        forward, first = sum(mine), mine[0] if of[place] == 0 else 0.0
        # the first stage's input needs no gradient, and torch leaves the rest of I to its W
        late = forward if of[place] == 0 else 0.0
        took = {
            "F": forward,
            "B": 2 * forward - first,
            "I": forward - late,
            "W": forward + late - first,
        }
        blocks.append(replace(block, time=unit * took[block.kind]))
    return replace(found, blocks=tuple(blocks))


def cases(ranks: int, micro_batches: int, unit: float) -> list[Case]:
    """Our orders and torch's, all over the same units."""
    one, two = ranks, 2 * ranks
    options = [
        ("gpipe", f"v:devices={ranks}", one, "gpipe", None),
        ("1f1b", f"v:devices={ranks}", one, "1f1b", None),
        ("searched", f"v:devices={ranks}", one, "search", None),
        ("zb-h1", f"v:devices={ranks},split=yes", one, "zb-h1", None),
        ("searched, split", f"v:devices={ranks},split=yes", one, "search", None),
        ("searched, split, memory of 2", f"v:devices={ranks},split=yes", one, "search", 2),
        ("interleaved", f"loop:devices={ranks}", two, "interleaved", None),
        ("searched loop", f"loop:devices={ranks}", two, "search", None),
        ("hanayo waves", f"wave:devices={ranks}", two, "hanayo", None),
        ("zb-v", f"wave:devices={ranks},split=yes", two, "zb-v", None),
        ("searched waves, split", f"wave:devices={ranks},split=yes", two, "search", None),
    ]
    found = []
    for name, spec, stages, method, memory in options:
        made = schedule(
            problem(spec, stages, unit), micro_batches=micro_batches, method=method, memory=memory
        )
        found.append(Case(name, stages, actions(made)))
    theirs = [("GPipe", one), ("1F1B", one), ("LoopedBFS", two), ("Interleaved1F1B", two)]
    theirs += [("InterleavedZeroBubble", two), ("ZBVZeroBubble", two)]
    return found + [Case(f"torch {n}", s, (), f"Schedule{n}") for n, s in theirs]


def places(case: Case, ranks: int) -> list[int]:
    """The rank of each stage, for a class of torch's."""
    there = list(range(ranks))
    if "ZBV" in case.torch_class:
        return there + there[::-1]
    return there * (case.stages // ranks)


class Stage(PipelineStage):  # type: ignore[misc]
    """A stage of torch's that notes when it computes."""

    ran: list[Ran]

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        return self._noted("F", chunk, super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        kind = "B" if kwargs.get("full_backward", True) else "I"
        self._noted(kind, chunk, super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        return self._noted("W", chunk, super().backward_weight_one_chunk, *args, **kwargs)

    def _noted(self, kind: str, chunk: int, call: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        found = call(chunk, *args, **kwargs)
        self.ran.append(Ran(f"{self.stage_index}{kind}{chunk}", start, time.monotonic()))
        return found


class Theirs:
    """A schedule class of torch's, noting when its stages compute."""

    def __init__(self, case: Case, micro_batches: int, modules: dict[int, Any]) -> None:
        self.ran: list[Ran] = []
        self.stages = [Stage(m, s, case.stages, torch.device("cpu")) for s, m in modules.items()]
        for one in self.stages:
            one.ran = self.ran
        kind = getattr(torch_schedules, case.torch_class)
        is_single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
        given = self.stages[0] if is_single else self.stages
        self.schedule = kind(given, micro_batches, loss_fn=nn.functional.mse_loss)

    def step(self, inputs: tuple[Any, ...], target: Any) -> None:
        self.ran.clear()
        first, last = (any(getattr(s, w) for s in self.stages) for w in ("is_first", "is_last"))
        wanted = {"target": target, "losses": []} if last else {}
        self.schedule.step(*(inputs if first else ()), **wanted)


def measure(rank: int, ranks: int, folder: str, todo: list[Case], options: Any) -> None:
    """One rank: run every case, every repetition of all before the next, and write what ran."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    runs = [_runner(case, rank, ranks, options) for case in todo]
    x, y = batch(options.micro_batches, works=options.real)
    found: list[list[list[Ran]]] = [[] for _ in todo]
    for repeat in range(options.repeats + 1):
        for at, (run, modules) in enumerate(runs):
            for module in modules.values():
                module.zero_grad()
            dist.barrier()
            run.step((x,), y)
            if repeat:  # the first warms up
                found[at].append(list(run.ran))
    off = [
        _off(modules, case, x, y, options) for case, (_, modules) in zip(todo, runs, strict=True)
    ]
    torch.save((found, off), f"{folder}/rank-{rank}")
    dist.destroy_process_group()


def _runner(case: Case, rank: int, ranks: int, options: Any) -> tuple[Any, dict[int, Any]]:
    unit = options.unit_ms / 1e3
    if case.torch_class:
        mine = [s for s, r in enumerate(places(case, ranks)) if r == rank]
        modules = {s: stage(s, case.stages, unit, works=options.real) for s in mine}
        return Theirs(case, options.micro_batches, modules), modules
    pipeline = Pipeline(parse(case.rows))
    modules = {s: stage(s, case.stages, unit, works=options.real) for s in pipeline.on(rank)}
    return Blocks(pipeline, modules, nn.functional.mse_loss), modules


def _off(modules: dict[int, Any], case: Case, x: Any, y: Any, options: Any) -> float:
    """The largest difference of a gradient from that of one process."""
    unit = options.unit_ms / 1e3 if options.real else 0.0  # of those that sleep, any length will do
    parts = (stage(s, case.stages, unit, works=options.real) for s in range(case.stages))
    whole = nn.Sequential(*parts)
    parts = zip(x.chunk(options.micro_batches), y.chunk(options.micro_batches), strict=True)
    sum(nn.functional.mse_loss(whole(a), b) for a, b in parts).backward()
    return max(
        (p.grad - q.grad / options.micro_batches).abs().max().item()
        for s, module in modules.items()
        for p, q in zip(module.parameters(), whole[s].parameters(), strict=True)
    )


class Measured(NamedTuple):
    """One case as it ran."""

    case: Case
    spans: list[float]  # makespan of each repetition
    ran: list[list[list[Ran]]]  # by repetition, by rank
    off: float

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(parse([[r.action for r in rank] for rank in self.ran[0]]))

    @property
    def seconds(self) -> float:
        return statistics.median(self.spans)


def collected(folder: str, todo: list[Case], ranks: int) -> list[Measured]:
    """What all ranks wrote, by case."""
    each = [torch.load(f"{folder}/rank-{r}", weights_only=False) for r in range(ranks)]
    found = []
    for at, case in enumerate(todo):
        repeats = [list(rows) for rows in zip(*(e[0][at] for e in each), strict=True)]
        spans = [
            max(r.end for rank in rows for r in rank) - min(r.start for rank in rows for r in rank)
            for rows in repeats
        ]
        found.append(Measured(case, spans, repeats, max(e[1][at] for e in each)))
    return found


def action_times(measured: Measured) -> Times:
    """The mean seconds of each kind of action on each stage: a path adds them up."""
    took: dict[tuple[int, str], list[float]] = {}
    for rows in measured.ran:
        for rank in rows:
            for r in rank:
                (action,) = parse([[r.action]])[0]
                took.setdefault((action.stage, action.kind), []).append(r.end - r.start)
    return {key: statistics.fmean(values) for key, values in took.items()}


class Fit(NamedTuple):
    """What two orders of a number of stages tell: one whole, one with a split backward."""

    times: Times
    delay: float  # of a message that a rank waits for, the rank's waking up included
    between: float  # seconds of the runtime between two actions of which none waits


def fitted(measured: list[Measured], stages: int) -> Fit:
    """Action times, delay and the runtime's own time, from the calibration's orders alone."""
    used = [m for m in measured if m.case.name in CALIBRATION and m.case.stages == stages]
    times: Times = {}
    for m in used:
        times |= {k: v for k, v in action_times(m).items() if k not in times}
    late, gaps = [], []
    for m in used:
        for rows in m.ran:
            for wait, gap in _waits(m.pipeline, rows):
                (late if wait > 0 else gaps).append(gap)
    between = statistics.median(gaps)
    return Fit(times, max(0.0, statistics.fmean(late) - between), between)


def _waits(pipeline: Pipeline, rows: list[list[Ran]]) -> list[tuple[float, float]]:
    """For each action: how long its rank stood idle for a message, and then until it started."""
    ends = {parse([[r.action]])[0][0]: r.end for rank in rows for r in rank}
    ends |= {a._replace(kind="I"): end for a, end in ends.items() if a.kind == "B"}
    found = []
    for rank in rows:
        for before, r in pairwise(rank):
            (action,) = parse([[r.action]])[0]
            ready = [
                ends[n]
                for n in needs(pipeline, action)
                if pipeline.ranks[n.stage] != pipeline.ranks[action.stage]
            ]
            wait = max(ready, default=0.0) - before.end
            found.append((wait, r.start - max([*ready, before.end])))
    return found


def simulated(pipeline: Pipeline, fit: Fit, took: dict[str, float] | None = None) -> float:
    """The makespan of an order, its actions on a lane a rank and messages beside them.

    `took` has the seconds of every single action, where they are known.
    """
    make = Builder()
    lanes = [make.lane("compute", rank=r, kind="compute") for r in range(len(pipeline.orders))]
    done: dict[Any, int] = {}
    for action in run_order(pipeline):
        (rank,) = pipeline.ranks[action.stage]
        alone = took[str(action)] if took else fit.times[action.stage, action.kind]
        seconds = alone + fit.between
        task = make.task(kind="kernel", lane=lanes[rank], rank=rank, seconds=seconds)
        for need in needs(pipeline, action):
            moved = pipeline.ranks[need.stage] != pipeline.ranks[action.stage]
            make.wait(task, done[need], lag=fit.delay if moved else 0.0)
        done[action] = done[action._replace(kind=action.kind.replace("B", "I"))] = task
    return simulate(make.graph()).seconds


CALIBRATION = ("1f1b", "zb-h1", "interleaved", "zb-v")


def main() -> None:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4))
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--unit-ms", type=float, default=16.0)
    parser.add_argument("--real", action="store_true", help="units that compute")
    options = parser.parse_args()
    todo = cases(options.ranks, options.micro_batches, options.unit_ms / 1e3)
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(
            measure, args=(options.ranks, folder, todo, options), nprocs=options.ranks, daemon=True
        )
        measured = collected(folder, todo, options.ranks)
    report(measured, options.real)


def report(measured: list[Measured], real: bool) -> None:
    """The spread first, then each schedule, then how right the order is."""
    spread = [(max(m.spans) - min(m.spans)) / m.seconds for m in measured]
    fits = {n: fitted(measured, n) for n in {m.case.stages for m in measured}}
    print(f"run-to-run spread of a schedule: median {_percent(statistics.median(spread))}, "
          f"largest {_percent(max(spread))}")  # fmt: skip
    for n, fit in sorted(fits.items()):
        print(f"{n} stages: a message takes {1e3 * fit.delay:.2f} ms, "
              f"the runtime {1e3 * fit.between:.2f} ms between actions")  # fmt: skip
    rows, pairs, errors = [], [], []
    for m in measured:
        fit = fits[m.case.stages]
        cold, own = simulated(m.pipeline, fit), again(m, fit)
        off = statistics.median(o / s for o, s in zip(own, m.spans, strict=True)) - 1
        pairs.append((m, statistics.median(own) if real else cold))
        errors.append(off if real else cold / m.seconds - 1)
        figures = f"{1e3 * m.seconds:.1f} ms, simulated {1e3 * cold:.1f}"
        said = f"{100 * (cold / m.seconds - 1):+.1f} %, own times {100 * off:+.1f} %"
        rows.append(Row(m.case.name, f"{figures} ({said}), gradients {m.off:.0e}"))
    rows.append(Row("largest error", _percent(max(map(abs, errors))), "8 %"))
    rows.append(Row("mean error", _percent(statistics.fmean(map(abs, errors)))))
    rows.append(Row("pairs in the right order", _order(pairs), "90 %"))
    rows.append(
        Row("largest difference of a gradient", f"{max(m.off for m in measured):.0e}", "1e-6")
    )
    show(f"Pipeline schedules, {len(measured[0].ran[0])} ranks", rows)


def again(measured: Measured, fit: Fit) -> list[float]:
    """Every repetition simulated with the times of its own actions and its own mean waits."""
    found = []
    for rows in measured.ran:
        took = {r.action: r.end - r.start for rank in rows for r in rank}
        waits = _waits(measured.pipeline, rows)
        between = statistics.fmean([gap for wait, gap in waits if wait <= 0] or [fit.between])
        late = statistics.fmean([gap for wait, gap in waits if wait > 0] or [fit.delay + between])
        own = fit._replace(delay=max(0.0, late - between), between=between)
        found.append(simulated(measured.pipeline, own, took))
    return found


def _order(pairs: list[tuple[Measured, float]]) -> str:
    """The share of pairs whose simulated order is the measured one, all and beyond the spread."""
    both = list(combinations(pairs, 2))
    right = [(a[1] - b[1]) * (a[0].seconds - b[0].seconds) >= 0 for a, b in both]
    clear = [
        max(min(a[0].spans), min(b[0].spans)) > min(max(a[0].spans), max(b[0].spans))
        for a, b in both
    ]
    answer = [r for r, c in zip(right, clear, strict=True) if c]
    return f"{sum(right)} of {len(right)}, beyond the spread {sum(answer)} of {len(answer)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
