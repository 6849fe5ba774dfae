"""Every parallel strategy by number of GPUs, and the cheapest GPUs for a training run.

foretell.oracle("llama-3.1-8b", "dgx-h100", gpus="8..64")
foretell.api.scaling.buy("llama-3.1-8b", ["h100", "a100-80"], tokens="1T", days=30)
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.api.planning import machines, workload_of
from foretell.api.result import Bar, Plot, Result, Table, bars, curves
from foretell.cluster import Cluster
from foretell.cluster import load as load_cluster
from foretell.errors import InputError
from foretell.io import read_toml
from foretell.plan import save
from foretell.report import words
from foretell.search.oracle import Space, counts, limits, scaling
from foretell.search.oracle.scale import Row, front, marginal_gains
from foretell.search.purchase import Offer, chosen, offers

if TYPE_CHECKING:
    from foretell.pool import Pool

TOKENS = 2**22  # of a step by default: what published runs of 7 to 405 B use, about 4 M
_MOST_OFFERS = 12  # offers that are shown
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBTkmbt]?)")
_MULTIPLES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


# Short names of ParaDL's limitations, for a column.
_SHORT = {
    "gradient exchange": "gradient comm.", "layer-wise collectives": "TP/CP/EP comm.",
    "weight update": "optimizer step",
}  # fmt: skip
_EPOCH = ("GPUs>", "strategy", "epoch>", "exposed comm.>", "hidden comm.>", "cost>")


@dataclass(frozen=True, repr=False)
class PurchaseResult(Result):
    """The cheapest offer that ends in time, and all that were compared."""

    workload: str
    tokens: float
    days: float  # allowed; 0 where there is no deadline
    best: Offer
    offers: tuple[Offer, ...]  # the cheapest first
    notes: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan of the best offer, with its prediction."""
        prediction = self.best.prediction
        stored = {"step_s": prediction.step, "low_s": prediction.low, "high_s": prediction.high}
        save(prediction.plan, Path(path), stored | {"peak_bytes": prediction.peak})

    @property
    def verdict(self) -> str:
        best = self.best
        return (
            f"{best.gpus} × {best.device} train {words.tokens(self.tokens)} tokens in "
            f"{words.seconds(best.seconds)} for {_money(best)}; "
            f"{words.percent(best.prediction.utilisation)} MFU, "
            f"{words.percent(best.goodput)} goodput"
        )

    def details(self, verbose: bool = False) -> list[str | Table]:
        rows = [
            (
                f"{offer.gpus} × {offer.device}", words.seconds(offer.seconds), _money(offer),
                words.seconds(offer.prediction.step), words.percent(offer.prediction.utilisation),
                words.percent(offer.goodput),
            )
            for offer in self.offers[: None if verbose else _MOST_OFFERS]
        ]  # fmt: skip
        head = ("GPUs", "run>", "cost>", "step>", "MFU>", "goodput>")
        return [words.plan_text(str(self.best.prediction.plan)), Table(head, rows), *self.notes]

    def records(self) -> list[dict[str, Any]]:
        return [
            {"device": o.device, "gpus": o.gpus, "plan": str(o.prediction.plan), "days": o.days,
             "money": o.money, "step_s": o.prediction.step, "low_s": o.prediction.low,
             "high_s": o.prediction.high, "mfu": o.prediction.utilisation, "goodput": o.goodput}
            for o in self.offers
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        rows = self.records()
        return {
            "tokens": self.tokens,
            "days": self.days,
            "best": rows[self.offers.index(self.best)],
            "offers": rows,
            "notes": list(self.notes),
        }

    def plot(self) -> Plot:
        rows = [
            Bar(f"{o.gpus} × {o.device}", o.seconds, words.seconds(o.seconds)) for o in self.offers
        ]
        return bars("the whole run, the cheapest first", rows)


def buy(
    model: Any,
    devices: Sequence[str],
    *,
    tokens: str | float,
    days: float = 0.0,
    gpus: str = "8..2048",
    batch: int = 0,
    prices: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> PurchaseResult:
    """The cheapest number and kind of GPUs that train a model on so many tokens in time.

    `devices` are cluster specs without a number (`h100`, `dgx-a100`); with `prices`, a TOML file of
    prices per hour by device, every device of the file is tried where none is named.
    """
    workload, many, listed = workload_of(model), token_count(tokens), prices_of(prices)
    kinds = list(devices) or [*listed]
    if not kinds:
        raise InputError("no kind of GPU to choose from", hint="name some, or give a prices file")
    if workload.tokens <= 1:
        raise InputError(f"`{workload.name}` has no tokens", hint="ask for a language model")
    samples = batch or max(int(TOKENS // workload.tokens), 1)

    def of(name: str, count: int) -> Cluster:
        return machines(at_prices(sized(name, count), None, listed))

    found = offers(
        workload, [partial(of, name) for name in kinds], counts(gpus), tokens=many, batch=samples,
        progress=progress,
    )  # fmt: skip
    note = f"{samples} samples a step, {words.tokens(samples * workload.tokens)} tokens"
    unknown = (
        ()
        if all(o.money for o in found)
        else ("no prices known: compared by GPU-hours; --prices FILE gives them",)
    )
    return PurchaseResult(
        workload.name, many, days, chosen(found, days), tuple(found), (note, *unknown)
    )


def token_count(text: str | float) -> float:
    """`2T` is two trillion, `300B` three hundred billion."""
    found = _COUNT.fullmatch(str(text).strip())
    value = float(found[1]) * _MULTIPLES[found[2].upper()] if found else 0.0
    if not 1 <= value <= 1e18:
        raise InputError(f"`{text}` is no number of tokens", hint="write 2T, 300B or 5e9 as 5B")
    return value


def _money(offer: Offer) -> str:
    hours = offer.gpus * offer.seconds / 3600
    return f"$ {offer.money:,.0f}" if offer.money else f"{hours:,.0f} GPU-hours"


_MOST_STRATEGIES, _MOST_PARETO = (
    3,
    5,
)  # strategies of a scale, and plans of the Pareto front, that are shown


@dataclass(frozen=True, eq=False, repr=False)
class ScalingResult(Result):
    """The best layout of every strategy at every scale, the Pareto front, and the limits."""

    workload: str
    rows: tuple[Row, ...]  # best first within each number of GPUs
    limits: Mapping[str, tuple[float, str]]  # strategy: max useful degree, because
    front: tuple[Row, ...]  # Pareto front of time, memory and cost
    more: tuple[str, ...]  # what more GPUs save and cost
    notes: tuple[str, ...]
    epoch: int | None = None  # samples

    @property
    def best(self) -> tuple[Row, ...]:
        """The fastest layout that fits, one for each number of GPUs."""
        first = {row.gpus: row for row in reversed(self.rows) if row.missing == 0}
        return tuple(first[gpus] for gpus in sorted(first))

    @property
    def verdict(self) -> str:
        if not self.best:
            short = min(self.rows, key=lambda row: row.missing)
            return (
                f"no layout of {self.workload} fits: {words.strategy(short.strategy)} on "
                f"{short.gpus} GPUs comes nearest, out of memory by {words.size(short.missing)}"
            )
        row = self.best[-1]
        found = (
            f"best on {row.gpus} GPUs: {words.strategy(row.strategy)}, {words.seconds(row.step)} a "
            f"step, {row.samples:.4g} samples/s, {words.percent(row.utilisation)} MFU"
        )
        return f"{found}; bottleneck: {_bottleneck(row)}"

    def details(self, verbose: bool = False) -> list[str | Table]:
        few = self.rows if verbose else self._best_rows()
        columns = ("GPUs>", "strategy", "step>", "samples/s>", "MFU>", "memory>", "bottleneck")
        found: list[str | Table] = [Table(columns, [_cells(row) for row in few])]
        if self.epoch:
            found.append(Table(_EPOCH, [self._epoch(row) for row in few]))
        best = (words.plan_text(f"best on {row.gpus}: {row.plan}") for row in self.best)
        found += ["", *best, ""]
        found += [
            f"{f.name} on {row.gpus} GPUs: {f.evidence}; {f.remedy}"
            for row in self.best[-1:]
            for f in row.findings
        ]
        found += self.more if verbose else self.more[-_MOST_STRATEGIES:]
        if verbose:
            kept = (f"{words.strategy(r.strategy)} on {r.gpus}" for r in self.front[:_MOST_PARETO])
            found.append(f"Pareto front of time, memory and cost: {', '.join(kept)}")
            found += [
                f"{words.strategy(name)}: max useful degree {most:g}, {because}"
                for name, (most, because) in self.limits.items()
            ]
        return [*found, *self.notes]

    def _best_rows(self) -> list[Row]:
        """The best strategies of each scale: three of few scales, one of many."""
        scales: dict[int, list[Row]] = {}
        for row in self.rows:
            scales.setdefault(row.gpus, []).append(row)
        most = _MOST_STRATEGIES if len(scales) <= _MOST_STRATEGIES else 1
        return [row for rows in scales.values() for row in rows[:most]]

    def _epoch(self, row: Row) -> tuple[str, ...]:
        assert self.epoch is not None
        steps = self.epoch / row.batch
        times = (words.seconds(t * steps) for t in (row.step, row.exposed, row.hidden))
        cost = f"{row.money * steps:,.2f}" if row.money else "no price"
        return str(row.gpus), words.strategy(row.strategy), *times, cost

    def to_dict(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "rows": [_row_dict(row, self.epoch) for row in self.rows],
            "limits": {name: {"gpus": n, "because": why} for name, (n, why) in self.limits.items()},
            "more": list(self.more),
            "front": [{"gpus": r.gpus, "strategy": r.strategy} for r in self.front],
            "notes": list(self.notes),
        }

    def records(self) -> list[dict[str, Any]]:
        nested = ("breakdown", "collectives", "findings")
        rows = (_row_dict(row, self.epoch) for row in self.rows)
        return [{k: v for k, v in row.items() if k not in nested} for row in rows]

    def plot(self) -> Plot:
        """Samples a second against GPUs, a curve for each strategy."""
        series: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            if row.missing == 0:
                series.setdefault(words.strategy(row.strategy), []).append((row.gpus, row.samples))
        return curves(f"{self.workload}: samples/s", series, ("GPUs", "samples/s"))


def oracle(
    model: Any,
    cluster: str,
    gpus: str = "",
    *,
    batch: int | None = None,
    per_gpu: int | None = None,
    epoch: int | None = None,
    price: float | None = None,
    prices: str | os.PathLike[str] | None = None,
    dtype: str = "",
    framework: str = "",
    calibration: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] = lambda doing: None,
    pool: Pool | None = None,
) -> ScalingResult:
    """Every parallel strategy of a model from few GPUs to many, with what limits each.

    `gpus` is `1..1024` (powers of two) or `8,12,48`; by default up to the size of the cluster, or
    64 where `cluster` names no number. `batch` keeps the samples of a step at every scale (strong
    scaling), `per_gpu` those of a GPU (weak). `epoch` is a number of samples whose time and cost
    are wanted; `price` is per GPU and hour, `prices` a TOML file of prices by name.
    """
    workload = workload_of(model)
    numbers, listed = counts(gpus or default_counts(cluster)), prices_of(prices)

    def samples(count: int) -> int:
        return batch if batch is not None else (per_gpu or workload.batch) * count

    def at_scale(count: int) -> Cluster:
        return machines(at_prices(sized(cluster, count), price, listed), calibration)

    space = Space(dtype=dtype, framework=framework)
    rows = scaling(workload, at_scale, numbers, samples, space, progress, pool)
    return ScalingResult(
        workload=workload.name,
        rows=tuple(rows),
        limits=limits(workload, samples(numbers[-1])),
        front=tuple(front(rows)),
        more=tuple(marginal_gains(rows)),
        notes=tuple(workload.notes),
        epoch=epoch,
    )


def default_counts(cluster: str) -> str:
    """From one GPU to the size a cluster's spec or file names, or to 64."""
    name, _, options = cluster.partition(":")
    is_sized = is_file(name) or any(o.startswith(("gpus=", "nodes=")) for o in options.split(","))
    return f"1..{load_cluster(cluster).size}" if is_sized else "1..64"


def is_file(name: str) -> bool:
    """Whether a cluster's name is a path, not a preset."""
    return "/" in name or name.endswith(".toml")


def sized(spec: str, gpus: int) -> Cluster:
    """The cluster with so many devices: a spec with its number replaced, or a part of a file."""
    name, _, options = spec.partition(":")
    kept = [o for o in options.split(",") if o and not o.startswith(("gpus=", "nodes="))]
    wanted = spec if is_file(name) else f"{name}:{','.join([*kept, f'gpus={gpus}'])}"
    found = load_cluster(wanted)
    if found.size < gpus:
        raise InputError(f"`{spec}` has {found.size} devices, not {gpus}", hint="ask for fewer")
    return found.subset(range(gpus)) if found.size > gpus else found


def prices_of(path: str | os.PathLike[str] | None) -> dict[str, float]:
    """Price per hour by the name of a device or node, from a file."""
    if path is None:
        return {}
    try:
        found = read_toml(Path(path), "file of prices")
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"`{path}` is no file of prices: {error}") from None
    if not found:
        raise InputError(f"`{path}` names no price", hint="write a100-80 = 1.9")
    for name, value in found.items():
        if type(value) not in (int, float) or not 0 < value < 1e9:
            shown = f"`{name[:40]}` is `{str(value)[:40]}` in `{path}`"
            raise InputError(shown, hint="write a100-80 = 1.9")
    return {name: float(value) for name, value in found.items()}


def at_prices(cluster: Cluster, price: float | None, listed: dict[str, float]) -> Cluster:
    """The cluster at the prices that were given; its own otherwise."""

    def of(node: Any) -> float:
        if price is not None:
            return price * len(node.devices)
        if node.name in listed:
            return listed[node.name]
        each = [listed.get(device.name, 0.0) for device in node.devices]
        total: float = sum(each) if all(each) else node.price
        return total

    groups = tuple((replace(node, price=of(node)), n) for node, n in cluster.groups)
    return replace(cluster, groups=groups) if price is not None or listed else cluster


def _row_dict(row: Row, epoch: int | None) -> dict[str, Any]:
    found = {
        "gpus": row.gpus,
        "strategy": row.strategy,
        "plan": str(row.plan),
        "global_batch": row.batch,
        "step_s": row.step,
        "low_s": row.low,
        "high_s": row.high,
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


def _cells(row: Row) -> tuple[str, ...]:
    memory = words.size(row.peak)
    if row.missing:
        memory = f"OOM by {words.size(row.missing)}"
    return (
        str(row.gpus), words.strategy(row.strategy), words.seconds(row.step), f"{row.samples:.4g}",
        words.percent(row.utilisation), memory, _bottleneck(row),
    )  # fmt: skip


def _bottleneck(row: Row) -> str:
    """What costs the step most besides its matmuls, in a word or two."""
    name = next((f.name for f in row.findings if f.of == "step"), "compute")
    return _SHORT.get(name, name)
