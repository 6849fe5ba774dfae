"""Guides are scripts: run cell by cell, with what each cell prints set below it on the page.

    python docs/guide.py             every guide: NAME.out and NAME.md in docs/guides
    python docs/guide.py changes     one of them

A cell begins with `# %%`; one that begins with `# %% [markdown]` is text. `python
docs/guides/NAME.py` prints what NAME.out holds, and a test compares both. A cell that only runs
commands becomes a session in a terminal.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GUIDES = Path(__file__).resolve().parent / "guides"
NAMES = (
    "tutorial", "fit", "cost", "llama70b", "slow", "buckets",
    "changes", "parallel", "fusing", "mixed", "order", "doing",
)  # in the order of reading  # fmt: skip


class Cell(NamedTuple):
    """A piece of a script, and what it printed."""

    is_text: bool
    source: str
    printed: str = ""


def cells(script: str) -> Iterator[Cell]:
    """The cells of a percent-script."""
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        is_text = head.strip().startswith("[markdown]")
        yield Cell(is_text, _text(body) if is_text else body.strip("\n"))


def run(name: str) -> list[Cell]:
    """Every cell of a guide, run in order in one room of names."""
    path = GUIDES / f"{name}.py"
    names: dict[str, object] = {"__name__": "__guide__", "__file__": str(path)}
    sys.path.insert(0, str(GUIDES))
    try:
        return [_ran(cell, names, path) for cell in cells(path.read_text())]
    finally:
        sys.path.remove(str(GUIDES))


def out(found: list[Cell]) -> str:
    """What the script prints."""
    return "".join(cell.printed for cell in found)


def page(name: str, found: list[Cell]) -> str:
    """The guide as Markdown."""
    title, _, rest = found[0].source.partition("\n")
    answer = (
        f"A test runs the code of this page, [`{name}.py`]({name}.py), and compares what it prints."
    )
    parts = [title, "", rest.strip("\n"), "", answer, ""]
    for cell in found[1:]:
        parts += _shown(cell)
    return "\n".join(parts).rstrip("\n") + "\n"


def write(name: str) -> None:
    """Run a guide and write its output and its page again."""
    found = run(name)
    (GUIDES / f"{name}.out").write_text(out(found))
    (GUIDES / f"{name}.md").write_text(page(name, found))


def _text(body: str) -> str:
    return re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip("\n")


def _ran(cell: Cell, names: dict[str, object], path: Path) -> Cell:
    if cell.is_text:
        return cell
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(cell.source, str(path), "exec"), names)
    return cell._replace(printed=printed.getvalue())


def _shown(cell: Cell) -> list[str]:
    if cell.is_text:
        return [cell.source, ""]
    code = [] if _is_session(cell) else ["```python", cell.source, "```", ""]
    if not cell.printed:
        return code
    words = "console" if _is_session(cell) else "text"
    return [*code, f"```{words}", cell.printed.rstrip("\n"), "```", ""]


def _is_session(cell: Cell) -> bool:
    """Whether a cell only runs commands: the session shows them, so the code need not."""
    return cell.source.startswith("foretell(") and "\n\n" not in cell.source


if __name__ == "__main__":
    for query in sys.argv[1:] or NAMES:
        write(query)
