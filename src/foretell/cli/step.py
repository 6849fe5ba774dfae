"""A step from what a person names: a graph, priced where a cluster is named, a trace, or a script.

A script is profiled where this machine has a GPU and no other cluster is named; else its step is
captured and priced, on one H200 unless a cluster is named.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.cli.output import say
from foretell.cluster import Cluster
from foretell.graph.graph import Graph

if TYPE_CHECKING:
    from foretell.advise import Step


def load_step(file: Path, cluster: str | None, real: float | None = None) -> Step:
    """The step in a file; `real` is the time of an un-profiled step, for traces."""
    from foretell.advise import Step
    from foretell.graph.file import is_graph_file, load

    machines = _machines(cluster)
    if _runs(file):
        with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
            return _of_script(file, Path(folder), cluster)
    if not file.is_dir() and is_graph_file(file):
        graph = load(file)
        return Step(_priced(graph, machines), machines)
    from foretell.baseline import unprofiled
    from foretell.cli.progress import reading
    from foretell.trace import read

    with reading(file):
        trace = read(file)
        if "measured" not in trace.graph.facts:  # it tells what depends on what, as a graph does
            return Step(_priced(trace.graph, machines), machines)
        found = unprofiled(trace, real)
    for note in trace.notes if "ranks" in trace.graph.facts else ():
        say(note)  # stragglers and late ranks
    return Step(found.graph, machines, found)


_DEFAULT = "h200"  # where steps of scripts are priced unless a cluster is named
_GPUS = ("/dev/nvidia0", "/dev/kfd")  # there where a driver of NVIDIA or AMD is


def _runs(file: Path) -> bool:
    """Whether a name is that of a script or of a function in one."""
    return file.suffix == ".py" or ".py:" in str(file)


def _of_script(file: Path, folder: Path, cluster: str | None) -> Step:
    """The step of a script: profiled on the GPU of this machine, or captured."""
    from foretell.cli.capture import captured_step
    from foretell.cli.progress import working
    from foretell.cli.script import require_torch, script_args
    from foretell.graph import save

    require_torch()
    with working(f"running {file.name}") as tell:
        if cluster is None and file.suffix == ".py" and any(Path(p).exists() for p in _GPUS):
            from foretell.pytorch.intake.request import Script
            from foretell.pytorch.profile.run import profile

            script = Script(str(file), script_args())
            found = profile(script, folder / "step.json.gz", progress=tell)
            return load_step(found.trace, None)
        on = cluster or _DEFAULT
        kind = _machines(on).devices[0].name  # type: ignore[union-attr]
        graph, notes = captured_step(str(file), script_args(), folder, kind, tell)
    if cluster is None:
        notes = (
            f"no GPU is used: the step is captured and priced on one {on} (--on: another)",
            *notes,
        )
    for note in notes:
        say(note)
    save(graph, folder / "step.graph")
    return load_step(folder / "step.graph", on)


def _machines(cluster: str | None) -> Cluster | None:
    if cluster is None:
        return None
    from foretell.cluster import load

    return load(cluster)


def _priced(graph: Graph, machines: Cluster | None) -> Graph:
    if machines is None:
        return graph
    from foretell.cost import price

    return price(graph, machines)
