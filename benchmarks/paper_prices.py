"""What messages take on the networks that `paper_steps.py` emulates, as foretell prices them.

    python benchmarks/paper_prices.py PRICES.json

The clusters are benchmarks/measured/papers/*.toml. The emulation keeps to these prices, so that all
but the price of a message is compared by `foretell validate --whatif --truth
benchmarks/measured/papers`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from foretell.cluster import load
from foretell.whatif.blueconnect import between_nodes
from foretell.whatif.collective_cost import Wires
from foretell.whatif.parameter_server import link

FOLDER = Path(__file__).parent / "measured" / "papers"
NETWORKS = {"thin": 4, "thick": 8}  # ranks
INSIDE = 4  # ranks of a node of `thick`


def prices() -> dict[str, Any]:
    """What messages take on the emulated clusters, by their bytes."""
    found: dict[str, Any] = {}
    for net, ranks in NETWORKS.items():
        wires, group = Wires(load(str(FOLDER / f"{net}.toml"))), tuple(range(ranks))
        sizes = np.geomspace(1e3, 1e9, 61)
        one: dict[str, Any] = {"ranks": ranks, "bytes": sizes.tolist()}
        for op in ("all_reduce", "all_gather"):
            one[op] = wires.seconds(op, sizes, group).tolist()
        one["link"] = list(link(wires, group))
        if ranks > INSIDE:
            for op in ("reduce_scatter", "all_gather"):
                one[f"{op} inside"] = wires.seconds(op, sizes, group[:INSIDE]).tolist()
            one["all_reduce between"] = between_nodes(wires, sizes, group, INSIDE).tolist()
        found[net] = one
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(prices()))
