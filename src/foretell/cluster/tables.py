"""From the tables of a cluster file to devices, links, nodes and switches.

Every reader takes a `Table`, notes what is wrong on its page, and gives back None only where
nothing sensible can be made; so one pass over a file finds all its problems.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from foretell.cluster import units
from foretell.cluster.device import FORMATS, Device
from foretell.cluster.fabric import Switch, Tier
from foretell.cluster.link import KINDS, NETWORK, Link
from foretell.cluster.page import Page, Place

MOST = 2**20  # ranks or nodes a file may ask for: beyond it is a slip, not a cluster
MOST_INSIDE = 1024  # devices, switches or NICs in one node


@dataclass(frozen=True)
class Cable:
    """What links are made of: kind, bandwidth each way and latency of one, and of its switches."""

    kind: str
    bandwidth: float
    latency: float
    switch: float = 0.0  # seconds a switch of such a network takes


@dataclass(frozen=True)
class Scope:
    """The names a table may use: what the file defines, and the presets behind it."""

    devices: Mapping[str, Device]
    cables: Mapping[str, Cable]


@dataclass(frozen=True)
class Table:
    """One table of a page, with a name for messages."""

    page: Page
    place: Place
    values: Mapping[str, Any]
    what: str  # "device `a100`"

    def note(self, key: str, message: str, hint: str = "") -> None:
        """Remember a problem with one key."""
        self.page.note((*self.place, key), message, hint)

    def allow(self, known: Collection[str]) -> None:
        """Note every key that has no meaning here."""
        for key in self.values:
            if key not in known:
                self.page.note_unknown((*self.place, key), f"key in {self.what}", key, known)

    def number(self, key: str, unit: str, default: float | None = None) -> float:
        """A quantity above zero, or zero where that is the default; no default: it is needed."""
        if key not in self.values:
            if default is None:
                hint = f'write `{key} = "… {unit}"`'
                self.note(key, f"{self.what} has no {key.replace('_', ' ')}", hint)
            return default or 0.0
        try:
            value = units.read(self.values[key], unit)
        except ValueError as error:
            self.note(key, f"{key} of {self.what} {error}", f"write it as `{_EXAMPLE[unit]}`")
            return default or 0.0
        return self._sound(key, value, default)

    def _sound(self, key: str, value: float, default: float | None) -> float:
        if math.isfinite(value) and (value > 0 or value == default):
            return value
        shown = self.values[key]
        why = "not a number" if math.isnan(value) else "infinite" if value > 0 else ""
        self.note(key, f"{key} of {self.what} is `{shown}`: {why or 'it must be more than zero'}")
        return default or 0.0

    def whole(self, key: str, default: int, least: int = 1, most: int = MOST) -> int:
        """A whole number within bounds."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            sort = f"a whole number from {least} to {most}"
            self.note(key, f"{key} of {self.what} is `{value}`, not {sort}")
            return default
        return value

    def text(self, key: str, default: str = "") -> str:
        """A piece of text."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            self.note(key, f"{key} of {self.what} is `{value}`, not text in quotes")
            return default
        return value

    def flag(self, key: str) -> bool:
        """true or false."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.note(key, f"{key} of {self.what} is `{value}`, not true or false")
        return bool(value)

    def rows(self, key: str) -> list[Any]:
        """A list."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            self.note(key, f"{key} of {self.what} is `{value}`, not a list")
            return []
        return value

    def under(self, key: str) -> Mapping[str, Any]:
        """A table inside this one."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self.note(key, f"{key} of {self.what} is `{value}`, not a table")
            return {}
        return value

    def cable(self, key: str, scope: Scope, text: str | None = None) -> tuple[Cable, int] | None:
        """The cable a text like `nvlink3 x12` names, and how many."""
        value = self.text(key) if text is None else text
        name, _, times = value.partition(" ")
        count = times.strip().removeprefix("x") or "1"
        if name not in scope.cables:
            self.page.note_unknown((*self.place, key), "link", name, scope.cables)
            return None
        if not count.isdecimal() or not 1 <= int(count) <= MOST:
            self.note(key, f"`{value}` in {self.what}: `{times}` is not a count like `x2`")
            return None
        return scope.cables[name], int(count)


_EXAMPLE = {
    "B": "80 GB",
    "B/s": "25 GB/s` or `200 Gb/s",
    "s": "1.5 us",
    "Hz": "1.41 GHz",
    "W": "400 W",
    "flop/s": "312 Tflop/s",
    "$/h": "32.77 $/h",
}


def read_cable(table: Table) -> Cable | None:
    """A [link.NAME] table."""
    table.allow(("kind", "bandwidth", "latency", "switch", "sources", "title"))
    kind = table.text("kind", "ethernet")
    if kind not in KINDS:
        table.page.note_unknown((*table.place, "kind"), "kind of link", kind, KINDS)
        return None
    return Cable(
        kind,
        table.number("bandwidth", "B/s"),
        table.number("latency", "s", 0.0),
        table.number("switch", "s", 0.0),
    )


_DEVICE = {f.name for f in fields(Device)} - {"name"} | {"like", "aliases"}


def read_device(table: Table, name: str, known: Mapping[str, Device]) -> Device | None:
    """A [device.NAME] table; `like` takes what it leaves out from another device."""
    table.allow(_DEVICE)
    base = None
    if like := table.text("like"):
        if like not in known:
            table.page.note_unknown((*table.place, "like"), "device", like, known)
            return None
        base = known[like]
    return Device(
        name=name,
        title=table.text("title", base.title if base else name),
        vendor=table.text("vendor", base.vendor if base else ""),
        arch=table.text("arch", base.arch if base else ""),
        memory=table.number("memory", "B", base.memory if base else None),
        memory_bandwidth=table.number(
            "memory_bandwidth", "B/s", base.memory_bandwidth if base else None
        ),
        flops=_flops(table, base),
        units=table.whole("units", base.units if base else 1),
        clock=table.number("clock", "Hz", base.clock if base else 1e9),
        l2=table.number("l2", "B", base.l2 if base else 4e6),
        launch=table.number("launch", "s", base.launch if base else Device.launch),
        floor=table.number("floor", "s", base.floor if base else Device.floor),
        watts=table.number("watts", "W", base.watts if base else 0.0),
        price=table.number("price", "$/h", base.price if base else 0.0),
        sources=_sources(table),
        bus=table.text("bus", base.bus if base else Device.bus),
        node=table.text("node", base.node if base else Device.node),
    )


def _flops(table: Table, base: Device | None) -> dict[str, float]:
    rates = dict(base.flops) if base else {}
    inner = Table(table.page, (*table.place, "flops"), table.under("flops"), table.what)
    for key in inner.values:
        if key not in FORMATS:
            inner.page.note_unknown((*inner.place, key), "number format", key, FORMATS)
            continue
        rates[key] = inner.number(key, "flop/s")
    if "fp32" not in rates:
        table.note("flops", f"{table.what} has no fp32 rate", 'write `fp32 = "… Tflop/s"`')
    return {key: rates[key] for key in FORMATS if key in rates}


def _sources(table: Table) -> dict[str, str]:
    """The source of each field; a key may name several fields, `"memory units clock"`."""
    given = table.under("sources")
    return {name: str(text) for key, text in given.items() for name in key.split()}


def read_tier(table: Table) -> Tier:
    """A [[tier]] table."""
    table.allow(("name", "size", "oversubscription", "uplink", "latency", "sources"))
    return Tier(
        table.text("name", "switch"),
        table.whole("size", 0, least=0),
        _ratio(table, "oversubscription"),
        table.number("uplink", "B/s", 0.0),
        table.number("latency", "s", 0.0),
    )


def _ratio(table: Table, key: str) -> float:
    value = table.values.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        table.note(key, f"{key} of {table.what} is `{value}`: it must be a number above zero")
        return 1.0
    return float(value)


def read_switches(tables: Iterable[Table], num_nodes: int, scope: Scope) -> list[Switch]:
    """The [[switch]] tables; links to a switch are found by its name."""
    found = list(tables)
    names = [table.text("name") for table in found]
    switches = []
    for table, name in zip(found, names, strict=True):
        table.allow(("name", "nodes", "links", "latency"))
        if not name or names.count(name) > 1:
            table.note("name", f"switch name `{name}` is " + ("taken" if name else "missing"))
        nodes = tuple(_node_numbers(table, num_nodes))
        links = tuple(_trunks(table, name, names, scope))
        switches.append(Switch(name, nodes, links, table.number("latency", "s", 0.0)))
    return switches


def _node_numbers(table: Table, num_nodes: int) -> Iterator[int]:
    values = table.rows("nodes")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_nodes:
            known = f"nodes are counted 0 … {num_nodes - 1}"
            table.note("nodes", f"{table.what} names node `{value}`, which is not there", known)
        elif values.count(value) > 1:
            table.note("nodes", f"{table.what} names node `{value}` twice")
        else:
            yield value


def _trunks(table: Table, name: str, names: Collection[str], scope: Scope) -> Iterator[Link]:
    for row in table.rows("links"):
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(x, str) for x in row):
            hint = 'write `links = [["spine", "infiniband-hdr x4"]]`'
            table.note("links", f"{table.what} has link `{row}`, not [switch, link]", hint)
        elif row[0] not in names or row[0] == name:
            others = [n for n in names if n != name]
            table.page.note_unknown((*table.place, "links"), "switch", row[0], others)
        elif found := table.cable("links", scope, row[1]):
            cable, count = found
            yield Link(name, row[0], cable.kind, cable.bandwidth, cable.latency, count)


def speaks_network(table: Table, key: str, cable: Cable) -> bool:
    """Whether a NIC may be plugged into this cable; noted where not."""
    if cable.kind not in NETWORK:
        hint = f"a NIC speaks {', '.join(sorted(NETWORK))}"
        table.note(key, f"{key} of {table.what} is a {cable.kind} link", hint)
    return cable.kind in NETWORK
