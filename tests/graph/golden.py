"""Graphs as text in tests: what goes in, what comes out."""

from textwrap import dedent

from foretell.graph import Graph, parse

HEAD = "foretell graph 1"


def graph(lines: str) -> Graph:
    """A graph from its lines, without the first."""
    return parse(f"{HEAD}\n{dedent(lines)}")


def lines(made: Graph) -> str:
    """The lines of a graph, without the first."""
    head, _, rest = str(made).partition("\n")
    assert head == HEAD
    return rest


def edited(before: str, change, **more) -> str:
    """The lines of a graph after a change."""
    with graph(before).edit(**more) as edit:
        change(edit)
    return lines(edit.graph)


def same(found: str, expected: str) -> None:
    """Compare lines, indented or not."""
    assert found.strip().splitlines() == dedent(expected).strip().splitlines()
