"""Tables of figures, each beside the bar it has to clear."""

from typing import NamedTuple


class Row(NamedTuple):
    """One figure."""

    what: str
    figure: str
    bar: str = ""


def show(title: str, rows: list[Row]) -> None:
    """Print figures as a Markdown table, ready for the docs."""
    print(f"\n## {title}\n\n| what | measured | bar |\n|---|--:|--:|")
    for row in rows:
        print(f"| {row.what} | {row.figure} | {row.bar} |")
