"""`foretell oracle`: every strategy against scale: time, memory, money, and what limits each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from foretell.cli import offered
from foretell.cli.machines import calibrated, calibration_option
from foretell.cli.output import answer, json_option
from foretell.cli.pooled import pool_options

AT_LEAST_ONE = click.IntRange(1)


@click.command()
@offered.workload_argument
@click.option(
    "--on",
    "cluster",
    shell_complete=offered.clusters,
    required=True,
    help="The cluster: a preset's name or a file.",
)
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
@click.option(
    "--prices", type=click.Path(path_type=Path), help="TOML: device or node = money per hour."
)
@click.option("--dtype", default="", help="Number format: fp32, tf32, bf16, fp16, fp8.")
@click.option(
    "--framework", "--stack", "framework", default="",
    help="What would run it: megatron-core, fsdp, ddp, …",
)  # fmt: skip
@calibration_option
@pool_options
@json_option
def command(workload: str | None, cluster: str, gpus: str, **asked: Any) -> None:
    """Foretell every parallel strategy of WORKLOAD on a cluster, from one device to thousands."""
    from foretell.cli.progress import working
    from foretell.pool import opened
    from foretell.search.oracle import counts

    as_json, jobs, on_ray = (asked.pop(name) for name in ("as_json", "jobs", "on_ray"))
    named = offered.require_workload(workload)
    what, scales = f"pricing layouts of {named}", len(counts(gpus))
    with opened(jobs, on_ray) as pool, working(what, steps=scales) as tell:
        found = found_on(named, cluster, gpus, tell=tell, pool=pool, **asked)
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
    prices: Path | None = None,
    dtype: str = "",
    framework: str = "",
    calibration: Path | None = None,
    tell: Callable[[str], None] = lambda words: None,
    pool: Any = None,
) -> dict[str, Any]:
    """What the oracle says, as plain values."""
    from foretell.search.oracle import Space, counts, limits, scaling
    from foretell.workload import load

    model = load(workload, scripts=True)
    samples = _samples(model.batch, batch, per_gpu)
    numbers = counts(gpus)
    space = Space(dtype=dtype, framework=framework)

    listed = _listed(prices)

    def sized(n: int) -> Any:
        return calibrated(_priced(_sized(cluster, n), price, listed), calibration)

    rows = scaling(model, sized, numbers, samples, space, tell, pool)
    return _found(rows, limits(model, samples(numbers[-1])), epoch, model)


def _samples(usual: int, batch: int | None, per_gpu: int | None) -> Any:
    if batch is not None:
        return lambda n: batch
    return lambda n: (per_gpu or usual) * n


def _sized(spec: str, gpus: int) -> Any:
    """The cluster with so many devices: a spec with its number replaced, or a part of a file."""
    from foretell.cluster import load
    from foretell.errors import InputError

    name, _, options = spec.partition(":")
    kept = [o for o in options.split(",") if o and not o.startswith(("gpus=", "nodes="))]
    is_file = "/" in name or name.endswith(".toml")
    found = load(spec) if is_file else load(f"{name}:{','.join([*kept, f'gpus={gpus}'])}")
    if found.size < gpus:
        raise InputError(f"`{spec}` has {found.size} devices, not {gpus}", hint="ask for fewer")
    return found.subset(range(gpus)) if found.size > gpus else found


def _listed(path: Path | None) -> dict[str, float]:
    """Money per hour by the name of a device or node, from a file of prices."""
    import tomllib

    from foretell.errors import InputError
    from foretell.io import read_toml

    if path is None:
        return {}
    try:
        found = read_toml(path, "file of prices")
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"`{path}` is no file of prices: {error}") from None
    if not found:
        raise InputError(f"`{path}` names no price", hint="write a100-80 = 1.9")
    for name, value in found.items():
        if type(value) not in (int, float) or not 0 < value < 1e9:
            shown = f"`{name[:40]}` is `{str(value)[:40]}` in `{path}`"
            raise InputError(shown, hint="write a100-80 = 1.9")
    return {name: float(value) for name, value in found.items()}


def _priced(cluster: Any, price: float | None, listed: dict[str, float]) -> Any:
    """The cluster at the prices that were given; its own where none was."""
    from dataclasses import replace

    def of(node: Any) -> float:
        if price is not None:
            return price * len(node.devices)
        if node.name in listed:
            return listed[node.name]
        each = [listed.get(device.name, 0.0) for device in node.devices]
        return sum(each) if all(each) else node.price

    groups = tuple((replace(node, price=of(node)), n) for node, n in cluster.groups)
    return replace(cluster, groups=groups) if price is not None or listed else cluster


def _found(rows: Any, most: Any, epoch: int | None, model: Any) -> dict[str, Any]:
    from foretell.search.oracle.scale import front, more_or_less

    return {
        "workload": model.name,
        "rows": [_plain(row, epoch) for row in rows],
        "limits": {name: {"gpus": n, "because": why} for name, (n, why) in most.items()},
        "more": more_or_less(rows),
        "front": [{"gpus": r.gpus, "strategy": r.strategy} for r in front(rows)],
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
        "exposed_s": row.exposed,
        "hidden_s": row.hidden,
        "collectives": dict(row.collectives),
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
    from foretell.report.terminal import table, wrapped

    rows = _few(found["rows"])
    columns = ("gpus>", "strategy", "step>", "samples/s>", "MFU>", "memory>", "bottleneck")
    lines = [table(columns, [_line(row) for row in rows])]
    if rows and "epoch_s" in rows[0]:
        lines.append(table(_EPOCH, [_epoch(row) for row in rows]))
    ends = [
        f"{name}: max useful degree {v['gpus']:g}, {v['because']}"
        for name, v in found["limits"].items()
    ]
    plans = [f"best on {row['gpus']}: {row['plan']}" for row in _firsts(found["rows"])]
    best = ", ".join(f"{row['strategy']} on {row['gpus']}" for row in found["front"][:MOST])
    unbeaten = [wrapped(f"Pareto front of time, memory and cost: {best}")] if best else []
    held = _held_back(_firsts(found["rows"]))
    rest = (*held, *found["more"], *unbeaten, *ends, *found["notes"])
    return "\n".join([*lines, "", *plans, "", *rest])


def _held_back(best: list[dict[str, Any]]) -> list[str]:
    """What holds the best of the largest scale back, why that is believed and what would help."""
    from foretell.report.terminal import wrapped

    return [
        wrapped(f"{f['name']} on {row['gpus']}: {f['evidence']}; {f['remedy']}")
        for row in best[-1:]
        for f in row["findings"]
    ]


MOST = 5  # of a front that are named
_EPOCH = ("gpus>", "strategy", "epoch>", "waits for messages>", "messages hidden>", "money>")


def _epoch(row: dict[str, Any]) -> tuple[str, ...]:
    from foretell.report import words

    steps = row["epoch_s"] / row["step_s"]
    talk = (words.seconds(row[name] * steps) for name in ("exposed_s", "hidden_s"))
    money = f"{row['money_per_epoch']:.2f}" if row["money_per_epoch"] else "no price"
    return str(row["gpus"]), row["strategy"], words.seconds(row["epoch_s"]), *talk, money


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
        memory = f"out of memory by {words.size(row['missing_bytes'])}"
    worst = row["findings"][0]["name"] if row["findings"] else ""
    return (
        str(row["gpus"]), row["strategy"], words.seconds(row["step_s"]),
        f"{row['samples_per_s']:.4g}", words.percent(row["utilisation"]), memory, worst,
    )  # fmt: skip
