"""The laboratory's matrix on the machines of a pool: one model at a time on each.

What one machine takes says nothing of another, so each measures itself and keeps a folder of its
own, in its temporary files while it works: a worker that takes over there goes on where the last
one was killed. What was measured comes home to FOLDER, or to FOLDER/HOST where there were several.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from foretell.pool import Pool
from foretell_lab.emulation import table
from foretell_lab.emulation.matrix import MatrixRequest, permitted, run

OnProgress = Callable[..., None]


def run_on(
    pool: Pool, folder: Path, request: MatrixRequest, tell: OnProgress = lambda *_: None
) -> dict[str, Any]:
    """Run a matrix on a pool's machines; what was and was not done, and the folders it is in."""
    folder.mkdir(parents=True, exist_ok=True)
    models = dict.fromkeys(c.model for c in request.configs)
    parts = [(key_of(folder), _of(request, name)) for name in models]
    found = pool.map(part, parts, lambda n, all_: tell(f"{n} of {all_} models", n / all_),
                     by_machine=True)  # fmt: skip
    hosts = dict.fromkeys(one["host"] for one in found)
    places = {host: folder if len(hosts) == 1 else folder / host for host in hosts}
    for one in found:
        _bring_home(places[one["host"]], one)
    done = {k: sum(one["done"][k] for one in found) for k in ("configs", "done", "failed", "left")}
    why = next((one["why"] for one in found if one["why"]), "")
    return {**done, "died": pool.died, "fallback": why, "folders": list(map(str, places.values()))}


def key_of(folder: Path) -> str:
    """What a laboratory is called on other machines."""
    return blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()


def _of(request: MatrixRequest, model: str) -> MatrixRequest:
    return replace(request, configs=tuple(c for c in request.configs if c.model == model))


def here(key: str) -> Path:
    """Where this machine keeps what it measures for a laboratory."""
    return Path(tempfile.gettempdir()) / f"foretell-lab-{key}"


def part(item: tuple[str, MatrixRequest]) -> dict[str, Any]:
    """One model's part of the matrix, on this machine; what is there already is not run again."""
    key, request = item
    place = here(key)
    configs, why = permitted(request.configs)
    done = run(place, replace(request, configs=configs))
    mine = set(configs)
    return {
        "host": socket.gethostname(),
        "why": why,
        "done": done,
        "rows": [asdict(row) for row in table.rows(place) if row.config in mine],
        "profiles": table.read(place / table.PROFILES),
        "machine": table.read(place / table.MACHINE),
    }


def _bring_home(place: Path, found: dict[str, Any]) -> None:
    """What a machine measured, beside what is there already."""
    place.mkdir(parents=True, exist_ok=True)
    table.write(place / table.PROFILES, found["profiles"])
    table.write(place / table.MACHINE, found["machine"])
    seen = {(row.round, row.config) for row in table.rows(place)}
    for values in found["rows"]:
        row = table.Row(**values)
        if (row.round, row.config) not in seen:
            table.append(place, row)
