"""`foretell explain`: what is behind a name: its model, assumptions, source and accuracy.

Names are those of what-ifs, planners and the oracle's strategies. How accurate each was is read
from `accuracy.json`, which `python docs/figures.py accuracy` writes from measurements; what else it
was checked against is written in `checked.toml`.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
from dataclasses import MISSING, fields
from importlib.resources import files
from textwrap import fill
from typing import Any

import click

from foretell.cli import arguments
from foretell.cli.output import answer, json_option

# Assumptions behind the prices of each planner.
ASSUMPTIONS = {
    "joint": (
        "stages work on the same micro-batches; replicas of a stage have as many samples each",
        "what placement and fusion add, they assume as they do alone",
    ),
    "schedule": (
        "a stage takes as long with every micro-batch, and its devices do one thing at a time",
        "messages between stages do not slow each other",
    ),
    "tessel": ("as `schedule`; a repeating pattern is completed by a warm-up and a cool-down",),
    "disco": ("as `fusion`; the search backtracks as published",),
    "tag": ("as `placement`; samples are split evenly, and the tree begins at data parallelism",),
    "paradl": ("as `oracle`; the closed form decides, nothing is sharded or recomputed",),
    "oracle": (
        "every rank of a layout computes as much as every other, at the same time",
        "steps in a row: the first one and its warm-up are not counted",
    ),
    "fusion": (
        "one data-parallel rank stands for all of them; messages go one after the other",
        "a fused region costs what its network or formula says, alone on the device",
    ),
    "placement": (
        "a device does one thing at a time, and transfers on one link share it",
        "samples of a step can be split in any whole numbers",
    ),
}


@click.command()
@click.argument("name", required=False, shell_complete=arguments.names)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """Explain NAME: a what-if, a planner or a strategy; without a name, list all of them."""
    if name is None:
        return answer(_names(), as_json, _names_text)
    plain = name.partition(":")[0]
    found = _entries(plain)
    first, *others = found
    return answer(first | {"also": others} if others else first, as_json, _text)


def _names() -> dict[str, dict[str, str]]:
    """Every name by what it is, with one line each."""
    from foretell.search.kit import planners
    from foretell.search.oracle.scale import STRATEGIES
    from foretell.whatif import WHATIFS

    return {
        "names": {n: _summary(kind) for n, kind in sorted(WHATIFS.items())},
        "planners": {n: _summary(kind) for n, kind in sorted(planners().items())},
        "strategies": {n: about.does for n, about in STRATEGIES.items()},
    }


def _entries(name: str) -> list[dict[str, Any]]:
    """All that carries a name: some are a what-if and a strategy."""
    from foretell.errors import unknown
    from foretell.search.kit import PLANNERS, planners
    from foretell.search.oracle.scale import STRATEGIES
    from foretell.whatif import WHATIFS

    found = []
    if name in WHATIFS:
        found.append(_whatif(WHATIFS[name]))
    if name in PLANNERS:
        found.append(_planner(planners()[name]))
    if name in STRATEGIES:
        found.append(_strategy(name, STRATEGIES[name]))
    if not found:
        raise unknown("name", name, [*WHATIFS, *PLANNERS, *STRATEGIES])
    return found


def _whatif(kind: Any) -> dict[str, Any]:
    """Everything known about a what-if."""
    from foretell.whatif.registry import is_measured, spread_of

    return {
        "kind": "what-if",
        **_description(kind),
        "assumes": list(kind.assumes),
        "code": kind.code,
        "spread": spread_of(kind.name),
        "is_measured": is_measured(kind.name),
        **_evidence("what-ifs", kind.name),
    }


def _planner(kind: Any) -> dict[str, Any]:
    return {
        "kind": "planner",
        **_description(kind),
        "assumes": list(ASSUMPTIONS.get(kind.name, ())),
        **_evidence("planners", kind.name),
    }


def _description(kind: Any) -> dict[str, Any]:
    """Name, help, options and source of a what-if or planner."""
    module = sys.modules[kind.__module__]
    return {
        "name": kind.name,
        "does": _summary(kind),
        "model": inspect.getdoc(module) or "",
        "options": {f.name: None if f.default is MISSING else f.default for f in fields(kind)},
        "source": kind.source,
    }


def _strategy(name: str, about: Any) -> dict[str, Any]:
    return {
        "kind": "strategy",
        "name": name,
        "does": about.does,
        "model": about.model,
        "options": {},
        "plan": about.fields,
        "ends": about.ends,
        "assumes": list(about.assumes),
        "source": about.source,
        **_evidence("strategies", name),
    }


def _evidence(kind: str, name: str) -> dict[str, Any]:
    """Its accuracy, a line for each set of measurements, and what else it was checked against."""
    kept, beside = ((files("foretell.cli") / f).read_text(encoding="utf-8")
                    for f in ("accuracy.json", "checked.toml"))  # fmt: skip
    return {
        "accuracy": list(json.loads(kept)[kind].get(name, [])),
        "checked_against": tomllib.loads(beside)[kind].get(name, ""),
    }


def _summary(kind: Any) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _names_text(found: dict[str, Any]) -> str:
    from foretell.report.words import table

    heads = {"names": "what-if", "planners": "planner", "strategies": "strategy"}
    return "\n".join(table((head, "does"), found[key].items()) for key, head in heads.items())


def _text(found: dict[str, Any]) -> str:
    """One name, and what else carries it below."""
    others = found.get("also", [])
    return "\n\n".join([_entry_text(found), *(_entry_text(other) for other in others)])


def _entry_text(found: dict[str, Any]) -> str:
    """A name's first line, its model, and what else is known line by line."""
    from foretell.report.words import wrapped

    head = wrapped(f"{found['name']}, a {found['kind']}: {found['does']}")
    return "\n".join([head, "", _model_text(found["model"]), "", *map(wrapped, _fact_lines(found))])


def _model_text(model: str) -> str:
    """Paragraphs as wide as the terminal; of formulas and lists only lines that are too wide."""
    from foretell.report.words import width

    parts = model.split("\n\n")
    return "\n\n".join(
        fill(part, width(), break_on_hyphens=False)
        if _is_prose(part)
        else _wrap_list(part, width())
        for part in parts
    )


def _wrap_list(part: str, width: int) -> str:
    """A list of names with words beside them: where one is too wide, broken under its words."""
    lines = part.splitlines()
    if max(map(len, lines)) <= width:
        return part
    least = min(len(line) - len(line.lstrip()) for line in lines)
    items: list[str] = []
    for line in lines:
        is_next = len(line) - len(line.lstrip()) > least and items
        if is_next:
            items[-1] += f" {line.strip()}"
        else:
            items.append(line)
    return "\n".join(_wrap_item(item, width) for item in items)


def _wrap_item(item: str, width: int) -> str:
    name = re.match(r"\s*\S+(?: \S+)*\s{2,}|\s*", item)
    room = len(name.group()) if name else 0
    return fill(item, width, subsequent_indent=" " * room, break_on_hyphens=False)


def _is_prose(part: str) -> bool:
    """Whether lines may be joined: formulas and tables are indented."""
    return not any(line.startswith(" ") for line in part.splitlines())


def _fact_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    if found["options"]:
        options = (f"{key}={value}" for key, value in found["options"].items())
        lines.append(f"options: {', '.join(options)}")
    lines += [f"{key}: {found[key]}" for key in ("plan", "ends") if key in found]
    lines += [f"assumes {text}" for text in found["assumes"]]
    lines += [f"{key}: {found[key]}" for key in ("source", "code") if found.get(key)]
    if "spread" in found:
        untried = "" if found["is_measured"] else "never measured: "
        lines.append(
            f"{untried}error of the what-if itself, besides kernel prices and host: about "
            f"{100 * found['spread']:.0f} %"
        )
    lines += [f"measured: {line}" for line in found["accuracy"]]
    if found["checked_against"]:
        unmeasured = "" if found["accuracy"] else "not measured here; "
        lines.append(f"{unmeasured}checked against {found['checked_against']}")
    return lines
