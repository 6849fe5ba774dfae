"""Clusters from what a person writes: a preset's name with options, or a file.

    load("a100-80")                              one device
    load("a100-80:gpus=64")                      64 of them on the nodes they usually stand in
    load("dgx-a100:nodes=8,oversubscription=2")  a node preset, several times, behind thin uplinks
    load("abci:nodes=16")                        a cluster preset, smaller
    load("lab.toml")                             a file, with options after it or without

`validate` tells all that is wrong with a file at once.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foretell import spec
from foretell.cluster import cluster as whole
from foretell.cluster import options, preset
from foretell.cluster.calibration import Calibration
from foretell.cluster.check import check
from foretell.cluster.cluster import Cluster
from foretell.cluster.fabric import Tier
from foretell.cluster.node import Node
from foretell.cluster.page import Page, Problem, fail, in_order, parse
from foretell.cluster.tables import (
    MOST,
    MOST_INSIDE,
    Scope,
    Table,
    read_cable,
    read_device,
    read_switches,
    read_tier,
)
from foretell.cluster.wiring import read_node
from foretell.errors import InputError
from foretell.io import is_there, limits, read_text

_FILE = (
    *("name", "title", "node", "tier", "switch", "device", "link", "ranks", "aliases", "sources"),
    "calibration",
)


def load(text: str) -> Cluster:
    """The cluster a spec or file name stands for."""
    name, given = (text, {}) if text.endswith(".toml") else spec.split(text)
    wanted = options.options(given)
    if _is_file(name):
        page = _page(Path(name))
        cluster = _finished(page, read(page))
        if not given:
            return cluster
    else:
        plain = name.lower().replace("_", "-")
        page = Page(text, options.table(plain), {})
        wanted = options.one(plain, wanted)
    changed = replace(page, values=options.changed(page.values, wanted, text))
    return options.ranked(_finished(changed, read(changed)), wanted, text)


def validate(source: str | Path) -> tuple[Problem, ...]:
    """Everything wrong with a cluster file, given its path or its text; empty where it is sound."""
    if isinstance(source, Path) or ("\n" not in source and _is_file(source)):
        try:
            page = _page(Path(source))
        except InputError as error:
            return (Problem(error.message, 0, error.hint),)
    else:
        page = parse(source)
    read(page)
    return tuple(in_order(page.problems))


def _is_file(text: str) -> bool:
    return text.endswith(".toml") or "/" in text


def _page(path: Path) -> Page:
    if not is_there(str(path)):
        hint = f"a preset has no ending: {', '.join(preset.clusters())}, …"
        raise InputError(f"there is no file `{path}`", hint=hint)
    return parse(read_text(path, limits().config, "cluster file"), str(path))


def _finished(page: Page, cluster: Cluster | None) -> Cluster:
    if page.problems or cluster is None:
        raise fail(page.problems, page.file)
    return cluster


def read(page: Page) -> Cluster | None:
    """The cluster a page describes; its problems are noted on the page."""
    if page.problems:
        return None
    top = Table(page, (), page.values, "the cluster")
    top.allow(_FILE)
    scope = _scope(page)
    groups = list(_groups(page, scope))
    num_nodes = sum(count for _, count in groups)
    tiers = _tiers(page, [node for node, _ in groups])
    switches = read_switches(_many(page, "switch"), num_nodes, scope)
    if page.problems:
        return None
    made = whole.of(
        top.text("name", Path(page.file).stem or "cluster"),
        groups,
        tiers=tiers,
        switches=switches,
        title=top.text("title"),
    )
    check(page, made)
    factors = _calibration(page)
    return None if page.problems else _placed(top, replace(made, calibration=factors))


def _calibration(page: Page) -> Calibration:
    """How the machines really run, where the page says so."""
    try:
        return Calibration.of(dict(page.values.get("calibration", {})), "[calibration]")
    except (InputError, TypeError, ValueError) as error:
        page.note(("calibration",), str(getattr(error, "message", error)))
        return Calibration()


def _scope(page: Page) -> Scope:
    """The presets, with what the page defines in front."""
    known = preset.scope()
    cables = {
        name: cable
        for name, table in _named(page, "link")
        if (cable := read_cable(table)) is not None
    }
    devices: dict[str, Any] = {}
    for name, table in _named(page, "device"):
        device = read_device(table, name, ChainMap(devices, dict(known.devices)))
        if device is not None:
            devices[name] = device
    return Scope(ChainMap(devices, dict(known.devices)), ChainMap(cables, dict(known.cables)))


def _named(page: Page, key: str) -> Iterator[tuple[str, Table]]:
    """The tables of [key.NAME]."""
    tables = page.values.get(key, {})
    if not isinstance(tables, dict):
        page.note((key,), f"[[{key}]] is a list", f"write `[{key}.NAME]`")
        return
    for name, values in tables.items():
        if isinstance(values, dict):
            yield name, Table(page, (key, name), values, f"{key} `{name}`")
        else:
            page.note((key, name), f"`{key}.{name}` is `{values}`, not a table")


def _many(page: Page, key: str) -> Iterator[Table]:
    """The tables of [[key]]."""
    tables = page.values.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        page.note((key,), f"`{key}` is not a list of tables", f"write `[[{key}]]`")
        return
    for i, values in enumerate(tables):
        yield Table(page, (key, i), values, f"{key} {i}")


def _groups(page: Page, scope: Scope) -> Iterator[tuple[Node, int]]:
    """The kinds of node and how many of each."""
    tables = list(_many(page, "node"))
    if not tables and not page.problems:
        page.note(("node",), "there is no [[node]]: the cluster is empty", "add one; see the docs")
    total = 0
    for table in map(_expanded, tables):
        if table is None:
            continue
        name = str(table.values.get("preset", f"node{table.place[-1]}"))
        node, count = read_node(table, name, scope), table.whole("count", 1)
        total += count * (len(node.devices) if node else 0)
        if total > MOST:
            table.note("count", f"{total} devices are too many", f"at most {MOST} can be read")
            return
        if node is not None:
            yield node, count


def _expanded(table: Table) -> Table | None:
    """A [[node]] table with what its preset says behind what it says itself."""
    if "preset" not in table.values:
        return table
    name = str(table.values["preset"])
    found = preset.named("nodes", name)
    if found is None:
        known = [*preset.tables("nodes"), *preset.aliases("nodes")]
        table.page.note_unknown((*table.place, "preset"), "node preset", name, known)
        return None
    values = {**_fitting(found, table.values), **table.values}
    return Table(table.page, table.place, values, f"{table.what} (`{name}`)")


def _fitting(behind: Mapping[str, Any], front: Mapping[str, Any]) -> dict[str, Any]:
    """A preset without the wires of devices, and the sources of keys, that the front replaces."""
    out = dict(behind)
    size = front.get("devices", out.get("devices", 1))
    if isinstance(size, int) and "links" in out:
        there = {f"device{i}" for i in range(min(size, MOST_INSIDE))}
        out["links"] = [
            row
            for row in out["links"]
            if all(end in there or not end.startswith("device") for end in row[:2])
        ]
    given = ((name, text) for key, text in out["sources"].items() for name in key.split())
    out["sources"] = {name: text for name, text in given if name not in front}
    return out


def _tiers(page: Page, nodes: list[Node]) -> list[Tier]:
    """The tiers of switches; one that leaves its latency out takes its network's."""
    hop = max((node.hop for node in nodes), default=0.0)
    tiers = [read_tier(table) for table in _many(page, "tier")]
    if tiers and page.values.get("switch"):
        page.note(("tier",), "the network is given twice, by [[tier]] and by [[switch]]")
    if not tiers and not page.values.get("switch"):
        tiers = [Tier("switch")]
    return [replace(t, latency=t.latency or hop) for t in tiers]


def _placed(top: Table, cluster: Cluster) -> Cluster | None:
    """The cluster with ranks where `ranks = ["0/0-7", "1/2"]` (node/slots) puts them."""
    if "ranks" not in top.values:
        return cluster
    pairs: list[tuple[int, int]] = []
    for text in top.rows("ranks"):
        found = _slots_of(str(text), cluster)
        if found is None:
            top.note("ranks", f"`{text}` in ranks names no devices", 'write `ranks = ["0/0-3"]`')
            return None
        pairs += found
    if len(set(pairs)) < len(pairs) or not pairs:
        top.note("ranks", "ranks puts two ranks on one device" if pairs else "ranks is empty")
        return None
    nodes, slots = np.array(pairs, dtype=np.int64).T
    return replace(cluster, nodes=nodes, slots=slots)


def _slots_of(text: str, cluster: Cluster) -> list[tuple[int, int]] | None:
    node, _, slots = text.partition("/")
    first, _, last = slots.partition("-")
    if not (node.isdecimal() and first.isdecimal() and (last or first).isdecimal()):
        return None
    if int(node) >= len(cluster.kinds):
        return None
    end = int(last or first)
    size = len(cluster.groups[int(cluster.kinds[int(node)])][0].devices)
    return [(int(node), s) for s in range(int(first), end + 1)] if end < size else None
