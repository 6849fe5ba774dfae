"""Measures links and cores of this machine with pools of ranks; writes them and a cluster file."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.io import write_text
from foretell.pytorch.ranks import links
from foretell.pytorch.ranks.pin import cores_of_ranks
from foretell.pytorch.ranks.pool import WORKER, Pool
from foretell.pytorch.ranks.wires import LOOPBACK, Network, network, refusal

MACHINE, LOG = "machine.json", "ranks.log"
LINKS, CLUSTER = "links.csv", "cluster.toml"
_L2 = 32 * 2**20  # bytes, not read from the processor: a server's usual last-level cache
OnProgress = Callable[..., None]  # words and, where it is known, the share that is done
Setup = tuple[int, str]  # ranks, and the name of the network between them


@dataclass
class Pools:
    """Pools of ranks, opened when they are needed, and the folder that results go to."""

    folder: Path
    stack: ExitStack = field(default_factory=ExitStack)
    pools: dict[tuple[int, str], Pool] = field(default_factory=dict)
    pin: bool = False
    worker: str = WORKER

    def pool(self, ranks: int, wanted: Network) -> Pool:
        """Ranks on a network, shaped as it says."""
        key = (ranks, wanted.name if wanted.wires == "tap" else wanted.wires)
        found = self.pools.get(key)
        if found is None or found.is_broken:
            made = Pool(ranks, wanted, self.folder / LOG, pin=self.pin, worker=self.worker)
            found = self.pools[key] = self.stack.enter_context(made)
        found.shape(wanted)
        return found


def refused(networks: Iterable[str]) -> str:
    """Why not all of these networks can be had here, or nothing."""
    return refusal() if any(network(name).wires != "lo" for name in networks) else ""


def measure_machine(pools: Pools, setups: Collection[Setup], tell: OnProgress) -> dict[str, Any]:
    """Links and cores of every number of ranks and network."""
    path = pools.folder / MACHINE
    kept = (len(p) for ranks, _ in setups if pools.pin for p in cores_of_ranks(ranks))
    machine = links.this_machine() | {
        "pinned": pools.pin,
        "each": min(kept, default=0),
    }  # processors
    found = read(path) or {"machine": machine, "links": [], "cores": [], "fits": []}
    if "ceilings" not in found:
        found["ceilings"] = pools.pool(1, network(LOOPBACK)).ask({"do": "ceilings"})[0]
    for ranks, name in sorted(set(setups)):
        if not any(row["ranks"] == ranks for row in found["cores"]):
            tell(f"cores of {ranks} ranks")
            found["cores"].append(links.measure_cores(pools.pool(ranks, network(name))))
        known = any((r["ranks"], r["network"]) == (ranks, name) for r in found["links"])
        if ranks > 1 and not known:
            pool = pools.pool(ranks, network(name))
            found["links"] += links.measure_links(pool, name, tell=tell)
            found.setdefault("beside", []).append(links.measure_beside(pool, name))
            if "hooks" not in found:
                found["hooks"] = links.measure_hooks(pool)
        found["fits"] = links.fit_links(found["links"])
        write(path, found)
    return found


def read(path: Path) -> Any:
    """A JSON file of the folder, None where it is not there."""
    return json.loads(path.read_text()) if path.exists() else None


def write(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=1))


def write_links(folder: Path, machine: dict[str, Any]) -> Path:
    """Every message that was measured, one a row."""
    made = io.StringIO()
    writer = csv.DictWriter(made, list(machine["links"][0]))
    writer.writeheader()
    writer.writerows(machine["links"])
    path = folder / LINKS
    write_text(path, made.getvalue())
    return path


def write_cluster(folder: Path, machine: dict[str, Any], network: str, ranks: int) -> Path:
    """Ranks of one processor each, behind links as they were measured."""
    fits = {(f["network"], f["ranks"]): f for f in machine["fits"]}
    if (network, ranks) not in fits:
        raise InputError(f"no measurement of {ranks} ranks over {network}", hint="foretell bench")
    path = folder / CLUSTER
    rates = machine.get("ceilings", {})
    write_text(path, cluster_text(machine["machine"], fits[network, ranks], rates, network))
    return path


def cluster_text(
    machine: dict[str, Any], fit: dict[str, Any], rates: dict[str, float], network: str = LOOPBACK
) -> str:
    """A cluster file that `foretell.cluster` reads.

    A link's latency is half of α over the 2(n−1) steps of a ring, since a message crosses two.
    """
    ranks = fit["ranks"]
    lines = [
        f"# {machine['cpu']}, {machine['cores']} cores, as measured by `foretell bench`.",
        'name = "this-machine"',
        f"title = {json.dumps(f'{ranks} ranks over {network}')}",
        "",
        '[device."this-cpu"]',
        f"title = {json.dumps(machine['cpu'] or 'CPU')}",
        'vendor = "cpu"',
        'arch = "x86"',
        f'memory = "{os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")} B"',
        f'memory_bandwidth = "{rates.get("bytes", 1e10):.4g} B/s"',
        f"units = {machine['cores']}",
        f'clock = "{_clock():.4g} Hz"',
        f'l2 = "{_L2} B"',
        f'flops = {{ fp32 = "{rates.get("fp32", 5e10):.4g} flop/s" }}',
        'sources."memory_bandwidth flops" = "foretell bench, on this machine"',
        "",
        "[link.measured]",
        f'kind = "{"loopback" if network == "loopback" else "ethernet"}"',
        f'bandwidth = "{fit["bandwidth"]:.4g} B/s"',
        f'latency = "{max(fit["latency"], 1e-7) / (4 * max(ranks - 1, 1)):.4g} s"',
        "",
        "[[node]]",
        'title = "a rank"',
        f"count = {ranks}",
        'devices = ["this-cpu"]',
        "sockets = 1",
        'nic = "measured"',
    ]
    return "\n".join(lines) + "\n"


def _clock() -> float:
    """Hertz of a core as the kernel tells them; a server's usual base clock where it does not."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return 1e6 * max(clocks) if clocks else 2e9
