"""`foretell tune-ddp`: the buckets of DistributedDataParallel, searched and then measured."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from foretell.cli.output import FILE, answer, json_option, working

LEAST = 0.01  # a gain below this is not worth a line: runs differ by as much
ALWAYS = ("default", "searched", "one bucket")  # measured whatever is predicted
TRIED = 4  # in all: as many copies of the model are held at once


@click.command()
@click.argument("script", type=FILE)
@click.option("-n", "--ranks", type=click.IntRange(min=2), default=2, show_default=True)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Steps of a measured run.",
)
@click.option("--rounds", type=click.IntRange(min=2), default=5, show_default=True)
@click.option("--network", default="loopback", help="Emulate a link: 200mbit (Linux, root).")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="By default cuda where there is one."
)
@click.option(
    "--timeout-s", type=float, default=600.0, show_default=True, help="Limit of each run."
)
@json_option
def command(
    script: Path, ranks: int, steps: int, rounds: int, network: str, device: str | None,
    timeout_s: float, as_json: bool,
) -> None:  # fmt: skip
    """Find buckets for DistributedDataParallel that make SCRIPT's step shorter, and prove it.

    Profiles the ranks, searches, and takes short measured runs beside DDP's default. Prints the
    one line to add, or that the default is best. SCRIPT is as for `foretell run`: model() and
    batch(rank, size).
    """
    from foretell.pytorch.tune.launch import TuneRequest, measure
    from foretell.search.fusion.lanes import candidates

    request = TuneRequest(
        str(script), steps=steps, rounds=rounds, device=device or "", network=network
    )
    with working("profiling") as tell:
        profile, wire = profiled(measure(request, ranks, timeout_s, tell), ranks)
        tried = _to_measure(candidates(profile, wire))
    with working(f"measuring {len(tried)} ways") as tell:
        caps = tuple(c.caps for c in tried)
        found = measure(replace(request, candidates=caps), ranks, timeout_s, tell)
    medians = [[statistics.median(took) for took in way] for way in found["rounds"]]
    answer(_choose(tried, medians), as_json, _text)


def _to_measure(found: list[Any]) -> list[Any]:
    """Candidates to measure: the default, the extremes, and the best predicted of the rest."""
    first = [c for c in found if c.name in ALWAYS]
    rest = [c for c in found if c.name not in ALWAYS]
    return first + rest[: max(TRIED - len(first), 0)]


def profiled(found: dict[str, Any], ranks: int) -> tuple[Any, Any]:
    """The profile in order of readiness, and the wire's law."""
    import numpy as np

    from foretell.search.fusion.lanes import Profile
    from foretell.search.fusion.problem import measured_wire

    rows = sorted(found["gradients"], key=lambda g: g["ready_s"])
    ready, sizes = (np.array([g[key] for g in rows], float) for key in ("ready_s", "bytes"))
    profile = Profile(ready, sizes, found["compute_s"], found["update_s"])
    sent, took = np.array(found["wire"], float).T
    return profile, measured_wire(sent, took, ranks)


def _choose(tried: list[Any], rounds: list[list[float]]) -> dict[str, Any]:
    """The quickest, if it beat the default in all rounds but one, and by more than runs differ."""
    default = rounds[0]
    rows = []
    for way, times in zip(tried, rounds, strict=True):
        ratios = [d / t for d, t in zip(default, times, strict=True)]
        rows.append(
            {
                "name": way.name,
                "caps_mb": list(way.caps),
                "buckets": way.messages,
                "predicted_gain": tried[0].step / way.step - 1,
                "step_s": statistics.median(times),
                "gain": statistics.median(ratios) - 1,
                "gain_low": min(ratios) - 1,
                "gain_high": max(ratios) - 1,
                "won": sum(r > 1 for r in ratios),
            }
        )
    sure = [r for r in rows[1:] if r["gain"] >= LEAST and r["won"] >= len(default) - 1]
    best = max(sure, key=lambda r: r["gain"], default=rows[0])
    line = f"bucket_cap_mb_list=[{', '.join(f'{c:g}' for c in best['caps_mb'])}]"
    return {
        "keep_default": best is rows[0],
        "line": "" if best is rows[0] else line,
        "caps_mb": best["caps_mb"],
        "gain": best["gain"],
        "gain_low": best["gain_low"],
        "gain_high": best["gain_high"],
        "default_s": rows[0]["step_s"],
        "tuned_s": best["step_s"],
        "rounds": len(default),
        "candidates": rows,
    }


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words

    rows = [
        (
            r["name"],
            str(r["buckets"]),
            words.seconds(r["step_s"]),
            f"{100 * r['gain']:+.1f} %",
            f"{100 * r['gain_low']:+.0f} to {100 * r['gain_high']:+.0f} %",
            f"{100 * r['predicted_gain']:+.1f} %",
            f"{r['won']} of {found['rounds']}",
        )
        for r in found["candidates"]
    ]
    head = ("buckets", "number>", "step>", "gain>", "rounds>", "predicted>", "won>")
    if found["keep_default"]:
        last = "keep the default: nothing tried was surely faster"
    else:
        last = (
            f"DistributedDataParallel(model, {found['line']})\n"
            f"measured {100 * found['gain']:.1f} % faster: {words.seconds(found['default_s'])} → "
            f"{words.seconds(found['tuned_s'])} a step; {found['rounds']} rounds in turns from "
            f"{100 * found['gain_low']:+.1f} to {100 * found['gain_high']:+.1f} %"
        )
    return f"{words.table(head, rows)}\n\n{last}"
