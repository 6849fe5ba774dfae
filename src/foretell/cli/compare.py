"""`foretell compare`: a predicted step beside a measured one, and where they differ."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretell.cli.output import FILE, answer, json_option, output_option, write_output

if TYPE_CHECKING:
    from foretell.simulate import Timeline


@click.command()
@click.argument("predicted", type=FILE)
@click.argument("measured", type=FILE)
@click.option("--most", type=click.IntRange(min=1), default=10, show_default=True, help="Tasks.")
@output_option
@json_option
def command(predicted: Path, measured: Path, most: int, output: Path | None, as_json: bool) -> None:
    """Line up two steps task by task: where they differ, and how much of it each task explains.

    Each is a graph (simulated), or a trace or the folder of a run (as measured).
    """
    from foretell.simulate.compare import compare

    one, other = timeline_of(predicted), timeline_of(measured)
    found = compare(one, other)
    shown = found.parts[:most]
    value = {
        **asdict(found),
        "parts": [asdict(p) | {"seconds": p.seconds} for p in shown],
        "gap": found.gap,
    }
    value["rest_of_path"] = sum(p.seconds for p in found.parts[most:])
    answer(_with_units(value), as_json, _text)
    write_output([("predicted", one), ("measured", other)], output)


_UNTIMED = "simulate it on a cluster first: foretell simulate FILE --on h100 -o step.json.gz"


def timeline_of(path: Path) -> Timeline:
    """The timeline in a file: of a graph by simulation, of a trace or a run as measured."""
    from foretell.cost.price import timed
    from foretell.graph.file import is_graph_file, load
    from foretell.simulate import Timeline, simulate

    if (path / "run.json").exists():
        from foretell.pytorch.deploy import measured

        return simulate(measured.graph(path))
    if not path.is_dir() and is_graph_file(path):
        return simulate(timed(load(path), path.name, _UNTIMED))
    from foretell.trace import read

    found = read(path)
    if "measured" not in found.graph.facts:
        return simulate(timed(found.graph, path.name, _UNTIMED))
    return Timeline(found.graph, found.start, found.end)


def _with_units(value: dict[str, Any]) -> dict[str, Any]:
    """Times named as everywhere in JSON."""
    times = ("predicted", "measured", "gap", "elsewhere", "rest_of_path")
    return {f"{k}_s" if k in times else k: v for k, v in value.items()}


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words

    ratio = found["predicted_s"] / found["measured_s"] - 1
    head = (
        f"the prediction is {100 * ratio:+.1f} % off: predicted "
        f"{words.seconds(found['predicted_s'])}, measured {words.seconds(found['measured_s'])}"
    )
    tasks = (
        f"{found['matched']} tasks in both, {found['only_predicted']} only predicted, "
        f"{found['only_measured']} only measured"
    )
    return "\n".join([head, tasks, _path(found), _lanes(found)])


def _path(found: dict[str, Any]) -> str:
    """How much of the gap each task of the critical path explains."""
    from foretell.report import words

    gap, rows = found["gap_s"], []
    for part in found["parts"]:
        rows.append(
            (words.cut(part["name"], 18), words.cut(part["lane"], 20),
             *_share_of_gap(part["seconds"], gap), _signed(part["ran"]), _signed(part["waited"]))
        )  # fmt: skip
    rows.append(("the rest of it", "", *_share_of_gap(found["rest_of_path_s"], gap), "", ""))
    rows.append(("elsewhere", "", *_share_of_gap(found["elsewhere_s"], gap), "", ""))
    columns = ("predicted path", "lane", "gap>", "share>", "ran>", "waited>")
    return words.table(columns, rows)


def _lanes(found: dict[str, Any]) -> str:
    from foretell.report import words

    rows = [
        (words.cut(lane["name"], 32), words.seconds(lane["predicted"]),
         words.seconds(lane["measured"]), _signed(lane["explains"]))
        for lane in found["lanes"]
    ]  # fmt: skip
    return words.table(("lane", "predicted>", "measured>", "of the gap>"), rows)


def _share_of_gap(seconds: float, gap: float) -> tuple[str, str]:
    return _signed(seconds), f"{100 * seconds / gap:.0f} %" if abs(gap) > 1e-12 else "-"


def _signed(seconds: float) -> str:
    from foretell.report import words

    return f"{'+' if seconds > 0 else ''}{words.seconds(seconds)}"
