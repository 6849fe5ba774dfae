"""The presets that come with the package, read from `presets/` when first asked for.

Devices and links are values; nodes and clusters stay tables, to be changed before they are built.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from foretell.cluster.device import Device
from foretell.cluster.toml_document import Page, fail
from foretell.cluster.toml_schema import Cable, Scope, Table, read_cable, read_device
from foretell.errors import unknown

Tables = dict[str, dict[str, Any]]


@cache
def devices() -> Mapping[str, Device]:
    """Every device preset by name, aliases included."""
    found: dict[str, Device] = {}
    for name, table in tables("devices").items():
        page = Page(f"presets/devices ({name})", table, {})
        device = read_device(Table(page, (), table, f"device `{name}`"), name, found)
        if page.problems or device is None:
            raise fail(page.problems, page.file)
        found[name] = device
    return found | {a: found[n] for a, n in aliases("devices").items()}


def titled(title: str) -> Device | None:
    """The preset all of whose words a title has; of several the one with most words.

    `Tesla V100-SXM2-32GB` → `v100-32`.
    """
    text = re.sub(r"(\d)\s+ti\b", r"\1ti", title.lower())  # `2080 Ti` is one number
    words = {w.removesuffix("gb") for w in re.split(r"[^a-z0-9]+", text)}
    best: tuple[int, Device | None] = (0, None)
    for name, device in sorted(devices().items()):
        asked = name.split("-")
        if set(asked) <= words and len(asked) > best[0]:
            best = (len(asked), device)
    if best[1] is None:  # a title that does not tell the size of its memory
        models = {w for w in words if re.search(r"\d", w)}  # `rtx` alone names no device
        firsts = [d for n, d in sorted(devices().items()) if n.split("-")[0] in models]
        return firsts[0] if firsts else None
    return best[1]


@cache
def cables() -> Mapping[str, Cable]:
    """Every link preset by name."""
    found = {}
    for name, table in tables("links").items():
        page = Page(f"presets/links ({name})", table, {})
        cable = read_cable(Table(page, (), table, f"link `{name}`"))
        if page.problems or cable is None:
            raise fail(page.problems, page.file)
        found[name] = cable
    return found


def scope() -> Scope:
    """The names every file may use."""
    return Scope(devices(), cables())


@cache
def tables(what: str) -> Tables:
    """The tables of all preset files of one sort: devices, links, nodes."""
    return {name: table for text in _texts(what) for name, table in tomllib.loads(text).items()}


@cache
def clusters() -> Tables:
    """The cluster presets: one file each, as a user would write it."""
    pages = (tomllib.loads(text) for text in _texts("clusters"))
    return {str(page["name"]): page for page in pages}


@cache
def aliases(what: str) -> Mapping[str, str]:
    """Other names -> the name of the preset."""
    found = clusters() if what == "clusters" else tables(what)
    return {a: name for name, table in found.items() for a in table.get("aliases", ())}


def named(what: str, name: str) -> dict[str, Any] | None:
    """The table of a node or cluster preset, by any of its names."""
    found = clusters() if what == "clusters" else tables(what)
    return found.get(aliases(what).get(name, name))


def node(name: str) -> dict[str, Any]:
    """The table of a node preset; an unknown name is an error that offers the nearest."""
    table = named("nodes", name)
    if table is None:
        raise unknown("node preset", name, [*tables("nodes"), *aliases("nodes")])
    return table


def names() -> list[str]:
    """Everything `load` knows by name."""
    return sorted(
        {*devices(), *tables("nodes"), *aliases("nodes"), *clusters(), *aliases("clusters")}
    )


def _texts(what: str) -> Iterator[str]:
    folder = files("foretell.cluster").joinpath("presets", what)
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            yield file.read_text(encoding="utf-8")
