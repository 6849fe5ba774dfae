"""Files of `foretell schedule -o`: a drawing, a plan, a placement, or actions by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretell.cli.output import say
from foretell.errors import InputError


def write(output: Path, found: Any, solved: Any) -> None:
    """A schedule in the form of the file's ending; `solved` where it is of a model."""
    from foretell.io import write_atomically

    if output.suffix in (".plan", ".toml"):
        _write_plan(output, solved)
    else:
        text = _text(output, found, solved)
        write_atomically(output, lambda file: file.write(text.encode()))
    say(f"written: {output}")


def _write_plan(output: Path, solved: Any) -> None:
    from foretell.plan import save
    from foretell.plan.stage_placement import as_degrees

    if solved is None:
        raise InputError(
            f"`{output}` would be a plan, and a bare placement has no model to plan",
            hint="give a model and --on CLUSTER, or write .svg, .csv or .json",
        )
    # a plain pipeline in degrees: other programs read that
    save(as_degrees(solved.plan, solved.model.prices.workload) or solved.plan, output)


def _text(output: Path, found: Any, solved: Any) -> str:
    from foretell.search.schedule.problem import write as written
    from foretell.search.schedule.schedule import svg

    if output.suffix == ".csv":
        return _actions(found, solved, with_comms=output.name.endswith(".comms.csv"))
    if output.suffix == ".json":
        return json.dumps(written(found.problem), indent=1) + "\n"
    return svg(found)


def _actions(found: Any, solved: Any, *, with_comms: bool) -> str:
    """Actions as CSV: a row per rank, a cell per action."""
    from foretell.plan.export import schedule_csv, with_messages
    from foretell.search.schedule.schedule import actions

    rows = solved.plan.actions if solved else actions(found)
    if with_comms:
        if not _is_line(found, solved, rows):
            raise InputError(
                "torch's runtime sends along one line of stages, each on one rank",
                hint="leave .comms out, or run the plan with `foretell run`",
            )
        rows = with_messages(rows)
    return schedule_csv(rows)


def _is_line(found: Any, solved: Any, rows: Any) -> bool:
    """Whether each stage follows the one before, on a rank of its own."""
    from foretell.plan.stage_placement import edges
    from foretell.search.schedule.schedule import after

    if solved:
        links = edges(solved.model.places, solved.model.prices.workload)
        befores = [sorted(e.first for e in links if e.then == s) for s in range(len(links) + 1)]
    else:
        befores = [list(b) for b in after(found.problem)]
    cells = [cell for row in rows for cell in row]
    in_line = all(b == ([s - 1] if s else []) for s, b in enumerate(befores))
    return in_line and len(set(cells)) == len(cells)
