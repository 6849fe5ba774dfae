"""A preset with options, as the file it stands for.

    dgx-a100:nodes=8,oversubscription=2     →  a [[node]] table with `count = 8`, and tiers

Options: nodes, gpus, device, nic, nics, rack (nodes on a leaf switch), oversubscription (of the
uplinks of leaves; of every single node where all of them fit one leaf).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from foretell import spec
from foretell.cluster import preset
from foretell.cluster.cluster import Cluster
from foretell.cluster.tables import MOST
from foretell.errors import InputError, unknown


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
    if table := preset.named("clusters", name):
        return table
    if preset.named("nodes", name):
        return {"node": [{"preset": name}]}
    if device := preset.devices().get(name):
        return {"node": [{"preset": device.node, "device": name}]}
    raise unknown("cluster, node or device preset", name, preset.names())


def options(given: Mapping[str, str]) -> Options:
    """The options of a spec, all above zero."""
    found = Options.of(given)
    for key in ("nodes", "gpus", "nics", "rack", "oversubscription"):
        value = getattr(found, key)
        if value is not None and not 0 < value <= MOST:
            raise InputError(f"option `{key}` is `{spec.write(value)}`, not a number above zero")
    return found


def one(name: str, options: Options) -> Options:
    """The name of a device alone is one device; with `gpus` or `nodes`, that many."""
    is_device = not preset.named("clusters", name) and not preset.named("nodes", name)
    unsaid = options.gpus is None and options.nodes is None
    return replace(options, gpus=1) if is_device and unsaid else options


def changed(table: Mapping[str, Any], options: Options, text: str) -> dict[str, Any]:
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
    devices = _behind(nodes[0]).get("devices", 1)
    return -(-options.gpus // (len(devices) if isinstance(devices, list) else devices))


def _behind(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A [[node]] table with its preset behind it, unread."""
    return {**preset.node(entry["preset"]), **entry} if "preset" in entry else entry


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
    rack = options.rack or _behind(table["node"][0]).get("rack", count)
    if rack >= count and thin is not None:
        rack = 1  # all nodes share one leaf: what is thin is each node's own uplink
    if rack >= count:
        return [{"name": "leaf"}]
    leaf = {"name": "leaf", "size": rack, "oversubscription": thin or 1.0}
    return [leaf, {"name": "spine"}]


def ranked(cluster: Cluster, options: Options, text: str) -> Cluster:
    """Only as many ranks as asked for: nodes filled in order, or evenly where both are given."""
    gpus = options.gpus
    if gpus is None or gpus == cluster.size:
        return cluster
    if gpus > cluster.size:
        hint = f"it has {cluster.size} devices on {cluster.num_nodes} nodes"
        raise InputError(f"`{text}` asks for {gpus} gpus, more than there are", hint=hint)
    if options.nodes is None:
        return cluster.subset(range(gpus))
    each, left = divmod(gpus, options.nodes)
    if left:
        hint = f"{gpus} gpus do not divide over {options.nodes} nodes"
        raise InputError(f"`{text}` would leave nodes uneven", hint=hint)
    return cluster.subset(np.flatnonzero(cluster.slots < each).tolist())
