"""`foretell oracle`: every strategy against scale: time, memory, money, and what limits each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from foretell.cli.machines import calibrated, calibration_option
from foretell.cli.output import answer, json_option
from foretell.cli.pooled import pool_options

AT_LEAST_ONE = click.IntRange(1)


@click.command()
@click.argument("workload")
@click.option("--on", "cluster", required=True, help="The cluster: a preset's name or a file.")
@click.option("--gpus", default="1..64", help="How many devices: 1..1024, or 8,12,48.")
@click.option(
    "--batch", type=click.IntRange(1), help="Samples of a step, the same at every scale (strong)."
)
@click.option(
    "--per-gpu", type=click.IntRange(1), help="Samples of a device, the same at every scale (weak)."
)
@click.option(
    "--epoch", type=click.IntRange(1), help="Samples of an epoch, to tell its time and money."
)
@click.option("--price", type=float, help="Money per device and hour, where the preset has none.")
@click.option("--dtype", default="", help="Number format: fp32, tf32, bf16, fp16, fp8.")
@click.option("--stack", default="", help="The program that would run it: megatron-core, fsdp, …")
@calibration_option
@pool_options
@json_option
def command(workload: str, cluster: str, gpus: str, **asked: Any) -> None:
    """Foretell every parallel strategy of WORKLOAD on a cluster, from one device to thousands."""
    from foretell.cli.progress import working
    from foretell.pool import opened
    from foretell.search.oracle import counts

    as_json, jobs, on_ray = (asked.pop(name) for name in ("as_json", "jobs", "on_ray"))
    what, scales = f"pricing layouts of {workload}", len(counts(gpus))
    with opened(jobs, on_ray) as pool, working(what, steps=scales) as tell:
        found = found_on(workload, cluster, gpus, tell=tell, pool=pool, **asked)
    answer(found, as_json, text)


def found_on(
    workload: str,
    cluster: str,
    gpus: str,
    *,
    batch: int | None = None,
    per_gpu: int | None = None,
    epoch: int | None = None,
    price: float | None = None,
    dtype: str = "",
    stack: str = "",
    calibration: Path | None = None,
    tell: Callable[[str], None] = lambda words: None,
    pool: Any = None,
) -> dict[str, Any]:
    """What the oracle says, as plain values."""
    from foretell.search.oracle import Space, counts, limits, scaling
    from foretell.workload import load

    model = load(workload)
    samples = _samples(model.batch, batch, per_gpu)
    numbers = counts(gpus)
    space = Space(dtype=dtype, stack=stack)

    def sized(n: int) -> Any:
        return calibrated(_sized(cluster, n, price), calibration)

    rows = scaling(model, sized, numbers, samples, space, tell, pool)
    return _found(rows, limits(model, samples(numbers[-1])), epoch, model)


def _samples(usual: int, batch: int | None, per_gpu: int | None) -> Any:
    if batch is not None:
        return lambda n: batch
    return lambda n: (per_gpu or usual) * n


def _sized(spec: str, gpus: int, price: float | None) -> Any:
    """The cluster with so many devices: a spec with its number replaced, or a part of a file."""
    from dataclasses import replace

    from foretell.cluster import load
    from foretell.errors import InputError

    name, _, options = spec.partition(":")
    kept = [o for o in options.split(",") if o and not o.startswith(("gpus=", "nodes="))]
    is_file = "/" in name or name.endswith(".toml")
    found = load(spec) if is_file else load(f"{name}:{','.join([*kept, f'gpus={gpus}'])}")
    if found.size < gpus:
        raise InputError(f"`{spec}` has {found.size} devices, not {gpus}", hint="ask for fewer")
    found = found.subset(range(gpus)) if found.size > gpus else found
    if price is None:
        return found
    nodes = tuple((replace(node, price=price * len(node.devices)), n) for node, n in found.groups)
    return replace(found, groups=nodes)


def _found(rows: Any, most: Any, epoch: int | None, model: Any) -> dict[str, Any]:
    from foretell.search.oracle.scale import more_or_less

    return {
        "workload": model.name,
        "rows": [_plain(row, epoch) for row in rows],
        "limits": {name: {"gpus": n, "because": why} for name, (n, why) in most.items()},
        "more": more_or_less(rows),
        "notes": list(model.notes),
    }


def _plain(row: Any, epoch: int | None) -> dict[str, Any]:
    found = {
        "gpus": row.gpus,
        "strategy": row.strategy,
        "plan": str(row.plan),
        "global_batch": row.batch,
        "step_s": row.step,
        "samples_per_s": row.samples,
        "breakdown": {f"{name}_s": value for name, value in row.parts.items()},
        "peak_bytes": row.peak,
        "missing_bytes": row.missing,
        "fits": row.missing == 0,
        "utilisation": row.utilisation,
        "money_per_step": row.money,
        "layouts": row.layouts,
        "findings": [vars(f) for f in row.findings],
    }
    if epoch:
        found["epoch_s"] = row.epoch(epoch)
        found["money_per_epoch"] = row.money * epoch / row.batch
    return found


def text(found: dict[str, Any]) -> str:
    """The oracle's answer for a terminal."""
    from foretell.report.terminal import table

    columns = ("gpus>", "strategy", "step>", "samples/s>", "of peak>", "memory>", "held back by")
    lines = [table(columns, [_line(row) for row in _few(found["rows"])])]
    ends = [f"{name} ends at {v['gpus']:g}: {v['because']}" for name, v in found["limits"].items()]
    plans = [f"best on {row['gpus']}: {row['plan']}" for row in _firsts(found["rows"])]
    return "\n".join([*lines, "", *plans, "", *found["more"], *ends, *found["notes"]])


def _few(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The three best strategies of each scale."""
    seen: dict[int, int] = {}
    kept = []
    for row in rows:
        seen[row["gpus"]] = seen.get(row["gpus"], 0) + 1
        if seen[row["gpus"]] <= 3:
            kept.append(row)
    return kept


def _firsts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({row["gpus"]: row for row in reversed(rows) if row["fits"]}.values())[::-1]


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    from foretell.report import words

    memory = words.size(row["peak_bytes"])
    if not row["fits"]:
        memory = f"{words.size(row['missing_bytes'])} too many"
    worst = row["findings"][0]["name"] if row["findings"] else ""
    return (
        str(row["gpus"]), row["strategy"], words.seconds(row["step_s"]),
        f"{row['samples_per_s']:.4g}", words.percent(row["utilisation"]), memory, worst,
    )  # fmt: skip
