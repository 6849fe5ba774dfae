"""`foretell replay`: a trace simulated unchanged, compared with what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli.output import FILE, answer, json_option, output_option, reading, write_output


@click.command()
@click.argument("trace", type=FILE)
@click.option("--step", type=int, help="Which step of the trace; the one of median length.")
@output_option
@json_option
def command(trace: Path, step: int | None, output: Path | None, as_json: bool) -> None:
    """Simulate a step of TRACE unchanged: how far from what was measured."""
    from foretell.errors import InputError
    from foretell.simulate import Timeline, simulate
    from foretell.trace import read

    with reading(trace):
        found = read(trace, step=step)
    if "measured" not in found.graph.facts:
        raise InputError(
            f"`{trace}` has dependencies but no measured step",
            hint="replay a trace that torch.profiler has exported",
        )
    answer(_summary(found), as_json, _text)
    measured = Timeline(found.graph, found.start, found.end)
    write_output([("replayed", simulate(found.graph)), ("measured", measured)], output)


def _summary(found: Any) -> dict[str, Any]:
    from foretell.baseline import POOR, replay_error

    measured, error = float(found.graph.facts["measured"]), replay_error(found)
    poor = [
        "the simulated step is far off: 80 % intervals of answers about this trace are wider"
    ] * (abs(error) > POOR)
    return {
        "measured_s": measured,
        "replayed_s": measured * (1 + error),
        "error": error,
        "tasks": found.graph.size,
        "notes": [*found.notes, *poor],
    }


def _text(answered: dict[str, Any]) -> str:
    from foretell.report import words

    head = (
        f"the simulated step is {100 * answered['error']:+.2f} % off: "
        f"measured {words.seconds(answered['measured_s'])}, "
        f"replayed {words.seconds(answered['replayed_s'])}, {answered['tasks']:,} tasks"
    )
    return "\n".join(map(words.fitted, [head, *answered["notes"]]))
