"""Steps captured from the model alone, priced on an H200, compared with the step run and timed.

`h200/truth.json` has the un-profiled time and the peak memory of each model's variants. Models are
the samples of `foretell_lab.samples`; nothing is known of the traces. A truth is an interval
(two ways of timing it); an error counts from the nearer end. A step whose host takes longer than
its device is told apart: hosts of one kind differ by a quarter and more, and this one between two
runs of the same (Swin-T in AMP takes as long with a fused optimizer as with a loop, BERT 11 %
longer in fp16 than in bf16). So such rows are given twice: as priced, and with the host's speed
from one run (`ANCHOR`), which is then left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.baseline import steady_seconds
from foretell.cluster import Calibration, Cluster, load
from foretell.cost import price
from foretell.errors import InputError
from foretell.graph import Graph, Kind

# The model's name in the truth and among the samples.
MODELS = {
    "resnet50": "resnet50",
    "vgg16": "vgg16",
    "mobilenet_v3_large": "mobilenet_v3_large",
    "gpt2": "gpt2",
    "bert_base": "bert",
    "swin_t": "swin_t",
}
# What each variant asks of a capture; `kind` is the optimizer's.
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "tf32": {"tf32": True},
    "amp_bf16": {"autocast": "bf16"},
    "opt_foreach": {"kind": "foreach"},
    "opt_fused": {"kind": "fused"},
    "amp_bf16+fused": {"autocast": "bf16", "kind": "fused"},
    "batch_half": {},
    "batch_x2": {},
}


ANCHOR = ("resnet50", "amp_bf16")  # its host takes half as long again as its kernels


@dataclass(frozen=True)
class Row:
    """One variant of one model."""

    model: str
    variant: str
    low: float
    high: float
    predicted: float
    device: float  # seconds of all kernels
    host: float  # seconds of all host tasks
    peak: float  # bytes, measured
    predicted_peak: float
    calibrated: float  # seconds with the host's speed from the anchor

    @property
    def error(self) -> float:
        """Relative error of the step time, from the nearer end of what was measured."""
        return self._off(self.predicted)

    @property
    def calibrated_error(self) -> float:
        """The same with the host's speed from the anchor."""
        return self._off(self.calibrated)

    def _off(self, predicted: float) -> float:
        return predicted / min(max(predicted, self.low), self.high) - 1

    @property
    def peak_error(self) -> float:
        return self.predicted_peak / self.peak - 1

    @property
    def waits_for_host(self) -> bool:
        """Whether, by what was measured, the device alone cannot be what takes so long."""
        return self.low > 1.15 * self.device


def report(truth: Path) -> dict[str, Any]:
    """Every variant of every model, as values and as text."""
    rows = list(_rows(truth))
    values = [
        asdict(r)
        | {"error": r.error, "calibrated_error": r.calibrated_error, "peak_error": r.peak_error}
        for r in rows
    ]
    return {"rows": values, "text": "\n".join(_lines(rows))}


def _rows(truth: Path) -> Iterator[Row]:
    path = truth / "h200" / "truth.json"
    try:
        known = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        raise InputError(f"no measured variants at `{path}`") from None
    cluster = load("h200")
    calibrated = cluster.calibrated(Calibration(host=_host(known, cluster)))
    for row in known:
        if row["model"] in MODELS and row["variant"] in VARIANTS:
            yield _row(row, cluster, calibrated)


def _host(known: list[dict[str, Any]], cluster: Cluster) -> float:
    """How many times as long as priced the anchor's host took."""
    row = next(r for r in known if (r["model"], r["variant"]) == ANCHOR)
    graph = price(captured(row["model"], row["variant"], row["batch"]), cluster)
    return float(row["low_ms"]) / 1e3 / float(graph.seconds[graph.kind == Kind.HOST].sum())


def _row(truth: dict[str, Any], cluster: Cluster, calibrated: Cluster) -> Row:
    step = captured(truth["model"], truth["variant"], truth["batch"])
    graph = price(step, cluster)
    on_host = graph.kind == Kind.HOST
    return Row(
        truth["model"],
        truth["variant"],
        truth["low_ms"] / 1e3,
        truth["high_ms"] / 1e3,
        steady_seconds(graph),
        float((graph.seconds + graph.gap)[~on_host].sum()),
        float(graph.seconds[on_host].sum()),
        truth["peak_mib"] * 2**20,
        float(graph.facts["peak_bytes"]),
        steady_seconds(price(step, calibrated)),
    )


def captured(model: str, variant: str, batch: int) -> Graph:
    """A variant of a model as a graph; the loop over parameters is the base's optimizer."""
    from foretell.pytorch.capture import capture
    from foretell_lab import samples

    said = VARIANTS[variant]
    sample = getattr(samples, MODELS[model])(batch=batch)
    name, _, more = sample.optimizer.partition(":")
    options = ",".join(filter(None, [f"kind={said.get('kind', 'loop')}", more]))
    return capture(
        sample.model,
        sample.batch,
        sample.loss,
        f"{name}:{options}",
        autocast=said.get("autocast", ""),
        tf32=bool(said.get("tf32")),
    )


def _lines(rows: list[Row]) -> Iterator[str]:
    for r in rows:
        host = "host" if r.waits_for_host else ""
        yield (
            f"{r.model:19}{r.variant:15}{1e3 * r.low:6.1f}–{1e3 * r.high:5.1f} ms  "
            f"predicted {1e3 * r.predicted:6.1f} {r.error:+6.1%} {host:4}"
            f"  peak {r.peak / 2**20:6.0f} MiB {r.peak_error:+6.1%}"
        )
    yield "host: the measured step takes longer than its kernels"
    yield ""
    yield _summary("time, bound by the device", [r.error for r in rows if not r.waits_for_host])
    waiting = [r for r in rows if r.waits_for_host]
    others = [r.calibrated_error for r in waiting if (r.model, r.variant) != ANCHOR]
    yield _summary("time, bound by the host", [r.error for r in waiting])
    yield _summary("time, bound by the host, fitted", others)
    yield _summary("time, base alone", [r.error for r in rows if r.variant == "base"])
    yield _summary("peak memory", [r.peak_error for r in rows])


def _summary(name: str, errors: list[float]) -> str:
    size = np.abs(errors)
    if not len(size):
        return f"{name:32} no rows"
    return (
        f"{name:32} {len(size):3} rows  median {np.median(size):5.1%}  mean {size.mean():5.1%}  "
        f"worst {size.max():5.1%}"
    )
