"""Reading traces, beside HolisticTraceAnalysis in the same run, and what a large one takes.

    python benchmarks/traces.py --hta PYTHON [TRACE...]      # PYTHON has `traceinsight` installed
    python benchmarks/traces.py --large                      # one of a gibibyte

CPU seconds and the most memory of a fresh process: parse, dependency graph, critical path, one
what-if (kernels twice as fast). `work` leaves out starting Python and importing.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from table import Row, show

HERE = Path(__file__).resolve().parent
TRUTH = Path(os.environ.get("FORETELL_TRUTH", HERE.parents[1] / "shared" / "truth"))
GIBI, MEBI = 1 << 30, 1 << 20


class Spent(NamedTuple):
    """What a process took."""

    cpu: float
    work: float  # without starting and importing
    bytes: float  # at most, resident
    answer: dict[str, Any]


def spent(*command: str) -> Spent | None:
    """Run a command that prints its answer; None where it fails."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        return None
    answer = json.loads(text.splitlines()[-1])
    return Spent(used.ru_utime + used.ru_stime, answer["work"], used.ru_maxrss * 1024.0, answer)


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
        ratios.append((theirs.cpu / ours.cpu, theirs.work / ours.work, theirs.bytes / ours.bytes))
        figure = (
            f"{ours.cpu:.2f} against {theirs.cpu:.2f} CPU-s ({ratios[-1][0]:.1f} ×; "
            f"work {ours.work:.2f} against {theirs.work:.2f}, {ratios[-1][1]:.1f} ×), "
            f"{ours.bytes / MEBI:.0f} against {theirs.bytes / MEBI:.0f} MiB (1/{ratios[-1][2]:.1f})"
        )
        rows.append(Row(trace.name[:40], figure, "10 ×, 1/4"))
    if ratios:
        middle = [sorted(column)[len(ratios) // 2] for column in zip(*ratios, strict=True)]
        text = f"{middle[0]:.1f} × (work {middle[1]:.1f} ×), 1/{middle[2]:.1f}"
        rows.append(Row(f"median of {len(ratios)}", text, "10 ×, 1/4"))
    return rows


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
    from foretell.graph.combine import replicate
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
    asked = parser.parse_args()
    traces = asked.traces or sorted((TRUTH / "h200").glob("*.json.gz"))
    if asked.hta:
        show("Traces, beside HolisticTraceAnalysis", beside(asked.hta, traces))
    if asked.large:
        show("A large trace", large(traces[0], asked.large * GIBI))
    show("Again", again(50_000))


if __name__ == "__main__":
    main()
