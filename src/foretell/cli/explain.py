"""`foretell explain`: what stands behind a name: its model, assumptions, source and accuracy."""

from __future__ import annotations

import inspect
import sys
from dataclasses import MISSING, fields
from typing import Any

import click

from foretell.cli.output import answer, json_option


@click.command()
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """Say how NAME works: a what-if; without a name, list all of them."""
    from foretell.errors import unknown
    from foretell.whatif import WHATIFS

    if name is None:
        lines = {n: _first(kind) for n, kind in sorted(WHATIFS.items())}
        answer({"names": lines}, as_json, _listed)
        return
    plain = name.partition(":")[0]
    if plain not in WHATIFS:
        raise unknown("name", plain, WHATIFS)
    answer(_explained(WHATIFS[plain]), as_json, _text)


def _first(kind: Any) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _explained(kind: Any) -> dict[str, Any]:
    """Everything a what-if says of itself."""
    module = sys.modules[kind.__module__]
    options = {f.name: None if f.default is MISSING else f.default for f in fields(kind)}
    return {
        "name": kind.name,
        "does": _first(kind),
        "model": inspect.getdoc(module) or "",
        "options": options,
        "assumes": list(kind.assumes),
        "source": kind.source,
        "code": kind.code,
        "spread": kind.spread,
    }


def _listed(found: dict[str, Any]) -> str:
    from foretell.report.terminal import table

    return table(("name", "does"), found["names"].items())


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['name']}: {found['does']}", "", found["model"], ""]
    if found["options"]:
        options = (f"{key}={value}" for key, value in found["options"].items())
        lines.append(f"options: {', '.join(options)}")
    lines += [f"assumes {text}" for text in found["assumes"]]
    lines += [f"{key}: {found[key]}" for key in ("source", "code") if found[key]]
    lines.append(f"its own error, beside prices and host: about {found['spread']:.0%}")
    return "\n".join(lines)
