"""The machines: devices, links, nodes and clusters as values, and presets of many.

>>> from foretell.cluster import load
>>> cluster = load("dgx-a100:nodes=2")
>>> cluster.size, cluster.bandwidth(0, 1) / 1e9, cluster.bandwidth(0, 8) / 1e9
(16, 300.0, 24.0)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.cluster.cluster import Calibration as Calibration
    from foretell.cluster.cluster import Cluster as Cluster
    from foretell.cluster.levels import Level as Level
    from foretell.cluster.levels import Tree as Tree
    from foretell.cluster.node import Device as Device
    from foretell.cluster.node import Link as Link
    from foretell.cluster.node import Node as Node
    from foretell.cluster.read import load as load
    from foretell.cluster.read import names as names
    from foretell.cluster.read import validate as validate
    from foretell.cluster.toml import Problem as Problem
    from foretell.cluster.topology import Switch as Switch
    from foretell.cluster.topology import Tier as Tier
    from foretell.cluster.topology import Topology as Topology

_WHERE = {
    "Calibration": "cluster",
    "Cluster": "cluster",
    "Device": "node",
    "Level": "levels",
    "Link": "node",
    "Node": "node",
    "Problem": "toml",
    "Switch": "topology",
    "Tier": "topology",
    "Topology": "topology",
    "Tree": "levels",
    "load": "read",
    "names": "read",
    "validate": "read",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: importing the package stays quick."""
    if name not in _WHERE:
        raise AttributeError(f"module `foretell.cluster` has no `{name}`")
    return getattr(import_module(f"foretell.cluster.{_WHERE[name]}"), name)
