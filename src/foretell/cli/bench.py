"""`foretell bench`: measure this machine, and write what predictions read."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from foretell.cli.lab_package import has_lab, lab_module
from foretell.cli.output import FILE, answer, is_quiet, json_option, say, working


@click.command()
@click.option(
    "-o", "--output", type=FILE, default=Path("bench"), show_default=True,
    help="Folder for the results.",
)  # fmt: skip
@click.option("--ops/--no-ops", default=None, help="Time operators: kernels, and host time.")
@click.option("--links/--no-links", default=True, help="Time collectives between ranks.")
@click.option(
    "--fused/--no-fused", default=False, help="Time fused operators and correct their prices."
)
@click.option("--quick", is_flag=True, help="With --fused: a dozen small regions, to try it out.")
@click.option("--ranks", type=click.IntRange(2, 16), default=2, show_default=True)
@click.option(
    "--networks", default="loopback", show_default=True, help="Emulated networks, by comma."
)
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=120.0, show_default=True,
    help="Time to spend on operators.",
)  # fmt: skip
@click.option("--device", default="auto", show_default=True, help="For operators: cuda or cpu.")
@json_option
def command(
    output: Path, ops: bool | None, links: bool, fused: bool, quick: bool, ranks: int,
    networks: str, seconds: float, device: str, as_json: bool,
) -> None:  # fmt: skip
    """Measure operators, links and collectives here: a table, and a cluster to predict on."""
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"folder": str(output)}
    if links:
        found |= _links(output, ranks, [n.strip() for n in networks.split(",")])
    if ops is None and not has_lab():
        say("operators are not measured: that needs the package foretell-lab")
    elif ops is not False:
        found |= _ops(output, seconds, device)
    if fused:
        found |= _fused(output, seconds, device, quick)
    answer(found, as_json, _text)


def _links(output: Path, ranks: int, networks: list[str]) -> dict[str, Any]:
    from contextlib import ExitStack

    from foretell.pytorch.ranks.links import OPS, SIZES
    from foretell.pytorch.ranks.machine import (
        MACHINE,
        Pools,
        measure_machine,
        refused,
        write,
        write_cluster,
        write_links,
    )
    from foretell.pytorch.ranks.wires import LOOPBACK, network

    why = refused(networks)
    if why:
        say(f"{why}: only loopback is measured")
    names = [LOOPBACK] if why else networks
    steps = len(names) * (1 + len(SIZES) * len(OPS))
    with working("links", steps=steps) as tell, ExitStack() as stack:
        pools = Pools(output, stack)
        machine = measure_machine(pools, [(ranks, name) for name in names], tell)
        pool = pools.pool(ranks, network(names[0]))
        machine["ceilings"] = pool.ask({"do": "ceilings"})[0]
    write(output / MACHINE, machine)
    cluster = write_cluster(output, machine, names[0], ranks)
    fits = [f for f in machine["fits"] if f["ranks"] == ranks]
    return {"links": fits, "cores": machine["cores"], "cluster": str(cluster),
            "table": str(write_links(output, machine))}  # fmt: skip


def _ops(output: Path, seconds: float, device: str) -> dict[str, Any]:
    from foretell.errors import InputError

    bench = lab_module("bench.command")
    path = output / "ops.csv"
    arguments = ["-o", str(path), "--seconds", str(seconds), "--device", device, "--resume"]
    arguments += ["--quiet"] if is_quiet() else []
    with working("operators", about=seconds), contextlib.redirect_stdout(sys.stderr):
        code = bench.main(arguments)
    if code:
        raise InputError("the operators could not be measured", hint="what is wrong stands above")
    return {"ops": str(path), "ops_rows": len(bench.load(path))}


def _fused(output: Path, seconds: float, device: str, quick: bool) -> dict[str, Any]:
    bench = lab_module("fused.bench").bench
    with working("fused ops", about=seconds):
        found: dict[str, Any] = bench(output, device, seconds, quick=quick)
        return found


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words

    lines = []
    for fit in found.get("links", ()):
        lines.append(
            f"{fit['ranks']} x {fit['network']:16} all-reduce: {words.seconds(fit['latency'])} and "
            f"{fit['bandwidth'] / 1e6:.4g} MB/s a link"
        )
    for row in found.get("cores", ()):
        took = f"{row['stretch']:.2f} times as long as its core seconds"
        lines.append(f"{row['ranks']} ranks at work at once: {took}")
    if "fused" in found:
        before, after = found["fused_error"], found["fused_error_tuned"]
        lines.append(
            f"{found['fused_regions']} fused regions: priced {100 * before:.1f} % off in the "
            f"median, {100 * after:.1f} % corrected; export FORETELL_FUSED={found['fused']}"
        )
    for key in ("cluster", "table", "ops", "fused"):
        if key in found:
            lines.append(f"written: {found[key]}")
    return "\n".join(lines)
