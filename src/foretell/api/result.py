"""What every answer can do: one line as `repr`, a table when printed, HTML, JSON, pandas, a plot.

A result says its verdict, its tables, its rows and its plot; the rest is made from these here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from foretell.errors import InputError
from foretell.io import finite

if TYPE_CHECKING:
    from foretell.api.plot import Plot


class Table(NamedTuple):
    """Rows under headings; a heading that ends in `>` is aligned right."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]


class Result:
    """An answer for people and programs."""

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        raise NotImplementedError

    def details(self, verbose: bool = False) -> list[str | Table]:
        """Sentences and tables below the verdict; more of them if `verbose`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the keys of the command line's `--json`; seconds and bytes."""
        raise NotImplementedError

    def records(self) -> list[dict[str, Any]]:
        """Rows of plain values: what `to_pandas` makes a data frame of."""
        raise NotImplementedError

    def plot(self) -> Plot:
        """A picture (SVG): shown in a notebook, written by `.save(path)`."""
        raise NotImplementedError

    def text(self, verbose: bool = False) -> str:
        """Verdict, sentences and tables, at most as wide as the terminal."""
        from foretell.report.words import fitted, table

        parts = [fitted(self.verdict)]
        parts += [
            table(part.columns, part.rows) if isinstance(part, Table) else fitted(part)
            for part in self.details(verbose)
        ]
        return "\n".join(parts)

    def to_json(self) -> str:
        """One line of strict JSON: `to_dict`, with null for what is not finite."""
        return json_text(self.to_dict())

    def to_pandas(self) -> Any:
        """`records` as a `pandas.DataFrame`."""
        if find_spec("pandas") is None:
            raise InputError(
                "to_pandas() needs pandas, which is not installed",
                hint="pip install pandas, or take .records() or .to_dict()",
            )
        pandas: Any = import_module("pandas")
        return pandas.DataFrame(self.records())

    def _repr_html_(self) -> str:
        from foretell.graph.show import headed, html_table

        parts = [
            html_table(part.columns, part.rows)
            if isinstance(part, Table)
            else f"<p>{escape(part)}</p>"
            for part in self.details()
        ]
        return headed(self.verdict, *parts)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.verdict}>"


def json_text(value: Any) -> str:
    """A value as one line of strict JSON: what is not finite is null."""
    try:
        made = json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:
        plain = json.loads(json.dumps(value, default=_plain))
        made = json.dumps(finite(plain), allow_nan=False)
    return made.replace("\x7f", "\\u007f")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
