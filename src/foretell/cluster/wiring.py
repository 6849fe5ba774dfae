"""From a [[node]] table to a `Node`: which wires a machine has.

A few keys draw the usual shapes:

    devices   on PCIe switches (`pcie_switches`), or straight on CPU sockets (`sockets`), in order
    nvlink    every device to one NVSwitch;   mesh   every device to every other
    nics      dealt over the PCIe switches or sockets in order, `nic` being what each speaks

and `vertices`, `links` and `ports` draw any other, wire by wire.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations

from foretell.cluster.device import Device
from foretell.cluster.link import VERTICES, Link
from foretell.cluster.node import Node
from foretell.cluster.tables import MOST_INSIDE, Cable, Scope, Table, speaks_network

_ABOUT = ("preset", "count", "title", "aliases", "sources", "price", "rack", "host_memory")
_PARTS = ("device", "devices", "sockets", "pcie_switches", "nics", "vertices", "forwards")
_WIRES = ("socket_link", "pcie", "nic_pcie", "nvlink", "mesh", "nic", "links", "ports")


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
        sources={k: str(v) for key, v in table.under("sources").items() for k in key.split()},
    )


def _devices(table: Table, scope: Scope) -> tuple[Device, ...]:
    given = table.values.get("devices", 1)
    key = "devices" if isinstance(given, list) else "device"
    names = given if isinstance(given, list) else [table.values.get("device", "")]
    if names in ([""], []):
        hint = 'write `device = "a100-80"` and `devices = 8`, or `preset = "dgx-a100"`'
        table.note(key, f"{table.what} names no device", hint)
        return ()
    known = [str(name) for name in names if str(name) in scope.devices]
    for name in names:
        if str(name) not in scope.devices:
            table.page.note_unknown((*table.place, key), "device", str(name), scope.devices)
    found = tuple(scope.devices[name] for name in known)
    if len(found) < len(names):
        return ()
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
            table.page.note_unknown(place, "kind of vertex", str(kind), VERTICES[1:-1])
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
    for row in table.rows("links"):
        if not isinstance(row, list) or len(row) != 3 or not all(isinstance(x, str) for x in row):
            hint = 'write `links = [["device0", "device1", "nvlink2 x2"]]`'
            table.note("links", f"{table.what} has link `{row}`, not [from, to, link]", hint)
            continue
        strange = [end for end in row[:2] if end not in vertices]
        for end in strange:
            table.page.note_unknown((*table.place, "links"), "vertex", end, vertices)
        if row[0] == row[1]:
            table.note("links", f"{table.what} links `{row[0]}` to itself")
        elif not strange and (found := table.cable("links", scope, row[2])):
            yield _link(row[0], row[1], *found)


def _ports(table: Table, scope: Scope, vertices: Mapping[str, str]) -> Iterator[tuple[Link, Cable]]:
    """The NICs of `ports`, one by one."""
    for row in table.rows("ports"):
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(x, str) for x in row):
            hint = 'write `ports = [["nic0", "infiniband-hdr"]]`'
            table.note("ports", f"{table.what} has port `{row}`, not [nic, link]", hint)
        elif vertices.get(row[0]) != "nic":
            nics = [name for name, kind in vertices.items() if kind == "nic"]
            table.page.note_unknown((*table.place, "ports"), "nic", row[0], nics)
        else:
            found = table.cable("ports", scope, row[1])
            if found and speaks_network(table, "ports", found[0]):
                yield _link(row[0], "", *found), found[0]


def _link(a: str, b: str, cable: Cable, count: int) -> Link:
    return Link(a, b, cable.kind, cable.bandwidth, cable.latency, count)
