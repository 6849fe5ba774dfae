"""Reading traces, beside HolisticTraceAnalysis in the same run, and what a large one takes.

    python benchmarks/traces.py --hta PYTHON [TRACE...]      # PYTHON has `traceinsight` installed
    python benchmarks/traces.py --large                      # one of a gibibyte

CPU seconds and the most memory of a fresh process: parse, dependency graph, critical path, one
what-if (kernels twice as fast). `work` leaves out starting Python and importing, in seconds and in
memory: on a trace of one step `import numpy` alone takes what a tenth of the other's process does.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import Process
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from table import Row, show

HERE = Path(__file__).resolve().parent
TRUTH = Path(os.environ.get("FORETELL_TRUTH", HERE.parents[1] / "shared" / "truth"))
GIBI, MEBI = 1 << 30, 1 << 20
BARS = "10 ×, 1/4"
# Both find what was compiled of their sources before, as they do once installed.
KEPT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


class Spent(NamedTuple):
    """What a process took."""

    cpu: float
    work: float  # without starting and importing
    bytes: float  # at most, resident
    held: float  # of them taken by the work
    answer: dict[str, Any]


def spent(*command: str) -> Spent | None:
    """Run a command that prints its answer; None where it fails."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=KEPT)
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        return None
    answer = json.loads(text.splitlines()[-1])
    most = used.ru_maxrss * 1024.0
    held = most - answer["loaded"] * 1024.0
    return Spent(used.ru_utime + used.ru_stime, answer["work"], most, held, answer)


def best(times: int, *command: str) -> Spent | None:
    """The run of several that took least: the machine may have had other things to do."""
    runs = [run for run in (spent(*command) for _ in range(times)) if run]
    return min(runs, key=lambda run: run.cpu) if runs else None


def beside(hta: str, traces: list[Path]) -> list[Row]:
    """Both on every trace."""
    rows, ratios = [], []
    for trace in traces:
        ours = best(3, sys.executable, str(HERE / "traces_ours.py"), str(trace))
        theirs = best(2, hta, str(HERE / "traces_hta.py"), str(trace))
        if ours is None or theirs is None:
            who = "HolisticTraceAnalysis" if ours else "foretell"
            rows.append(Row(trace.name[:40], f"{who} does not read it"))
            continue
        ratios.append(_ratios(ours, theirs))
        rows.append(Row(trace.name[:40], _figures_of(ours, theirs), BARS))
    if ratios:
        cpu, work, most, held = map(median, zip(*ratios, strict=True))
        text = f"{cpu:.1f} ×, 1/{most:.1f}; work {work:.1f} ×, 1/{held:.1f}"
        rows.append(Row(f"median of {len(ratios)}", text, BARS))
    return rows


def _ratios(ours: Spent, theirs: Spent) -> tuple[float, float, float, float]:
    """How many times as much they take: CPU, CPU of the work, memory, memory of the work."""
    held = theirs.held / max(ours.held, MEBI)
    return theirs.cpu / ours.cpu, theirs.work / ours.work, theirs.bytes / ours.bytes, held


def _figures_of(ours: Spent, theirs: Spent) -> str:
    cpu, work, most, held = _ratios(ours, theirs)
    return (
        f"{ours.cpu:.2f} against {theirs.cpu:.2f} CPU-s ({cpu:.1f} ×), "
        f"{ours.bytes / MEBI:.0f} against {theirs.bytes / MEBI:.0f} MiB (1/{most:.1f}); "
        f"work {ours.work:.2f} against {theirs.work:.2f} ({work:.1f} ×), "
        f"{ours.held / MEBI:.0f} against {theirs.held / MEBI:.0f} MiB (1/{held:.1f})"
    )


def tiled(trace: Path, output: Path, size: float) -> int:
    """Repeat the events of a trace, later each time, until a file has that many bytes."""
    with gzip.open(trace) as file:
        page = json.load(file)
    events = page.pop("traceEvents")
    timed = [e for e in events if "ts" in e]
    span = max(e["ts"] + e.get("dur", 0) for e in timed) - min(e["ts"] for e in timed) + 1000
    ids = 1 + max(int(e.get("args", {}).get("correlation", 0)) for e in timed)
    copies = 0
    with open(output, "w") as file:
        file.write(json.dumps(page)[:-1] + ', "traceEvents": [\n')
        while file.tell() < size:
            _write(file, events, copies * span, copies * ids, is_first=not copies)
            copies += 1
        file.write("\n  ]}")
    return copies


def _write(file: Any, events: list[Any], later: float, more: int, *, is_first: bool) -> None:
    """One more copy of all events, with times and correlations of its own."""
    lines = []
    for e in events:
        if "ts" in e:
            e = {**e, "ts": e["ts"] + later}
        args = e.get("args")
        if isinstance(args, dict) and "correlation" in args:
            e["args"] = {**args, "correlation": args["correlation"] + more}
        lines.append("  {\n    " + json.dumps(e)[1:-1] + "\n  }")  # as Kineto sets them
    file.write(("" if is_first else ",\n") + ",\n".join(lines))


def longer(hta: str, trace: Path, sizes: tuple[int, ...]) -> list[Row]:
    """Both on one trace tiled to those sizes."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{trace.name[:20]} {size // MEBI} MiB.json" for size in sizes]
        for path, size in zip(paths, sizes, strict=True):
            # In a process of its own: what this one holds would count as the children's most.
            child = Process(target=tiled, args=(trace, path, size))
            child.start()
            child.join()
        return beside(hta, paths)


def large(trace: Path, size: float) -> list[Row]:
    """A trace of that size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        copies = tiled(trace, path, size)
        begin = time.perf_counter()
        found = spent(sys.executable, str(HERE / "traces_ours.py"), str(path))
        wall = time.perf_counter() - begin
    what = f"{size / GIBI:.1f} GiB ({trace.name} {copies} times)"
    if found is None:
        return [Row(what, "failed")]
    figure = f"{found.cpu:.1f} CPU-s, {wall:.1f} s, {found.bytes / GIBI:.2f} GiB"
    return [Row(what, figure, "60 s, 6 GiB")]


def again(tasks: int) -> list[Row]:
    """A further what-if on a graph that is there already."""
    from foretell.graph.build import replicate
    from foretell.simulate import simulate
    from foretell.trace import read
    from foretell.whatif import Setting, parse

    step = read(TRUTH / "h200" / "bert_base.base.json.gz").graph
    graph = replicate(step, -(-tasks // step.size), over="micro_batch")
    known = simulate(graph, engine="compiled")
    took = []
    for times in (0.9, 0.8, 0.7, 0.6):
        begin = time.perf_counter()
        after = parse(f"scale:select=kind=kernel,times={times}").apply(graph, Setting())
        simulate(after, engine="compiled", before=known).critical_path()
        took.append(time.perf_counter() - begin)
    figure = f"{1e3 * sorted(took[1:])[1]:.1f} ms"
    return [Row(f"a further what-if on {graph.size:,} tasks", figure, "50 ms")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hta", help="a Python that has HolisticTraceAnalysis (traceinsight)")
    parser.add_argument("--large", nargs="?", type=float, const=1.0, help="gibibytes")
    parser.add_argument("traces", nargs="*", type=Path)
    options = parser.parse_args()
    traces = options.traces or sorted((TRUTH / "h200").glob("*.json.gz"))
    if options.hta:
        show("Traces, beside HolisticTraceAnalysis", beside(options.hta, traces))
        show("The same, longer traces", longer(options.hta, traces[0], (16 * MEBI, 64 * MEBI)))
    if options.large:
        show("A large trace", large(traces[0], options.large * GIBI))
    show("Again", again(50_000))


if __name__ == "__main__":
    main()
