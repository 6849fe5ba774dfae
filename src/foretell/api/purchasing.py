"""How many of which GPUs train so many tokens in so many days, and what that costs.

foretell.api.purchasing.buy("llama-3.1-8b", ["h100", "a100-80"], tokens="1T", days=30)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from foretell.api.planning import machines, workload_of
from foretell.api.plot import Bar, Plot, bars
from foretell.api.result import Result, Table
from foretell.api.scaling import at_prices, prices_of, sized
from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.plan import save
from foretell.report import words
from foretell.search.oracle import counts
from foretell.search.purchase import Offer, chosen, offers

TOKENS = 2**22  # of a step by default: what published runs of 7 to 405 B use, about 4 M
_SHOWN = 12  # offers that are shown
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBTkmbt]?)")
_MANY = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


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
        told = self.best.prediction
        stored = {"step_s": told.step, "low_s": told.low, "high_s": told.high}
        save(told.plan, Path(path), stored | {"peak_bytes": told.peak})

    @property
    def verdict(self) -> str:
        best = self.best
        cost = f" for {_money(best)}" if best.money else ""
        return (
            f"{best.gpus} × {best.device} train {words.count(self.tokens)} tokens in "
            f"{words.seconds(best.seconds)}{cost}; {words.percent(best.prediction.utilisation)} "
            f"MFU, {words.percent(best.goodput)} goodput"
        )

    def details(self, verbose: bool = False) -> list[str | Table]:
        rows = [
            (
                f"{offer.gpus} × {offer.device}", words.seconds(offer.seconds), _money(offer),
                words.seconds(offer.prediction.step), words.percent(offer.prediction.utilisation),
                words.percent(offer.goodput),
            )
            for offer in self.offers[: None if verbose else _SHOWN]
        ]  # fmt: skip
        head = ("GPUs", "run>", "cost>", "step>", "MFU>", "goodput>")
        return [str(self.best.prediction.plan), Table(head, rows), *self.notes]

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
    asked = list(devices) or [*listed]
    if not asked:
        raise InputError("no kind of GPU to choose from", hint="name some, or give a prices file")
    if workload.tokens <= 1:
        raise InputError(f"`{workload.name}` has no tokens", hint="ask for a language model")
    samples = batch or max(int(TOKENS // workload.tokens), 1)

    def of(name: str, count: int) -> Cluster:
        return machines(at_prices(sized(name, count), None, listed))

    found = offers(
        workload, [partial(of, name) for name in asked], counts(gpus), tokens=many, batch=samples,
        progress=progress,
    )  # fmt: skip
    note = f"{samples} samples a step, {words.count(samples * workload.tokens)} tokens"
    unknown = () if all(o.money for o in found) else ("cost is unknown without prices",)
    return PurchaseResult(
        workload.name, many, days, chosen(found, days), tuple(found), (note, *unknown)
    )


def token_count(text: str | float) -> float:
    """`2T` is two trillion, `300B` three hundred billion."""
    found = _COUNT.fullmatch(str(text).strip())
    value = float(found[1]) * _MANY[found[2].upper()] if found else 0.0
    if not 1 <= value <= 1e18:
        raise InputError(f"`{text}` is no number of tokens", hint="write 2T, 300B or 5e9 as 5B")
    return value


def _money(offer: Offer) -> str:
    return f"$ {offer.money:,.0f}" if offer.money else "?"
