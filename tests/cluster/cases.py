"""Random clusters for the tests of this room: small, mixed, and always sound."""

from typing import Any

from hypothesis import strategies as st

from foretell.cluster import Cluster
from foretell.cluster.read import Document, read

_DEVICES = ("v100-16", "p100", "1080ti", "a100-80", "mi250")
_NICS = ("infiniband-edr", "infiniband-hdr x2", "ethernet-10g", "roce-100g")


def built(values: dict[str, Any]) -> Cluster:
    """The cluster of a file given as values."""
    document = Document("test", values, {})
    cluster = read(document)
    assert cluster is not None, document.problems
    return cluster


@st.composite
def node_tables(draw: st.DrawFn) -> dict[str, Any]:
    """One [[node]] table: any mix of sockets, PCIe switches, NVLink, and NICs."""
    size = draw(st.integers(1, 5))
    table: dict[str, Any] = {
        "count": draw(st.integers(1, 4)),
        "sockets": draw(st.integers(1, 2)),
        "pcie_switches": draw(st.integers(0, 2)),
        "nics": draw(st.integers(1, 3)),
        "nic": draw(st.sampled_from(_NICS)),
    }
    if draw(st.booleans()):
        table["devices"] = [draw(st.sampled_from(_DEVICES)) for _ in range(size)]
    else:
        table |= {"device": draw(st.sampled_from(_DEVICES)), "devices": size}
    joined = draw(st.sampled_from(("none", "nvlink", "mesh", "links")))
    if joined in ("nvlink", "mesh"):
        table[joined] = draw(st.sampled_from(("nvlink2 x2", "nvlink3 x12", "xgmi-mi250")))
    elif joined == "links" and size > 1:
        pairs = [(i, j) for i in range(size) for j in range(i)]
        chosen = draw(st.lists(st.sampled_from(pairs), unique=True))
        table["links"] = [[f"device{i}", f"device{j}", "nvlink2 x2"] for i, j in chosen]
    return table


@st.composite
def cluster_tables(draw: st.DrawFn) -> dict[str, Any]:
    """A whole file, with or without tiers."""
    values: dict[str, Any] = {"node": draw(st.lists(node_tables(), min_size=1, max_size=3))}
    if draw(st.booleans()):
        lower = [
            {
                "name": f"tier{i}",
                "size": draw(st.integers(1, 4)),
                "oversubscription": draw(st.sampled_from((1, 1.5, 3))),
                "latency": "0.2 us",
            }
            for i in range(draw(st.integers(0, 2)))
        ]
        values["tier"] = [*lower, {"name": "spine"}]
    return values


def clusters() -> st.SearchStrategy[Cluster]:
    """Any sound small cluster."""
    return cluster_tables().map(built)


@st.composite
def clusters_and_ranks(draw: st.DrawFn, least: int = 1) -> tuple[Cluster, list[int]]:
    """A cluster and some of its ranks, in any order."""
    cluster = draw(clusters().filter(lambda c: c.size >= least))
    ranks = draw(
        st.lists(st.integers(0, cluster.size - 1), min_size=least, unique=True, max_size=12)
    )
    return cluster, ranks
