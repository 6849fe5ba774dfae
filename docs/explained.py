"""What `foretell explain` says of accuracy: a line for each name and set of measurements.

    python docs/explained.py                write src/foretell/cli/accuracy.json
    python docs/explained.py --from FOLDER  take NAME.json from FOLDER if there

`python docs/figures.py accuracy` writes it too, with the page. Names that were never measured get
no line here; what they were compared with is in `src/foretell/cli/checked.toml`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from figures import (
    EXPLAINED,
    IMAGES,
    ROOT,
    WORDS,
    _errors,
    _held,
    _percent,
    _priced,
    _second,
    _source,
    _write,
    captured,
    paper_rows,
    scaling,
    validated,
)

Lines = dict[str, list[str]]
# Plans of the laboratory that are what a what-if or a strategy does.
LAB = {
    "accumulate": ("accumulate",),
    "bucket-size": ("1mb", "one", "layers"),
    "overlap": ("late",),
    "parameter-server": ("server",),
    "data-parallel": ("ddp",),
}
LAB_STRATEGIES = {"data": ("ddp",), "zero": ("sharded",)}


def explained(folder: Path | None) -> dict[str, Any]:
    """How right each what-if, planner and strategy was."""
    said = validated("oracle", folder)
    runs = {n: _line(n, s) for n, s in said["sources"].items() if n in WORDS["sources"]}
    order = said["sources"]["vtrain"]
    best = f"best of vTrain's groups, or within 3 % of it: {_percent(order['best_found'])}"
    split = [runs["vtrain"], runs["megatron"]]
    ran = labs()
    return {
        "what-ifs": _joined(_changes(folder), {n: ran(p) for n, p in LAB.items()}),
        "planners": {
            "oracle": [best, *split],
            "fusion": _regions(folder),
            "placement": _mixed(),
        },
        "strategies": _joined(
            _strategies(said, runs, folder), {n: ran(p) for n, p in LAB_STRATEGIES.items()}
        ),
    }


def _joined(*parts: Lines) -> Lines:
    names = dict.fromkeys(name for part in parts for name in part)
    found = {name: [x for part in parts for x in part.get(name, [])] for name in names}
    return {name: lines for name, lines in found.items() if lines}


def _strategies(said: dict[str, Any], runs: dict[str, str], folder: Path | None) -> Lines:
    """What is known of each strategy from runs of others."""
    epochs = said["paradl"]["epochs"]
    images = {n: f"ParaDL's runs, {n}: accuracy {_percent(epochs[n])}" for n in IMAGES}
    split = [runs["vtrain"], runs["megatron"]]
    alone = [
        f"captured steps, {what}: {rows} rows, median {median}, worst {worst}"
        for what, rows, median, _, worst in captured(folder).rows
        if what.startswith("time")
    ]
    return {
        "serial": [*alone, runs["lambda"]], "data": [images["data"]], "fsdp": [runs["mosaic"]],
        "tensor": split, "pipeline": split,
        "context": [f"{runs['torchtitan']}; six of them deal out tokens"],
        "expert": [runs["memory"]], "spatial": [images["data+spatial"]],
        "filter": [images["filter"], images["data+filter"]], "channel": [images["channel"]],
    }  # fmt: skip


def _changes(folder: Path | None) -> Lines:
    """What-ifs against the change made and timed, and what a trace says of another trace."""
    return _joined(
        _alone(validated("whatifs", folder)["rows"], "seven models"),
        _alone(_second(folder), "nine other models"),
        {
            name: [f"made and timed on an H200, networks emulated: {_summary(rows)}"]
            for name, rows in paper_rows(folder).items()
        },
        {"data-parallel": _published(folder)},
        _traced_twice(),
    )


def _published(folder: Path | None) -> list[str]:
    """Data parallelism from one device, a line for each source of throughputs."""
    return [
        f"published throughputs ({source}): {rows} rows, median {median}, worst {worst}"
        for source, rows, median, _, worst in scaling(folder).rows
    ]


def _traced_twice() -> Lines:
    """ResNet-50 as the profiler saw it on two devices, and with and without workers that load."""
    from foretell.baseline import unprofiled
    from foretell.trace import read
    from foretell.whatif import Setting, parse
    from foretell_lab.validate import truth_folder

    truth = truth_folder(None)
    (path,) = (truth / "traces" / "kineto").glob("*num_workers_0*")
    small, large = read(path), read(truth / "h200" / "resnet50.base.json.gz")

    def kernels(graph: Any) -> float:
        return float(graph.seconds[graph.select(kind="kernel")].sum())

    newer = kernels(parse("device:to=h200").apply(small.graph, Setting()))
    older = kernels(parse("device:to=v100-32").apply(large.graph, Setting()))
    error, was = 2 * newer / kernels(large.graph) - 1, older / (2 * kernels(small.graph)) - 1
    step = unprofiled(small, PROFILED[0])
    fed = step.predicted(parse("loader:workers=4").apply(step.graph, Setting())) / PROFILED[1] - 1
    return {
        "device": [f"kernels of ResNet-50, a V100's trace on an H200: {error:+.1%}; the other way "
                   f"round {was:+.1%}"],
        "loader": [f"ResNet-50 on a V100, four workers from a trace of none: {fed:+.1%}"],
    }  # fmt: skip


# Seconds of profiled steps of those traces, medians: without workers, and with four.
PROFILED = (0.176, 0.127)


def _regions(folder: Path | None) -> list[str]:
    """What the fusion planner's prices are worth on models their network was not trained on."""
    said = validated("fused", folder)["rows"]
    kept = [r for r in said if (r["what"], r["by"]) == ("regions of models kept out", "network")]
    line = "prices of regions of models kept out: {} readings, median {}, in the 80 % interval {}"
    return [line.format(*(_priced(r, "covered")[k] for k in (0, 1, 3))) for r in kept]


def _mixed() -> list[str]:
    """Plans on ranks of unequal speed behind unequal links, that were run."""
    from foretell_lab.emulation import mixed

    rows = mixed.compared(ROOT / "benchmarks/measured/mixed")
    picked = mixed.picks(rows)
    best = sum(p["ours"] == p["best"] for p in picked)
    errors = mean(abs(r.error) for r in rows)
    return [
        f"unequal ranks and links in the laboratory: {len(rows)} plans, mean {_percent(errors)}; "
        f"quickest plan picked in {best} of {len(picked)} settings"
    ]


def labs() -> Callable[[Iterable[str]], list[str]]:
    """What ranks of the laboratory measured of some plans: sixteen cores, links shaped, gloo."""
    from foretell_lab.emulation.predicted import compared
    from foretell_lab.validate.lab import PINNED, QUIET, Runs, shipped

    runs = [Runs.read(shipped(name)) for name in (*QUIET, *PINNED)]
    rows = [row for run in runs for row in compared(run.known, run.rows)]

    def error(plans: Iterable[str]) -> list[str]:
        mine = [row for row in rows if row.config.plan in plans]
        error, spread = mean(abs(r.error) for r in mine), mean(r.spread for r in mine)
        return [
            f"small networks over gloo, by the laboratory's own graph of it: {len(mine)} "
            f"rows, mean {_percent(error)}, runs of the same {_percent(spread)} apart"
        ]

    return error


def _line(name: str, said: dict[str, float]) -> str:
    rows, median, _, worst, _ = _source(said)
    return f"{WORDS['sources'][name]}: {rows} rows, median {median}, worst {worst}"


def _alone(rows: list[dict[str, Any]], where: str) -> Lines:
    """What-ifs made alone on a plain trace, by their names."""
    from foretell_lab.validate.whatifs import SPECS

    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        spec, *others = SPECS[row["variant"]]
        if row["start"] == "base" and not others:
            groups.setdefault(spec.partition(":")[0], []).append(row)
    return {name: [f"{where} on an H200: {_summary(some)}"] for name, some in groups.items()}


def _summary(rows: list[dict[str, Any]]) -> str:
    many, median, _, worst = _errors(rows)
    return f"{many} rows, median {median}, worst {worst}, in the 80 % interval {_held(rows)}"


def main() -> None:
    """Parse, run, write."""
    query = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    query.add_argument("--from", dest="folder", type=Path, help="what commands printed before")
    _write(explained(query.parse_args().folder), EXPLAINED)


if __name__ == "__main__":
    main()
