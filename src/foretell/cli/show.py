"""`foretell show`: what is in a file, or behind a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option, reading
from foretell.errors import InputError
from foretell.graph.file import is_graph_file

ShowFunction = Callable[[Path, bool, bool], None]
_ENDINGS = (".graph", ".txt", ".json", ".gz", ".toml", ".zip", ".tar")


@click.command()
@click.argument("what")
@click.option("--text", "as_text", is_flag=True, help="Print a graph as text that reads back.")
@json_option
def command(what: str, as_text: bool, as_json: bool) -> None:
    """Describe WHAT: a file (graph, trace, cluster, placement) or a cluster's name."""
    if not what:
        raise InputError(
            "the name of a file or cluster is empty", hint="foretell show step.json.gz"
        )
    path = Path(what)
    if path.is_dir():
        return show_trace(path, as_text, as_json)
    if path.is_file():
        return _function_for(path)(path, as_text, as_json)
    if "/" in what or path.suffix in _ENDINGS:
        raise InputError(f"there is no file `{what}`")
    return show_cluster(what, as_json)


def _function_for(path: Path) -> ShowFunction:
    """The function that shows a file."""
    if is_graph_file(path):
        return show_graph
    if path.suffix == ".toml":
        return show_cluster_file
    if is_placement_file(path):
        return show_placement
    return show_trace


def show_graph(path: Path, as_text: bool, as_json: bool) -> None:
    from foretell.graph.file import load
    from foretell.report.summary import graph_summary, graph_text

    graph = load(path)
    if as_text:
        return click.echo(str(graph), nl=False)
    return answer(graph_summary(graph), as_json, graph_text)


def show_cluster_file(path: Path, _: bool, as_json: bool) -> None:
    show_cluster(str(path), as_json)


def show_cluster(what: str, as_json: bool) -> None:
    from foretell.cluster import load
    from foretell.report.summary import cluster_summary

    cluster = load(what)
    answer(cluster_summary(cluster), as_json, lambda _: str(cluster))


def show_trace(path: Path, as_text: bool, as_json: bool) -> None:
    from foretell.report.summary import graph_summary, graph_text
    from foretell.trace import read

    with reading(path):
        found = read(path)
    if as_text:
        return click.echo(str(found.graph), nl=False)
    return answer(graph_summary(found.graph), as_json, graph_text)


def show_placement(path: Path, _: bool, as_json: bool) -> None:
    from foretell.search.schedule import load

    problem = load(path)
    found = {
        "name": problem.name,
        "devices": problem.num_devices,
        "blocks": len(problem.blocks),
        "kinds": dict(Counter(block.kind for block in problem.blocks)),
        "work": [
            sum(b.time for b in problem.blocks if device in b.devices)
            for device in range(problem.num_devices)
        ],
    }
    answer(found, as_json, _placement_text)


def _placement_text(found: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["kinds"].items())
    work = ", ".join(f"{w:g}" for w in found["work"])
    return (
        f"placement {found['name']}: {found['blocks']} blocks ({kinds}) on {found['devices']} "
        f"devices; work of each: {work}"
    )


def is_placement_file(path: Path) -> bool:
    """Whether a file is JSON that begins like a placement."""
    if path.suffix != ".json":
        return False
    with open(path, "rb") as file:
        head = file.read(4096)
    return b'"ndevs"' in head or b'"blocks"' in head
