"""The pages `accuracy.md` and `speed.md`, from what commands print.

    python docs/figures.py                       run everything, write both pages again
    python docs/figures.py accuracy              one of them
    python docs/figures.py speed --from FOLDER   take NAME.json or NAME.out from FOLDER if there
    python docs/figures.py --only startup scale  some tables anew, the others as they were kept
    python docs/figures.py --page                only lay out docs/figures/*.json again

What was found is kept in `docs/figures/`, with the date, the machine and the command, and a test
holds the pages to it: no number on them is written by hand. What `foretell explain` says of
accuracy is written with them. Accuracy needs the measured data (`FORETELL_TRUTH`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT, KEPT = HERE.parent, HERE / "figures"
EXPLAINED = ROOT / "src/foretell/cli/accuracy.json"  # what `foretell explain` reads
WORDS = tomllib.loads((KEPT / "words.toml").read_text())
ERRORS = ["rows", "median", "p90", "worst"]
IMAGES = ("data", "data+spatial", "data+filter", "filter", "channel")

Rows = list[dict[str, Any]]


class Table(NamedTuple):
    """Figures that one command printed."""

    name: str  # in words.toml
    command: str
    head: list[str]
    rows: list[list[str]]
    told: dict[str, str]  # figures among its words
    date: str = ""


def lay_out(page: str, kept: dict[str, Any]) -> str:
    """A page as Markdown, from what was kept."""
    made = f"Found on {kept['date']} with foretell {kept['version']} on {kept['machine']}."
    parts = [f"# {WORDS[page]['title']}", WORDS[page]["about"].strip(), made]
    tables = [Table(**t) for t in kept["tables"]]
    if page == "accuracy":
        parts += [f"## {WORDS['expect']['title']}", WORDS["expect"]["about"].strip()]
        parts.append(_markdown(expected(tables)))
    for table in tables:
        words = WORDS[table.name]
        parts += [f"## {words['title']}", words["about"].strip().format(**table.told)]
        parts.append(f"    {table.command}")
        if table.date not in ("", kept["date"]):
            parts.append(f"Found on {table.date}.")
        parts.append(_markdown(table))
    return "\n\n".join([*parts, "`make figures` runs these commands and writes this page again.\n"])


def _markdown(table: Table) -> str:
    head = [f"| {' | '.join(table.head)} |", "|---|" + "--:|" * (len(table.head) - 1)]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in table.rows)])


def expected(tables: list[Table]) -> Table:
    """The figures of a few rows of all tables: what a user may expect, by question."""
    columns = ["median", "p90", "in the 80 % interval"]
    rows = []
    for question, name, key in WORDS["expect"]["rows"]:
        (table,) = (t for t in tables if t.name == name)
        if key in table.head:
            rows.append([question, _middle(table, key), "", ""])
            continue
        (row,) = (r for r in table.rows if re.sub(r"\*|\[|\]\(.*", "", r[0]) == key)
        figures = dict(zip(table.head, row, strict=True))
        rows.append([question, *(figures.get(column, "") for column in columns)])
    return Table("expect", "", ["your question", *columns], rows, {})


def _middle(table: Table, column: str) -> str:
    """The median of a column of percentages, over the rows that have one."""
    cells = [row[table.head.index(column)] for row in table.rows]
    return f"{np.median([float(cell.split()[0]) for cell in cells if cell]):.1f} %"


def found(page: str, given: argparse.Namespace) -> dict[str, Any]:
    """Every table of a page, with when and where it was made; only some of them made anew."""
    from foretell import __version__

    path, date = KEPT / f"{page}.json", datetime.now(UTC).date().isoformat()
    before = json.loads(path.read_text()) if given.only and path.exists() else {"tables": []}
    old = {t["name"]: {"date": before["date"]} | t for t in before["tables"]}
    tables = [
        old[make.__name__]
        if given.only and make.__name__ not in given.only and make.__name__ in old
        else make(given.folder)._asdict() | {"date": date}
        for make in PAGES[page]
    ]
    return {"date": date, "version": __version__, "machine": machine(), "tables": tables}


def machine() -> str:
    """What this ran on, and how busy that was."""
    said = Path("/proc/cpuinfo")
    known = re.search(r"model name\s*: (.+)", said.read_text()) if said.exists() else None
    name = known.group(1) if known else platform.machine()
    busy = f"{os.cpu_count()} cores shared with other work (load {os.getloadavg()[0]:.1f})"
    return f"{name}, {busy}, Python {platform.python_version()}, numpy {np.__version__}"


@cache
def validated(part: str, folder: Path | None, *more: str, name: str = "") -> dict[str, Any]:
    """What `foretell validate --PART --json` prints."""
    kept = folder / f"{name or part}.json" if folder else None
    if kept and kept.is_file():
        return json.loads(kept.read_text())
    command = [sys.executable, "-m", "foretell", "validate", f"--{part}", "--json", *more]
    return json.loads(_ran(command))


def _second(folder: Path | None) -> Rows:
    """What-ifs of the models whose measurements come with the repository."""
    more = ("--truth", str(ROOT / "benchmarks/measured"))
    return validated("whatifs", folder, *more, name="second")["rows"]


def unseen(folder: Path | None) -> Table:
    said = validated("unseen", folder)["sources"]
    keys = ("first", "median", "bias", "p90", "inside", "memory")
    rows = [
        [f"[{name}](accuracy/{name}.md)", str(v["rows"])] + [_figure(v, key) for key in keys]
        for name, v in said.items()
        if "rows" in v
    ]
    apart = validated("intervals", folder)
    left = [round(100 * v["left_out"]) for v in apart["sources"].values() if v["rows"] >= 10]
    counted = {"within": sum(75 <= x <= 90 for x in left), "over": sum(x > 90 for x in left)}
    chance = dict(zip(("fewest", "most"), apart["chance"]["ends"], strict=True))
    counted |= {"large": len(left)} | {name: round(end) for name, end in chance.items()}
    told = {name: str(count) for name, count in counted.items()}
    head = ["source", "rows", "asked blind", "median", "bias", "p90", "in the 80 % interval"]
    return Table("unseen", "foretell validate --unseen", [*head, "peak memory"], rows, told)


def _figure(found: dict[str, Any], key: str) -> str:
    """A share as text; of a first answer its median error and its bias."""
    if key not in found:
        return ""
    if key == "first":
        return f"{_percent(found[key]['median'])} ({100 * found[key]['bias']:+.1f})"
    return _percent(found[key])


def whatifs(folder: Path | None) -> Table:
    rows = validated("whatifs", folder)["rows"]
    groups = _by_variant(rows)
    groups["**all, from a plain trace**"] = [r for r in rows if r["start"] == "base"]
    groups["**all, from a trace under autocast**"] = [r for r in rows if r["start"] != "base"]
    return _changes("whatifs", "foretell validate --whatif", groups)


def second(folder: Path | None) -> Table:
    rows = _second(folder)
    command = "foretell validate --whatif --truth benchmarks/measured"
    return _changes("second", command, _by_variant(rows) | {"**all**": rows})


def kinds(folder: Path | None) -> Table:
    return _models("kinds", folder)


def further(folder: Path | None) -> Table:
    return _models("further", folder)


def blind(folder: Path | None) -> Table:
    return _models("blind", folder)


def fresh(folder: Path | None) -> Table:
    return _models("fresh", folder)


def _models(name: str, folder: Path | None) -> Table:
    """What-ifs on the models of one folder of measurements."""
    more = ("--truth", str(ROOT / "benchmarks/measured" / name))
    rows = validated("whatifs", folder, *more, name=name)["rows"]
    command = f"foretell validate --whatif --truth benchmarks/measured/{name}"
    return _changes(name, command, _by_variant(rows) | {"**all**": rows})


def papers(folder: Path | None) -> Table:
    groups = paper_rows(folder)
    every = [row for rows in groups.values() for row in rows]
    command = "foretell validate --whatif --truth benchmarks/measured/papers"
    named = {f"`{name}`": rows for name, rows in groups.items()}
    return _changes("papers", command, named | {"**all**": every})


def paper_rows(folder: Path | None) -> dict[str, Rows]:
    """Papers' optimizations made and timed, by the what-if that is asked last."""
    more = ("--truth", str(ROOT / "benchmarks/measured/papers"))
    groups: dict[str, Rows] = {}
    for row in validated("whatifs", folder, *more, name="papers")["rows"]:
        groups.setdefault(row["variant"].split()[-1].partition(":")[0], []).append(row)
    return dict(sorted(groups.items()))


def _changes(name: str, command: str, groups: dict[str, Rows]) -> Table:
    rows = [[group, *_errors(some), _held(some)] for group, some in groups.items()]
    return Table(name, command, ["change", *ERRORS, "in the 80 % interval"], rows, {})


def _by_variant(rows: Rows) -> dict[str, Rows]:
    plain = [r for r in rows if r["start"] == "base"]
    names = sorted({r["variant"] for r in plain})
    return {f"`{name}`": [r for r in plain if r["variant"] == name] for name in names}


def memory(folder: Path | None) -> Table:
    rows = validated("memory", folder)["rows"]
    given = [{"error": r["error_given"]} for r in rows if r["variant"] != "base"]
    lines = [
        ["the trace", *_errors(rows), _held(rows)],
        ["and the plain step's peak", *_errors(given), ""],
    ]
    head = ["what is known", *ERRORS, "in the 80 % interval"]
    return Table("memory", "foretell validate --memory", head, lines, {})


def layouts(folder: Path | None) -> Table:
    said = validated("oracle", folder)["sources"]
    order, names = said["vtrain"], WORDS["sources"]
    told = {
        "best": _percent(order["best_found"]),
        "groups": str(order["groups"]),
        "spearman": f"{order['spearman_mean']:.3f}",
        "least": f"{order['spearman_least']:.3f}",
    }
    rows = [[names[n], *_source(s)] for n, s in said.items() if n in names]
    head = ["measured by", *ERRORS, "in the 80 % interval"]
    return Table("layouts", "foretell validate --oracle", head, rows, told)


def _source(said: dict[str, float]) -> list[str]:
    held = _percent(said["interval_holds"]) if "interval_holds" in said else ""
    return [f"{said['rows']:,.0f}", *(_percent(said[k]) for k in ERRORS[1:]), held]


def paradl(folder: Path | None) -> Table:
    said = validated("oracle", folder)["paradl"]["epochs"]
    theirs = {n: _percent(said[f"paper {n}"]) if f"paper {n}" in said else "" for n in IMAGES}
    rows = [[n, _percent(said[n]), theirs[n]] for n in IMAGES]
    head, told = ["strategy", "foretell", "ParaDL's oracle"], {"ranked": _percent(said["ranked"])}
    return Table("paradl", "foretell validate --oracle", head, rows, told)


def captured(folder: Path | None) -> Table:
    line = rf"(time, bound by .+?|peak memory)\s+(\d+) rows{_share('median', 'mean', 'worst')}"
    head = ["what", "rows", "median", "mean", "worst"]
    return _read("captured", validated("capture", folder), "capture", line, head)


def scaling(folder: Path | None) -> Table:
    line = rf"(.+?)\s+(\d+) rows{_share('median .error.', 'bias', 'worst')}"
    head = ["source", "rows", "median", "bias", "worst"]
    return _read("scaling", validated("scaling", folder), "scaling", line, head)


def collectives(folder: Path | None) -> Table:
    line = rf"all\s+((?:all_reduce|other ops)\s+\S+ MiB)\s+(\d+) rows{_share('median', 'in 80 %')}"
    head = ["collective", "rows", "median", "in the 80 % interval"]
    return _read("collectives", validated("collectives", folder), "collectives", line, head)


def _share(*names: str) -> str:
    return "".join(rf"  {name}\s+([+-]?[\d.]+)%" for name in names)


def _read(name: str, said: dict[str, Any], part: str, line: str, head: list[str]) -> Table:
    """Summary lines that a part prints: a name, the number of rows, shares."""
    hits = [re.fullmatch(line, text.strip()) for text in said["text"].splitlines()]
    cells = [hit.groups() for hit in hits if hit]
    rows = [[re.sub(r"\s+", " ", n), f"{int(k):,}", *(f"{x} %" for x in more)]
            for n, k, *more in cells]  # fmt: skip
    return Table(name, f"foretell validate --{part}", head, rows, {})


def kernels(folder: Path | None) -> Table:
    said = validated("kernels", folder)["held_out"]["summary"]
    rows = [[f"{s['op']}, {s['out']} left out", *_priced(s, "covered")] for s in said]
    head = ["kernels", "readings", "median", "p90", "in the 80 % interval"]
    return Table("kernels", "foretell validate --kernels", head, rows, {})


def fused(folder: Path | None) -> Table:
    said = validated("fused", folder)["rows"]
    kept = [r for r in said if " of models " in r["what"]]
    rows = [[f"{r['what']}, {r['by']}", *_priced(r, "near", "covered")] for r in kept]
    errors = ["median", "p90", "within 14 %", "in the 80 % interval"]
    head = ["regions, priced by", "readings", *errors]
    return Table("fused", "foretell validate --fused", head, rows, {})


def _priced(said: dict[str, Any], *more: str) -> list[str]:
    shares = (_percent(said[k]) for k in ("median", "p90", *more))
    return [f"{said['readings']:,}", *shares]


def benchmark(name: str, *options: str) -> Callable[[Path | None], Table]:
    """A script of `benchmarks/`, which prints one table of Markdown or several."""

    def make(folder: Path | None) -> Table:
        kept = folder / f"{name}.out" if folder else None
        line = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), *options]
        text = kept.read_text() if kept and kept.is_file() else _ran(line)
        command = " ".join([f"python benchmarks/{name}.py", *options])
        return Table(name, command, ["what", "measured", "bar"], _printed(text), {})

    make.__name__ = name
    return make


def _printed(text: str) -> list[list[str]]:
    """The rows of the tables a benchmark prints; of several, with their headings between."""
    rows = []
    for line in re.findall(r"^(?:\|.+\||## .+)$", text, re.MULTILINE):
        if line.startswith("## "):
            rows.append([f"**{line[3:].partition(': ')[2]}**", "", ""])
        elif not line.startswith(("| what |", "|--")):
            rows.append([cell.strip() for cell in line.strip("|").split("|")][:3])
    return [row for row in rows if row[0] != "****"]


PAGES: dict[str, tuple[Callable[[Path | None], Table], ...]] = {
    "accuracy": (
        unseen, whatifs, second, kinds, further, blind, fresh, papers, memory, layouts, paradl,
        captured, scaling, kernels, collectives, fused,
    ),
    "speed": (
        benchmark("startup"), benchmark("simulator", "--quick"), benchmark("oracle"),
        benchmark("plans"), benchmark("schedules", "--quick"), benchmark("capture"),
        benchmark("page"), benchmark("studio"), benchmark("scale"),
    ),
}  # fmt: skip


def _errors(rows: Iterable[dict[str, Any]]) -> list[str]:
    errors = np.abs([r["error"] for r in rows])
    told = np.median(errors), np.quantile(errors, 0.9), errors.max()
    return [f"{len(errors):,}", *(_percent(float(e)) for e in told)]


def _held(rows: Rows) -> str:
    return _percent(float(np.mean([r["covered"] for r in rows])))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ran(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _write(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Parse, run, write."""
    query = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    query.add_argument("pages", nargs="*", choices=[*PAGES, []], default=[])
    query.add_argument("--from", dest="folder", type=Path, help="what commands printed before")
    query.add_argument("--only", nargs="+", metavar="TABLE", help="tables to find anew")
    query.add_argument("--page", action="store_true", help="only lay out what was kept")
    given = query.parse_args()
    for page in given.pages or PAGES:
        if given.only and not {make.__name__ for make in PAGES[page]} & set(given.only):
            continue
        path = KEPT / f"{page}.json"
        if not given.page:
            _write(found(page, given), path)
            if page == "accuracy" and not given.only:
                from explained import explained  # which takes its figures from here

                _write(explained(given.folder), EXPLAINED)
        (HERE / f"{page}.md").write_text(lay_out(page, json.loads(path.read_text())))


if __name__ == "__main__":
    main()
