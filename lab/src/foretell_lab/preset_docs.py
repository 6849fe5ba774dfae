"""The presets as Markdown tables: `python -m foretell_lab.preset_docs` prints them."""

from collections.abc import Iterable, Iterator, Sequence

from foretell.cluster import read
from foretell.cluster.node import Device, Node
from foretell.cluster.read import load

_SHOWN = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")


def tables() -> str:
    """Devices, links, nodes and clusters, one table each."""
    parts = [
        "### Devices",
        "Rates in Tflop/s, dense, fp32 accumulation; memory in GB (10^9), bandwidth in GB/s.",
        "\n".join(_table(("name", "title", "memory", "GB/s", *_SHOWN, "usual node"), _devices())),
        "### Links",
        "Each way, one link; latency of one link (of one end for networks).",
        "\n".join(_table(("name", "kind", "GB/s", "latency", "switch"), _links())),
        "### Nodes",
        "`inside` is what one device sends to all others at once; `out` is what the node sends.",
        "\n".join(_table(("name", "title", "inside", "out", "$/h"), _nodes())),
        "### Clusters",
        "\n".join(_table(("name", "title", "ranks"), _clusters())),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _devices() -> Iterator[Sequence[str]]:
    for name in read.tables("devices"):
        d: Device = read.devices()[name]
        rates = (f"{d.flops[k] / 1e12:g}" if k in d.flops else "" for k in _SHOWN)
        memory, bandwidth = f"{d.memory / 1e9:.1f}", f"{d.memory_bandwidth / 1e9:g}"
        yield _names(name, "devices"), d.title, memory, bandwidth, *rates, f"`{d.node}`"


def _links() -> Iterator[Sequence[str]]:
    for name, cable in read.cables().items():
        switch = read.short(cable.switch, "s") if cable.switch else ""
        latency = read.short(cable.latency, "s")
        yield f"`{name}`", cable.kind, f"{cable.bandwidth / 1e9:g}", latency, switch


def _nodes() -> Iterator[Sequence[str]]:
    for name in read.tables("nodes"):
        node = load(name).node(0)
        price = f"{node.price:.2f}" if node.price else ""
        yield _names(name, "nodes"), node.title, _inside(node), _out(node), price


def _inside(node: Node) -> str:
    slots = tuple(range(len(node.devices)))
    if len(slots) == 1:
        return ""
    spread = node.spread(slots)
    return f"{read.short(spread.bandwidth, 'B/s')} {spread.kind}"


def _out(node: Node) -> str:
    if not node.nics:
        return ""
    out = node.exit(tuple(range(len(node.devices))))
    return f"{read.short(out.bandwidth, 'B/s')}, {len(node.nics)} x {node.nics[0].kind}"


def _clusters() -> Iterator[Sequence[str]]:
    for name in read.clusters():
        cluster = load(name)
        yield f"`{name}`", cluster.title, str(cluster.size)


def _names(name: str, what: str) -> str:
    aliases = (alias for alias, of in read.aliases(what).items() if of == name)
    return ", ".join(f"`{n}`" for n in (name, *aliases))


if __name__ == "__main__":
    print(tables(), end="")
