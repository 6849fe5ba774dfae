"""`foretell show`: what is in a file, or behind a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from foretell.cli.output import answer, json_option
from foretell.errors import InputError


@click.command()
@click.argument("what")
@click.option("--text", "as_text", is_flag=True, help="Print a graph as text that reads back.")
@json_option
def command(what: str, as_text: bool, as_json: bool) -> None:
    """Say what WHAT is: a graph or cluster file, or a spec such as dgx-a100:nodes=8."""
    path = Path(what)
    if path.is_dir():
        raise InputError(f"`{what}` is a folder", hint="name a file in it")
    if not path.is_file():
        return show_cluster(what, as_json)
    for is_one, show in _KINDS:
        if is_one(path):
            return show(path, as_text, as_json)
    raise InputError(
        f"`{what}` is nothing foretell knows",
        hint="it reads graphs (`.graph`, `.txt`) and clusters (`.toml`)",
    )


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


def _is_graph(path: Path) -> bool:
    from foretell.graph.file import is_graph_file

    return is_graph_file(path)


def _is_toml(path: Path) -> bool:
    return path.suffix == ".toml"


_KINDS: list[tuple[Callable[[Path], bool], Callable[[Path, bool, bool], None]]] = [
    (_is_graph, show_graph),
    (_is_toml, show_cluster_file),
]
