"""Gathers measured steps: the columns of their compiled kernels, and what libraries took.

Two files side by side: NAME.npz has every kernel the compiler wrote (→ `gather`), its family the
step `model/plan`; NAME.json has, of each step, its seconds, the host's, how many kernels ran, and
each call of a library with what its kernels took, named by op and sizes.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell_lab.fused.gather import Sample, measured, save
from foretell_lab.fused.kernels import Note
from foretell_lab.fused.written import parts

_WRITTEN = ("loops", "template")
# Kernels that only prepare for a library's next kernel, and that finish what its last began.
_BEFORE, _BEHIND = ("Memset", "nchwToNhwc", "AddPadding"), ("splitKreduce", "nhwcToNchw")


def gather_steps(results: str, out: Path) -> int:
    """Join what was measured into the two files; how many steps."""
    raw = Path(results).read_bytes()
    text = (gzip.decompress(raw) if results.endswith(".gz") else raw).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    found = [s for row in rows if row.get("ran") and (s := _step(row)) is not None]
    if not found:
        raise InputError("no step was measured whole", hint="the results tell why of each")
    found.sort(key=lambda made: (made[0]["model"], made[0]["kernels"]))
    save(measured([sample for _, samples in found for sample in samples]), out.with_suffix(".npz"))
    out.with_suffix(".json").write_text(json.dumps([step for step, _ in found]) + "\n")
    return len(found)


def _step(row: dict[str, Any]) -> tuple[dict[str, Any], list[Sample]] | None:
    """One step, where as many compiled kernels ran as the compiler noted.

    A reduction over rows and columns at once (`mixed`) is finished by a library's kernel, so that
    fewer run than were noted: such a step is kept without the times of its kernels.
    """
    notes = row["notes"]
    ran = [(name, span * 1e-9) for name, _, span in row["ran"]]
    written = [span for name, span in ran if name.startswith("triton")]
    noted, mixed = [n for n in notes if n["kind"] in _WRITTEN], any("mixed" in n for n in notes)
    if len(written) != len(noted) and not mixed:
        return None
    family = f"{row['model']}/{row['plan']}"
    seconds = [math.nan] * len(noted) if mixed else written
    samples = [
        Sample(p.nodes, p.edges, p.seconds, 0.0, 1, family, f"{family}/{i}", True)
        for i, p in enumerate(parts(notes, seconds, "", math.nan))
    ]
    step = {"model": row["model"], "plan": row["plan"], "seconds": row["s"], "host": row["host"]}
    step |= {"kernels": len(ran), "busy": sum(s for _, s in ran)}
    return step | {"extern": _unpaired(notes) if mixed else _extern(notes, ran)}, samples


def _unpaired(notes: list[Note]) -> list[list[Any]]:
    """Library calls whose own time is not given."""
    return [[_key(note), None] for note in notes if _is_call(note)]


def _is_call(note: Note) -> bool:
    return bool(note["kind"] == "extern" and note["op"] != "None")


def _extern(notes: list[Note], ran: list[tuple[str, float]]) -> list[list[Any]]:
    """Library calls between one compiled kernel and the next, and what their kernels took."""
    kernels: list[list[tuple[str, float]]] = [[]]
    for name, seconds in ran:
        if name.startswith("triton"):
            kernels.append([])
        else:
            kernels[-1].append((name, seconds))
    calls: list[list[str]] = [[]]
    for note in notes:
        if note["kind"] in _WRITTEN:
            calls.append([])
        elif _is_call(note):
            calls[-1].append(_key(note))
    pairs = zip(calls, map(_grouped, kernels), strict=True)
    return [pair for keys, took in pairs for pair in _paired(keys, took)]


def _grouped(ran: list[tuple[str, float]]) -> list[float]:
    """Seconds of a library's kernels, those that only help added to the kernel they help."""
    took: list[float] = []
    ahead = 0.0
    for name, seconds in ran:
        if any(word in name for word in _BEFORE):
            ahead += seconds
        elif took and any(word in name for word in _BEHIND):
            took[-1] += seconds
        else:
            took.append(seconds + ahead)
            ahead = 0.0
    return took if not ahead else [*took, ahead]


def _paired(keys: list[str], took: list[float]) -> list[list[Any]]:
    """One call a kernel where their numbers agree; else all calls of the gap as one."""
    if len(keys) == len(took):
        return [[key, seconds] for key, seconds in zip(keys, took, strict=True)]
    return [[" + ".join(keys), sum(took)]] if took else []


def _key(note: Note) -> str:
    sizes = [f"{dtype}:{count}" for _, dtype, count in note["reads"]]
    made = "x".join(map(str, note["ops"][-1][3])) if note["ops"] else ""
    return f"{note['op']}({','.join(sizes)})->{made}"
