"""Clusters from what a person writes: a preset's name with options, or a file.

    load("a100-80")                              one device
    load("a100-80:gpus=64")                      64 of them on the nodes they usually stand in
    load("dgx-a100:nodes=8,oversubscription=2")  a node preset, several times, behind thin uplinks
    load("abci:nodes=16")                        a cluster preset, smaller
    load("lab.toml")                             a file, with options after it or without

`validate` tells all that is wrong with a file at once. Presets are read from `presets/` when first
asked for: devices and links are values, nodes and clusters stay tables, to be changed before they
are built.
"""

import re
import tomllib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from foretell import spec
from foretell.cluster import cluster as whole
from foretell.cluster.cluster import Calibration, Cluster
from foretell.cluster.node import Device, Node
from foretell.cluster.toml import (
    MOST,
    MOST_INSIDE,
    Cable,
    Document,
    Problem,
    Scope,
    Table,
    fail,
    in_order,
    parse,
    read_cable,
    read_device,
    read_node,
    read_switches,
    read_tier,
)
from foretell.cluster.topology import Tier
from foretell.errors import InputError, unknown
from foretell.io import is_there, limits, read_text

T = TypeVar("T")
Tables = dict[str, dict[str, Any]]


_FILE = (
    *("name", "title", "node", "tier", "switch", "device", "link", "ranks", "aliases", "sources"),
    "calibration",
)
RACK = 32  # devices of a node, from which it is a rack


@cache
def devices() -> Mapping[str, Device]:
    """Every device preset by name, aliases included."""
    found: dict[str, Device] = {}
    for name, table in _presets("devices"):
        found[name] = _finished(table.document, read_device(table, name, found))
    return found | {a: found[n] for a, n in aliases("devices").items()}


def titled(title: str) -> Device | None:
    """The preset all of whose words a title has; of several the one with most words.

    `Tesla V100-SXM2-32GB` → `v100-32`.
    """
    text = re.sub(r"(\d)\s+ti\b", r"\1ti", title.lower())  # `2080 Ti` is one number
    words = {w.removesuffix("gb") for w in re.split(r"[^a-z0-9]+", text)}
    best: tuple[int, Device | None] = (0, None)
    for name, device in sorted(devices().items()):
        parts = name.split("-")
        if set(parts) <= words and len(parts) > best[0]:
            best = (len(parts), device)
    if best[1] is None:  # a title that does not tell the size of its memory
        models = {w for w in words if re.search(r"\d", w)}  # `rtx` alone names no device
        firsts = [d for n, d in sorted(devices().items()) if n.split("-")[0] in models]
        return firsts[0] if firsts else None
    return best[1]


@cache
def cables() -> Mapping[str, Cable]:
    """Every link preset by name."""
    return {name: _finished(t.document, read_cable(t)) for name, t in _presets("links")}


def _presets(what: str) -> Iterator[tuple[str, Table]]:
    for name, values in tables(what).items():
        document = Document(f"presets/{what} ({name})", values, {})
        yield name, Table(document, (), values, f"{what[:-1]} `{name}`")


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
    return {str(document["name"]): document for document in pages}


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


def load(text: str) -> Cluster:
    """The cluster a spec or file name stands for."""
    name, given = (text, {}) if text.endswith(".toml") else spec.split(text)
    wanted = options(given)
    if _is_file(name):
        document = _page(Path(name))
        cluster = _finished(document, read(document))
        if not given:
            return cluster
    else:
        plain = name.lower().replace("_", "-")
        document = Document(text, table(plain), {})
        wanted = one_device(plain, wanted)
    document = replace(document, values=with_options(document.values, wanted, text))
    return with_ranks(_finished(document, read(document)), wanted, text)


def loads(text: str) -> Cluster:
    """The cluster that the text of a cluster file describes."""
    document = parse(text)
    return _finished(document, read(document))


def validate(source: str | Path) -> tuple[Problem, ...]:
    """Everything wrong with a cluster file, given its path or its text; empty where it is sound."""
    if isinstance(source, Path) or ("\n" not in source and _is_file(source)):
        try:
            document = _page(Path(source))
        except InputError as error:
            return (Problem(error.message, 0, error.hint),)
    else:
        document = parse(source)
    read(document)
    return tuple(in_order(document.problems))


def _is_file(text: str) -> bool:
    return text.endswith(".toml") or "/" in text


def _page(path: Path) -> Document:
    if not is_there(str(path)):
        hint = f"a preset has no ending: {', '.join(clusters())}, …"
        raise InputError(f"there is no file `{path}`", hint=hint)
    return parse(read_text(path, limits().config, "cluster file"), str(path))


def _finished(document: Document, made: T | None) -> T:
    """What was made of a document, or an error that tells its problems."""
    if document.problems or made is None:
        raise fail(document.problems, document.file)
    return made


def read(document: Document) -> Cluster | None:
    """The cluster a document describes; its problems are noted on the document."""
    if document.problems:
        return None
    top = Table(document, (), document.values, "the cluster")
    top.allow(_FILE)
    scope = _scope(document)
    groups = list(_groups(document, scope))
    num_nodes = sum(count for _, count in groups)
    tiers = _tiers(document, [node for node, _ in groups])
    switches = read_switches(_many(document, "switch"), num_nodes, scope)
    if document.problems:
        return None
    made = whole.of(
        top.text("name", Path(document.file).stem or "cluster"),
        groups,
        tiers=tiers,
        switches=switches,
        title=top.text("title"),
    )
    check(document, made)
    factors = _calibration(document)
    return None if document.problems else _placed(top, replace(made, calibration=factors))


def _calibration(document: Document) -> Calibration:
    """How the machines really run, where the document says so."""
    try:
        return Calibration.of(dict(document.values.get("calibration", {})), "[calibration]")
    except (InputError, TypeError, ValueError) as error:
        document.note(("calibration",), str(getattr(error, "message", error)))
        return Calibration()


def _scope(document: Document) -> Scope:
    """The presets, with what the document defines in front."""
    known = scope()
    cables = {
        name: cable
        for name, table in _named(document, "link")
        if (cable := read_cable(table)) is not None
    }
    devices: dict[str, Any] = {}
    for name, table in _named(document, "device"):
        device = read_device(table, name, ChainMap(devices, dict(known.devices)))
        if device is not None:
            devices[name] = device
    return Scope(ChainMap(devices, dict(known.devices)), ChainMap(cables, dict(known.cables)))


def _named(document: Document, key: str) -> Iterator[tuple[str, Table]]:
    """The tables of [key.NAME]."""
    tables = document.values.get(key, {})
    if not isinstance(tables, dict):
        document.note((key,), f"[[{key}]] is a list", f"write `[{key}.NAME]`")
        return
    for name, values in tables.items():
        if isinstance(values, dict):
            yield name, Table(document, (key, name), values, f"{key} `{name}`")
        else:
            document.note((key, name), f"`{key}.{name}` is `{values}`, not a table")


def _many(document: Document, key: str) -> Iterator[Table]:
    """The tables of [[key]]."""
    tables = document.values.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        document.note((key,), f"`{key}` is not a list of tables", f"write `[[{key}]]`")
        return
    for i, values in enumerate(tables):
        yield Table(document, (key, i), values, f"{key} {i}")


def _groups(document: Document, scope: Scope) -> Iterator[tuple[Node, int]]:
    """The kinds of node and how many of each."""
    tables = list(_many(document, "node"))
    if not tables and not document.problems:
        document.note(
            ("node",), "there is no [[node]]: the cluster is empty", "add one; see the docs"
        )
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
    found = named("nodes", name)
    if found is None:
        known = [*tables("nodes"), *aliases("nodes")]
        table.document.note_unknown((*table.place, "preset"), "node preset", name, known)
        return None
    values = {**_fitting(found, table.values), **table.values}
    return Table(table.document, table.place, values, f"{table.what} (`{name}`)")


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


def _tiers(document: Document, nodes: list[Node]) -> list[Tier]:
    """The tiers of switches; one that leaves its latency out takes its network's."""
    hop = max((node.hop for node in nodes), default=0.0)
    tiers = [read_tier(table) for table in _many(document, "tier")]
    if tiers and document.values.get("switch"):
        document.note(("tier",), "the network is given twice, by [[tier]] and by [[switch]]")
    if not tiers and not document.values.get("switch"):
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


@dataclass(frozen=True)
class Options(spec.Spec):
    """What a spec may change about a preset."""

    name: ClassVar[str] = "cluster"
    nodes: int | None = None
    gpus: int | None = None
    device: str | None = None
    nic: str | None = None
    nics: int | None = None
    rack: int | None = None
    oversubscription: float | None = None


def table(name: str) -> dict[str, Any]:
    """The file a preset stands for."""
    if table := named("clusters", name):
        return table
    if named("nodes", name):
        return {"node": [{"preset": name}]}
    if device := devices().get(name):
        return {"node": [{"preset": device.node, "device": name}]}
    raise unknown("cluster, node or device preset", name, names())


def options(given: Mapping[str, str]) -> Options:
    """The options of a spec, all above zero."""
    found = Options.of(given)
    for key in ("nodes", "gpus", "nics", "rack", "oversubscription"):
        value = getattr(found, key)
        if value is not None and not 0 < value <= MOST:
            raise InputError(
                f"option `{key}` is `{spec.write(value)}`, not above zero and at most {MOST}"
            )
    return found


def one_device(name: str, options: Options) -> Options:
    """The name of a device alone is one device; with `gpus` or `nodes`, that many."""
    is_device = not named("clusters", name) and not named("nodes", name)
    is_unsized = options.gpus is None and options.nodes is None
    return replace(options, gpus=1) if is_device and is_unsized else options


def with_options(table: Mapping[str, Any], options: Options, text: str) -> dict[str, Any]:
    """The file a preset stands for, with a spec's options written into it."""
    nodes = [dict(entry) for entry in table["node"]]
    wanted = {"device": options.device, "nic": options.nic, "nics": options.nics}
    for entry in nodes:
        entry |= {key: value for key, value in wanted.items() if value is not None}
    count = _num_nodes(nodes, options, text)
    if count is not None:
        nodes[0]["count"] = count
    out = {**table, "node": nodes, "name": text}
    tiers = _racks(out, options, sum(entry.get("count", 1) for entry in nodes))
    return out | ({"tier": tiers} if tiers else {})


def _num_nodes(nodes: list[dict[str, Any]], options: Options, text: str) -> int | None:
    """How many nodes the options ask for; None where they leave it to the preset."""
    if options.nodes is None and options.gpus is None:
        return None
    if len(nodes) > 1:
        if options.nodes is None:
            return None
        hint = "write a file with the counts you want, or choose ranks with `gpus`"
        raise InputError(f"`{text}` has several kinds of node: `nodes` is unclear", hint=hint)
    if options.nodes is not None or options.gpus is None:
        return options.nodes
    devices = _with_preset(nodes[0]).get("devices", 1)
    return -(-options.gpus // (len(devices) if isinstance(devices, list) else devices))


def _with_preset(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A [[node]] table with its preset behind it, unread."""
    return {**node(entry["preset"]), **entry} if "preset" in entry else entry


def _racks(table: Mapping[str, Any], options: Options, count: int) -> list[dict[str, Any]]:
    """The tiers of switches the options ask for, or the node preset suggests."""
    thin = options.oversubscription
    if table.get("tier") and not options.rack:
        tiers = [dict(tier) for tier in table["tier"]]
        uplinked = [tier for tier in tiers if tier.get("size")]
        if thin is not None and uplinked:
            uplinked[-1]["oversubscription"] = thin
        return tiers
    if table.get("switch"):
        return []
    rack = options.rack or _with_preset(table["node"][0]).get("rack", count)
    if rack >= count and thin is not None:
        rack = 1  # all nodes share one leaf: what is thin is each node's own uplink
    if rack >= count:
        return [{"name": "leaf"}]
    leaf = {"name": "leaf", "size": rack, "oversubscription": thin or 1.0}
    return [leaf, {"name": "spine"}]


def with_ranks(cluster: Cluster, options: Options, text: str) -> Cluster:
    """Only the requested number of ranks: nodes filled in order, or evenly where both are given.

    Racks of one NVLink domain are shared out evenly too, as schedulers do: 256 of four racks of 72
    are 64 of each, so that groups of 8, 16, 32 or 64 stay inside one.
    """
    gpus = options.gpus
    if gpus is None or gpus == cluster.size:
        return cluster
    if gpus > cluster.size:
        hint = f"it has {cluster.size} devices on {cluster.num_nodes} nodes"
        raise InputError(f"`{text}` requests {gpus} gpus, more than there are", hint=hint)
    many = options.nodes or cluster.num_nodes
    each, left = divmod(gpus, many)
    if options.nodes is None and (left or cluster.size < RACK * many):
        return cluster.subset(range(gpus))
    if left:
        hint = f"{gpus} gpus do not divide over {options.nodes} nodes"
        raise InputError(f"`{text}` would leave nodes uneven", hint=hint)
    return cluster.subset(np.flatnonzero(cluster.slots < each).tolist())


def check(document: Document, cluster: Cluster) -> None:
    """Note every device or node that is cut off."""
    several = len(cluster.kinds) > 1
    for i, (node, _) in enumerate(cluster.groups):
        if not _is_joined(document, i, node):
            continue
        if several and not node.nics:
            hint = 'give it one: `nic = "infiniband-hdr"` or `nic = "ethernet-25g"`'
            document.note(("node", i), f"node `{node.name}` has no nic to reach the others", hint)
        elif several:
            _check_exits(document, i, node)
    if not several or document.problems:
        return
    if cluster.switches:
        _check_switches(document, cluster)
    else:
        _check_tiers(document, cluster)


def _is_joined(document: Document, i: int, node: Node) -> bool:
    """Whether the devices of a node reach each other."""
    if _share_a_host(node):
        return True
    for a, b in combinations(range(len(node.devices)), 2):
        if node.path(a, b) is None:
            hint = "link them, or set `forwards = true` if devices pass on each other's traffic"
            message = f"device{b} of node `{node.name}` is an island: no way leads to device{a}"
            document.note(("node", i), message, hint)
            return False
    return True


def _share_a_host(node: Node) -> bool:
    """Whether every device touches the same connected part of switches and sockets."""
    size = len(node.devices)
    touched = [v for v, _ in node.wires.arcs[0] if v >= size]
    part = set(touched[:1])
    layer = list(part)
    while layer:
        layer = [w for v in layer for w, _ in node.wires.arcs[v] if w >= size and w not in part]
        part.update(layer)
    return all(any(v in part for v, _ in node.wires.arcs[d]) for d in range(size))


def _check_exits(document: Document, i: int, node: Node) -> None:
    for slot in range(len(node.devices)):
        if node.nic(slot) < 0:
            hint = "link it to a nic, a PCIe switch or a socket"
            document.note(("node", i), f"device{slot} of node `{node.name}` reaches no nic", hint)
            return


def _check_tiers(document: Document, cluster: Cluster) -> None:
    last = cluster.fabric.groupings[-1]
    if len(last.out) > 1:
        hint = "add a last [[tier]] without `size`"
        count = len(last.out)
        document.note(
            ("tier",), f"the top tier `{last.name}` leaves {count} islands of nodes", hint
        )


def _check_switches(document: Document, cluster: Cluster) -> None:
    homes = {n for switch in cluster.switches for n in switch.nodes}
    for n in range(len(cluster.kinds)):
        if n not in homes:
            document.note(("switch",), f"node {n} is an island: no switch names it in `nodes`")
            return
    fabric = cluster.fabric
    for s, switch in enumerate(cluster.switches):
        if switch.nodes and fabric.path(int(fabric.home[0]), s) is None:
            first = cluster.switches[int(fabric.home[0])].name
            hint = f'link them: `links = [["{first}", "…"]]`'
            message = f"switch `{switch.name}` is an island: no way leads to `{first}`"
            document.note(("switch", s), message, hint)
            return
