"""What bench found, as files: a cluster that predictions can be made on, and its messages."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

from foretell.errors import InputError

LINKS, CLUSTER = "links.csv", "cluster.toml"
_L2 = 32 * 2**20  # bytes: nobody asked the processor; a server's usual last-level cache


def write_links(folder: Path, machine: dict[str, Any]) -> Path:
    """Every message that was measured, one a row."""
    path = folder / LINKS
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(machine["links"][0]))
        writer.writeheader()
        writer.writerows(machine["links"])
    return path


def write_cluster(folder: Path, machine: dict[str, Any], network: str, ranks: int) -> Path:
    """Ranks of one processor each, behind links as they were measured; `foretell.cluster` reads it.

    A link's latency is half of α over the 2(n−1) steps of a ring, since a message crosses two.
    """
    fits = {(f["network"], f["ranks"]): f for f in machine["fits"]}
    if (network, ranks) not in fits:
        raise InputError(f"nobody measured {ranks} ranks over {network}", hint="foretell bench")
    fit, rates = fits[network, ranks], machine.get("ceilings", {})
    path = folder / CLUSTER
    told = machine["machine"]
    lines = [
        f"# {told['cpu']}, {told['cores']} cores, as measured by `foretell bench`.",
        'name = "this-machine"',
        f"title = {json.dumps(f'{ranks} ranks over {network}')}",
        "",
        '[device."this-cpu"]',
        f"title = {json.dumps(told['cpu'] or 'CPU')}",
        'vendor = "cpu"',
        'arch = "x86"',
        f'memory = "{_memory():.0f} B"',
        f'memory_bandwidth = "{rates.get("bytes", 1e10):.4g} B/s"',
        f"units = {told['cores']}",
        f'clock = "{_clock():.4g} Hz"',
        f'l2 = "{_L2} B"',
        f'flops = {{ fp32 = "{rates.get("fp32", 5e10):.4g} flop/s" }}',
        'sources."memory_bandwidth flops" = "foretell bench, on this machine"',
        "",
        "[link.measured]",
        f'kind = "{"loopback" if network == "loopback" else "ethernet"}"',
        f'bandwidth = "{fit["bandwidth"]:.4g} B/s"',
        f'latency = "{max(fit["latency"], 1e-7) / (4 * (ranks - 1)):.4g} s"',
        "",
        "[[node]]",
        'title = "a rank"',
        f"count = {ranks}",
        'devices = ["this-cpu"]',
        "sockets = 1",
        'nic = "measured"',
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _clock() -> float:
    """Hertz of a core as the kernel tells them; a server's usual base clock where it does not."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    told = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return 1e6 * max(told) if told else 2e9
