"""What must hold for a cluster to make sense: every device can reach every other.

Looked at once per kind of node and per switch, never per rank.
"""

from itertools import combinations

from foretell.cluster.cluster import Cluster
from foretell.cluster.node import Node
from foretell.cluster.page import Page


def check(page: Page, cluster: Cluster) -> None:
    """Note every device or node that is cut off."""
    several = len(cluster.kinds) > 1
    for i, (node, _) in enumerate(cluster.groups):
        if not _is_joined(page, i, node):
            continue
        if several and not node.nics:
            hint = 'give it one: `nic = "infiniband-hdr"` or `nic = "ethernet-25g"`'
            page.note(("node", i), f"node `{node.name}` has no nic to reach the others", hint)
        elif several:
            _check_exits(page, i, node)
    if not several or page.problems:
        return
    if cluster.switches:
        _check_switches(page, cluster)
    else:
        _check_tiers(page, cluster)


def _is_joined(page: Page, i: int, node: Node) -> bool:
    """Whether the devices of a node reach each other."""
    if _share_a_host(node):
        return True
    for a, b in combinations(range(len(node.devices)), 2):
        if node.path(a, b) is None:
            hint = "link them, or set `forwards = true` if devices pass on each other's traffic"
            message = f"device{b} of node `{node.name}` is an island: no way leads to device{a}"
            page.note(("node", i), message, hint)
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


def _check_exits(page: Page, i: int, node: Node) -> None:
    for slot in range(len(node.devices)):
        if node.nic(slot) < 0:
            hint = "link it to a nic, a PCIe switch or a socket"
            page.note(("node", i), f"device{slot} of node `{node.name}` reaches no nic", hint)
            return


def _check_tiers(page: Page, cluster: Cluster) -> None:
    last = cluster.fabric.groupings[-1]
    if len(last.out) > 1:
        hint = "add a last [[tier]] without `size`"
        count = len(last.out)
        page.note(("tier",), f"the top tier `{last.name}` leaves {count} islands of nodes", hint)


def _check_switches(page: Page, cluster: Cluster) -> None:
    homes = {n for switch in cluster.switches for n in switch.nodes}
    for n in range(len(cluster.kinds)):
        if n not in homes:
            page.note(("switch",), f"node {n} is an island: no switch names it in `nodes`")
            return
    fabric = cluster.fabric
    for s, switch in enumerate(cluster.switches):
        if switch.nodes and fabric.path(int(fabric.home[0]), s) is None:
            first = cluster.switches[int(fabric.home[0])].name
            hint = f'link them: `links = [["{first}", "…"]]`'
            message = f"switch `{switch.name}` is an island: no way leads to `{first}`"
            page.note(("switch", s), message, hint)
            return
