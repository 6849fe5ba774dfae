"""Clusters read: TOML tables checked, specs and presets looked up.

A cluster file: TOML read line by line, quantities with units, tables to devices, links and
nodes.

Quantities are as people write them: `25 GB/s`, `200 Gb/s`, `0.6 us`, `80 GiB`, `312 Tflop/s`; a
bare number is in base units. `read` and `write` are exact inverses (decimal arithmetic), and bits
(`b`) and bytes (`B`) are never confused. Every reader takes a `Table`, notes what is wrong in its
`Document` and goes on, and gives back None only where nothing sensible can be made; so one pass
over a file finds all its problems.

Clusters from what a person writes: a preset's name with options, or a file.

    load("a100-80")                              one device
    load("a100-80:gpus=64")                      64 of them on the nodes they usually stand in
    load("dgx-a100:nodes=8,oversubscription=2")  a node preset, several times, behind thin uplinks
    load("abci:nodes=16")                        a cluster preset, smaller
    load("lab.toml")                             a file, with options after it or without

`validate` tells all that is wrong with a file at once. Presets are read from `presets/` when first
asked for: devices and links are values, nodes and clusters stay tables, to be changed before they
are built.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import cache
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from foretell import spec
from foretell.cluster import cluster as whole
from foretell.cluster.cluster import Calibration, Cluster, Switch, Tier
from foretell.cluster.node import FORMATS, KINDS, NETWORK, VERTICES, Device, Link, Node
from foretell.errors import InputError, unknown
from foretell.io import is_there, limits, parse_toml, read_text

T = TypeVar("T")
_PREFIX = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "m": -3, "u": -6, "µ": -6, "n": -9}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4}
_DIGITS = r"\d+(?:_\d+)*"
_NUMBER = rf"[-+]?(?:(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:e[-+]?\d+)?|nan|inf)"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*([^\s\d._]\S*)?\s*", re.I)


class _Unit(NamedTuple):
    shown: Sequence[str]  # prefixes it is written with, the largest first
    example: str
    spellings: Mapping[str, Decimal] = {}  # other words for it, and how many of it each is


_BIT = Decimal(1) / 8
_UNITS = {
    "B": _Unit(("T", "G", "M", "k", ""), "80 GB"),
    "B/s": _Unit(("T", "G", "M", "k", ""), "25 GB/s` or `200 Gb/s", {"b/s": _BIT, "bit/s": _BIT}),
    "s": _Unit(("", "m", "u", "n"), "1.5 us"),
    "Hz": _Unit(("G", "M", "k", ""), "1.41 GHz"),
    "W": _Unit(("",), "400 W"),
    "flop/s": _Unit(
        ("P", "T", "G", "M", ""), "312 Tflop/s", {"FLOPS": Decimal(1), "op/s": Decimal(1)}
    ),
    "$/h": _Unit(("",), "32.77 $/h", {"USD/h": Decimal(1)}),
}
Place = tuple[str | int, ...]  # ("node", 2, "nic"): the key `nic` of the third [[node]]
_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=(.*)")
_LISTED = 100  # problems of a file that are listed at once
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")
MOST = 2**20  # ranks or nodes a file may ask for: beyond it is a slip, not a cluster
MOST_INSIDE = 1024  # devices, switches or NICs in one node
DEVICE_TEXTS = ("title", "vendor", "arch", "bus", "node")
DEVICE_UNITS = {
    "memory": "B", "memory_bandwidth": "B/s", "clock": "Hz", "l2": "B", "launch": "s", "floor": "s",
    "watts": "W", "staged": "B/s", "price": "$/h",
}  # fmt: skip
# What a device is taken to be that says no more and is like no other.
_PLAIN: dict[str, Any] = {"vendor": "", "arch": "", "units": 1, "clock": 1e9, "l2": 4e6}
_PLAIN |= {name: getattr(Device, name) for name in ("launch", "floor", "watts", "staged", "price")}
_PLAIN |= {name: getattr(Device, name) for name in ("bus", "node")}
_DEVICE = {f.name for f in fields(Device)} - {"name", "timed"} | {"like", "aliases"}
_ABOUT = ("preset", "count", "title", "aliases", "sources", "price", "rack", "host_memory")
_PARTS = ("device", "devices", "sockets", "pcie_switches", "nics", "vertices", "forwards")
_WIRES = ("socket_link", "pcie", "nic_pcie", "nvlink", "mesh", "nic", "links", "ports")


def read_cluster(value: object, unit: str) -> float:
    """The number of base units a person meant; ValueError says what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"is {value!r}, not a quantity in {unit}")
    if not isinstance(value, str):
        return float(value)
    match = _QUANTITY.fullmatch(value)
    if not match:
        raise ValueError(f"is `{value}`, not a quantity in {unit}")
    if len(value) > 64 or ("e" in match[1] and len(match[1].lower().partition("e")[2]) > 4):
        raise ValueError(f"is `{value[:40]}`, not a quantity in {unit}")
    if not match[2]:
        return float(match[1])
    scale = _scale(match[2], unit)
    if scale is None:
        raise ValueError(f"is `{value}`: `{match[2]}` is not a unit of {unit}")
    return float(Decimal(match[1].replace("_", "")) * scale)


def _scale(text: str, unit: str) -> Decimal | None:
    for spelling, size in {unit: Decimal(1), **_UNITS[unit].spellings}.items():
        if not text.endswith(spelling):
            continue
        prefix = text.removesuffix(spelling)
        if prefix in _PREFIX:
            return size * Decimal(10) ** _PREFIX[prefix]
        if prefix in _BINARY and unit in ("B", "B/s"):
            return size * Decimal(1024) ** _BINARY[prefix]
    return None


def write(value: float, unit: str) -> str:
    """The exact text of a quantity, in the largest unit it fills once; `read` inverts it."""
    exact = Decimal(repr(value))
    if unit == "B" and value and value % 2**20 == 0:
        prefix = next(p for p in ("Ti", "Gi", "Mi") if value % 1024 ** _BINARY[p] == 0)
        return f"{int(value) // 1024 ** _BINARY[prefix]} {prefix}{unit}"
    prefix = next((p for p in _UNITS[unit].shown if abs(exact) >= Decimal(10) ** _PREFIX[p]), "")
    scaled = exact / Decimal(10) ** _PREFIX[prefix]
    return f"{scaled.normalize():f} {prefix}{unit}"


def short(value: float, unit: str) -> str:
    """The same for a reader: three significant digits, not to be read back."""
    prefix = next((p for p in _UNITS[unit].shown if abs(value) >= 10.0 ** _PREFIX[p]), "")
    scaled = value / 10.0 ** _PREFIX[prefix]
    return f"{scaled:.3g} {prefix}{unit}" if abs(scaled) < 1000 else f"{scaled:.0f} {prefix}{unit}"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a file: what, where, and what would help."""

    message: str
    line: int = 0  # counted from 1; 0 where it is not known
    hint: str = ""
    file: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.message}" if where else self.message


@dataclass
class Document:
    """A TOML text being read: its values, the line of each key, and the problems found so far."""

    file: str
    values: dict[str, Any]
    lines: Mapping[Place, int]
    noted: dict[Problem, None] = field(default_factory=dict)

    @property
    def problems(self) -> list[Problem]:
        """What was found, in the order it was."""
        return list(self.noted)

    def note(self, place: Place, message: str, hint: str = "") -> None:
        """Remember a problem with the value at a place, once."""
        self.noted.setdefault(Problem(message, self.line(place), hint, self.file))

    def note_unknown(self, place: Place, what: str, name: str, known: Any) -> None:
        """Remember an unknown name, with the nearest known one."""
        error = unknown(what, name, known)
        self.note(place, error.message, error.hint)

    def line(self, place: Place) -> int:
        """The line of a key, or of the nearest table around it."""
        while place and place not in self.lines:
            if (*place, 0) in self.lines:  # the first of [[place]]
                return self.lines[*place, 0]
            place = place[:-1]
        return self.lines.get(place, 0)


def parse(text: str, file: str = "") -> Document:
    """Read a TOML text; a text that is not TOML becomes a document with that one problem."""
    if not text.strip():
        hint = "a cluster file needs at least one [[node]] table; see docs/reference/clusters.md"
        return Document(file, {}, {}, {Problem("the file is empty", 0, hint, file): None})
    try:
        return Document(file, parse_toml(text, file or "the cluster", finite=False), _lines(text))
    except InputError as error:
        return Document(file, {}, {}, {Problem(error.message, 0, error.hint, file): None})
    except tomllib.TOMLDecodeError as error:
        return Document(file, {}, {}, {_not_toml(text, str(error), file): None})


def _not_toml(text: str, error: str, file: str) -> Problem:
    found = _AT_LINE.search(error)
    last = len(text.splitlines())
    line = int(found[1]) if found and found[1] else last
    what = _AT_LINE.sub("", error).strip()
    cut = line >= last
    hint = "is the file cut off here?" if cut else "the file must be TOML: `key = value` lines"
    return Problem(f"not TOML: {what[:1].lower()}{what[1:]}", line, hint, file)


def fail(problems: list[Problem], file: str) -> InputError:
    """One error that tells every problem of a file."""
    first = problems[0]
    if len(problems) == 1:
        return InputError(str(first), hint=first.hint)
    listed = in_order(problems)[:_LISTED]
    rows = "\n".join(f"  {p}" + (f" ({p.hint})" if p.hint else "") for p in listed)
    rows += f"\n  and {len(problems) - _LISTED} more" * (len(problems) > _LISTED)
    return InputError(f"{len(problems)} problems in {file or 'the cluster'}:\n{rows}")


def in_order(problems: list[Problem]) -> list[Problem]:
    """By line; those without one last."""
    return sorted(problems, key=lambda p: (not p.line, p.line))


def _lines(text: str) -> dict[Place, int]:
    """The line of every table and key; what stands inside a value of several lines is skipped."""
    found: dict[Place, int] = {}
    here: Place = ()
    tables: dict[Place, int] = {}
    quoted, depth = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        outside = not quoted and not depth
        header, key = (_HEADER.match(line), _KEY.match(line)) if outside else (None, None)
        if header:
            here = _table(_dotted(header[2]), header[1] == "[[", tables)
            found.setdefault(here, number)
            continue
        if key:
            found.setdefault(here + _dotted(key[1]), number)
        quoted = _still_quoted(line, quoted)
        depth = max(0, depth + _opened(key[2] if key else line)) if not quoted else depth
    return found


def _still_quoted(line: str, quoted: str) -> str:
    """The triple quote a text is in after this line, if any."""
    for mark in re.findall(r'"""|\'\'\'', line):
        quoted = "" if quoted == mark else quoted or mark
    return quoted


def _opened(line: str) -> int:
    """How many more brackets a line opens than it closes, strings and comments apart."""
    bare = re.sub(r"""\"[^\"]*\"|'[^']*'|#.*""", "", line)
    return sum(bare.count(c) for c in "[{") - sum(bare.count(c) for c in "]}")


def _table(path: Place, many: bool, tables: dict[Place, int]) -> Place:
    """The place of a table header; each [[name]] opens the next of its kind."""
    place: Place = ()
    for i, part in enumerate(path):
        place += (part,)
        if many and i == len(path) - 1:
            tables[place] = tables.get(place, -1) + 1
        if place in tables:
            place += (tables[place],)
    return place


def _dotted(text: str) -> Place:
    parts = re.findall(r"\"([^\"]*)\"|'([^']*)'|([^.\s\"']+)", text)
    return tuple(a or b or c for a, b, c in parts)


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
    """One table of a document, with a name for messages."""

    document: Document
    place: Place
    values: Mapping[str, Any]
    what: str  # "device `a100`"

    def note(self, key: str, message: str, hint: str = "") -> None:
        """Remember a problem with one key."""
        self.document.note((*self.place, key), message, hint)

    def allow(self, known: Collection[str]) -> None:
        """Note every key that has no meaning here."""
        for key in self.values:
            if key not in known:
                self.document.note_unknown((*self.place, key), f"key in {self.what}", key, known)

    def number(self, key: str, unit: str, default: float | None = None) -> float:
        """A quantity above zero, or zero where that is the default; no default: it is needed."""
        if key not in self.values:
            if default is None:
                hint = f'write `{key} = "… {unit}"`'
                self.note(key, f"{self.what} has no {key.replace('_', ' ')}", hint)
            return default or 0.0
        try:
            value = read_cluster(self.values[key], unit)
        except ValueError as error:
            self.note(key, f"{key} of {self.what} {error}", f"write it as `{_UNITS[unit].example}`")
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

    def _of(self, key: str, kind: type[T], default: T, sort: str) -> T:
        value = self.values.get(key, default)
        if isinstance(value, kind):
            return value
        self.note(key, f"{key} of {self.what} is `{value}`, not {sort}")
        return default

    def text(self, key: str, default: str = "") -> str:
        """A piece of text."""
        return self._of(key, str, default, "text in quotes")

    def flag(self, key: str) -> bool:
        """true or false."""
        return self._of(key, bool, False, "true or false")

    def rows(self, key: str) -> list[Any]:
        """A list."""
        return self._of(key, list, [], "a list")

    def under(self, key: str) -> Mapping[str, Any]:
        """A table inside this one."""
        return self._of(key, dict, {}, "a table")

    def texts(self, key: str, form: str, example: str) -> Iterator[list[str]]:
        """The rows of a list that are as many texts as the form has words."""
        for row in self.rows(key):
            if isinstance(row, list) and [type(x) for x in row] == [str] * len(form.split()):
                yield row
                continue
            hint = f"write `{key} = [[{example}]]`"
            self.note(key, f"{self.what} has {key[:-1]} `{row}`, not [{form}]", hint)

    def cable(self, key: str, scope: Scope, text: str | None = None) -> tuple[Cable, int] | None:
        """The cable a text like `nvlink3 x12` names, and how many."""
        value = self.text(key) if text is None else text
        name, _, times = value.partition(" ")
        count = times.strip().removeprefix("x") or "1"
        if name not in scope.cables:
            self.document.note_unknown((*self.place, key), "link", name, scope.cables)
            return None
        if not count.isdecimal() or not 1 <= int(count) <= MOST:
            self.note(key, f"`{value}` in {self.what}: `{times}` is not a count like `x2`")
            return None
        return scope.cables[name], int(count)


def read_cable(table: Table) -> Cable | None:
    """A [link.NAME] table."""
    table.allow(("kind", "bandwidth", "latency", "switch", "sources", "title"))
    kind = table.text("kind", "ethernet")
    if kind not in KINDS:
        table.document.note_unknown((*table.place, "kind"), "kind of link", kind, KINDS)
        return None
    times = (table.number(key, "s", 0.0) for key in ("latency", "switch"))
    return Cable(kind, table.number("bandwidth", "B/s"), *times)


def read_device(table: Table, name: str, known: Mapping[str, Device]) -> Device | None:
    """A [device.NAME] table; `like` takes what it leaves out from another device."""
    table.allow(_DEVICE)
    base = None
    if like := table.text("like"):
        if like not in known:
            table.document.note_unknown((*table.place, "like"), "device", like, known)
            return None
        base = known[like]
    defaults: dict[str, Any] = vars(base) if base else {"title": name, **_PLAIN}
    given: dict[str, Any] = {key: table.text(key, defaults[key]) for key in DEVICE_TEXTS}
    given |= {key: table.number(key, unit, defaults.get(key)) for key, unit in DEVICE_UNITS.items()}
    units, flops = table.whole("units", defaults["units"]), _flops(table, base)
    return Device(name, units=units, flops=flops, sources=_sources(table), **given)


def _flops(table: Table, base: Device | None) -> dict[str, float]:
    rates = dict(base.flops) if base else {}
    inner = Table(table.document, (*table.place, "flops"), table.under("flops"), table.what)
    for key in inner.values:
        if key not in FORMATS:
            inner.document.note_unknown((*inner.place, key), "number format", key, FORMATS)
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 <= value <= 1e6:
        table.note(key, f"{key} of {table.what} is `{value}`: it must be between 1e-6 and 1e6")
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
    for row in table.texts("links", "switch, link", '"spine", "infiniband-hdr x4"'):
        if row[0] not in names or row[0] == name:
            others = [n for n in names if n != name]
            table.document.note_unknown((*table.place, "links"), "switch", row[0], others)
        elif found := table.cable("links", scope, row[1]):
            yield _link(name, row[0], *found)


def speaks_network(table: Table, key: str, cable: Cable) -> bool:
    """Whether a NIC may be plugged into this cable; noted where not."""
    if cable.kind not in NETWORK:
        hint = f"a NIC speaks {', '.join(sorted(NETWORK))}"
        table.note(key, f"{key} of {table.what} is a {cable.kind} link", hint)
    return cable.kind in NETWORK


def read_node(table: Table, name: str, scope: Scope) -> Node | None:
    """A kind of machine; None where its devices are not known."""
    table.allow((*_ABOUT, *_PARTS, *_WIRES))
    devices = _devices(table, scope)
    if not devices:
        return None
    vertices = _vertices(table, devices)
    links = [
        *_direct(table, scope, len(devices)),
        *_host(table, scope, devices),
        *_given(table, scope, vertices),
    ]
    ports = [*_nics(table, scope), *_ports(table, scope, vertices)]
    return Node(
        name=name,
        title=table.text("title", name),
        devices=devices,
        vertices=vertices,
        links=tuple(links),
        nics=tuple(port for port, _ in ports),
        forwards=table.flag("forwards"),
        rack=table.whole("rack", 0, least=0),
        hop=max((cable.switch for _, cable in ports), default=0.0),
        host_memory=table.number("host_memory", "B", 0.0),
        price=table.number("price", "$/h", 0.0),
        sources=_sources(table),
    )


def _devices(table: Table, scope: Scope) -> tuple[Device, ...]:
    given = table.values.get("devices", 1)
    key = "devices" if isinstance(given, list) else "device"
    names = given if isinstance(given, list) else [table.values.get("device", "")]
    if names in ([""], []):
        hint = 'write `device = "a100-80"` and `devices = 8`, or `preset = "dgx-a100"`'
        table.note(key, f"{table.what} names no device", hint)
        return ()
    strange = [str(name) for name in names if str(name) not in scope.devices]
    for name in strange:
        table.document.note_unknown((*table.place, key), "device", name, scope.devices)
    if strange:
        return ()
    found = tuple(scope.devices[str(name)] for name in names)
    return found if key == "devices" else found * table.whole("devices", 1, most=MOST_INSIDE)


def _shape(table: Table) -> tuple[int, int, int]:
    """How many sockets, PCIe switches and NICs."""
    sockets = table.whole("sockets", 1, least=0, most=MOST_INSIDE)
    switches = table.whole("pcie_switches", 0, least=0, most=MOST_INSIDE)
    nics = table.whole("nics", 1 if "nic" in table.values else 0, least=0, most=MOST_INSIDE)
    if nics and "nic" not in table.values:
        table.note("nics", f"{table.what} has {nics} nics of no kind", 'write `nic = "…"`')
        nics = 0
    return sockets, switches, nics


def _vertices(table: Table, devices: tuple[Device, ...]) -> dict[str, str]:
    """Name -> kind, devices first."""
    sockets, switches, nics = _shape(table)
    found = {f"device{i}": "device" for i in range(len(devices))}
    if "nvlink" in table.values:
        found["nvswitch"] = "nvswitch"
    found |= {f"pcie{i}": "pcie" for i in range(switches)}
    found |= {f"cpu{i}": "cpu" for i in range(sockets)}
    found |= {f"nic{i}": "nic" for i in range(nics)}
    for name, kind in table.under("vertices").items():
        if kind not in VERTICES[1:-1]:
            place = (*table.place, "vertices", name)
            table.document.note_unknown(place, "kind of vertex", str(kind), VERTICES[1:-1])
        found[name] = str(kind)
    return found


def _direct(table: Table, scope: Scope, size: int) -> Iterator[Link]:
    """Wires made for devices: to an NVSwitch, or each to each."""
    if "nvlink" in table.values and (found := table.cable("nvlink", scope)):
        cable, count = found
        for i in range(size):  # two of these make one hop between devices
            half = cable.latency / 2
            yield Link(f"device{i}", "nvswitch", "nvswitch", cable.bandwidth, half, count)
    if "mesh" in table.values and (found := table.cable("mesh", scope)):
        cable, count = found
        for i, j in combinations(range(size), 2):
            yield _link(f"device{i}", f"device{j}", cable, count)


def _host(table: Table, scope: Scope, devices: tuple[Device, ...]) -> Iterator[Link]:
    """Devices and NICs to PCIe switches or sockets, switches to sockets, sockets to each other."""
    sockets, switches, nics = _shape(table)
    if not sockets and not switches:
        return
    holders = [f"pcie{i}" for i in range(switches)] or [f"cpu{i}" for i in range(sockets)]
    for i, device in enumerate(devices):
        text = table.text("pcie", device.bus)
        if found := table.cable("pcie", scope, text):
            yield _link(f"device{i}", holders[i * len(holders) // len(devices)], *found)
    bus = table.text("pcie", _bus(devices, scope))
    if switches and sockets and (found := table.cable("pcie", scope, bus)):
        for i in range(switches):
            yield _link(f"pcie{i}", f"cpu{i * sockets // switches}", *found)
    if nics and (found := table.cable("nic_pcie", scope, table.text("nic_pcie", bus))):
        for i in range(nics):
            yield _link(f"nic{i}", holders[i * len(holders) // nics], *found)
    between = table.text("socket_link", "upi")
    if sockets > 1 and between != "none" and (found := table.cable("socket_link", scope, between)):
        for i, j in combinations(range(sockets), 2):
            yield _link(f"cpu{i}", f"cpu{j}", *found)


def _bus(devices: tuple[Device, ...], scope: Scope) -> str:
    """What switches and NICs are plugged in with: the PCIe of the first device that has one."""
    buses = (device.bus for device in devices)
    return next((b for b in buses if b in scope.cables and scope.cables[b].kind == "pcie"), "pcie3")


def _nics(table: Table, scope: Scope) -> Iterator[tuple[Link, Cable]]:
    _, _, nics = _shape(table)
    if nics and (found := table.cable("nic", scope)) and speaks_network(table, "nic", found[0]):
        for i in range(nics):
            yield _link(f"nic{i}", "", *found), found[0]


def _given(table: Table, scope: Scope, vertices: Mapping[str, str]) -> Iterator[Link]:
    """The wires of `links`, one by one."""
    for row in table.texts("links", "from, to, link", '"device0", "device1", "nvlink2 x2"'):
        strange = [end for end in row[:2] if end not in vertices]
        for end in strange:
            table.document.note_unknown((*table.place, "links"), "vertex", end, vertices)
        if row[0] == row[1]:
            table.note("links", f"{table.what} links `{row[0]}` to itself")
        elif not strange and (found := table.cable("links", scope, row[2])):
            yield _link(row[0], row[1], *found)


def _ports(table: Table, scope: Scope, vertices: Mapping[str, str]) -> Iterator[tuple[Link, Cable]]:
    """The NICs of `ports`, one by one."""
    for row in table.texts("ports", "nic, link", '"nic0", "infiniband-hdr"'):
        if vertices.get(row[0]) != "nic":
            nics = [name for name, kind in vertices.items() if kind == "nic"]
            table.document.note_unknown((*table.place, "ports"), "nic", row[0], nics)
        else:
            found = table.cable("ports", scope, row[1])
            if found and speaks_network(table, "ports", found[0]):
                yield _link(row[0], "", *found), found[0]


def _link(a: str, b: str, cable: Cable, count: int) -> Link:
    return Link(a, b, cable.kind, cable.bandwidth, cable.latency, count)


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
