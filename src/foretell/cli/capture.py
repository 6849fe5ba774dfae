"""`foretell capture`: a training step from a model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option, say


@click.command()
@click.argument("what")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("step.graph"),
    show_default=True, help="Where to write the graph (.graph, .txt).",
)  # fmt: skip
@click.option("--batch", type=int, help="Samples a step, where the function takes `batch`.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, help="That share the batch.")
@click.option("--optimizer", help="adamw, sgd:kind=loop, adam:kind=fused; instead of the script's.")
@click.option("--autocast", default="", help="Mixed precision for forward and loss: bf16, fp16.")
@click.option("--tf32/--no-tf32", default=None, help="fp32 products as tf32; else as torch is set.")
@click.option("--share", type=float, help="Share of elements that masks pick, for routing.")
@click.option("--kernels-of", default="h200", show_default=True, help="Device that runs it.")
@click.option("--device", default="", help="cuda, or cpu where a GPU cannot be pretended.")
@json_option
def command(what: str, output: Path, batch: int | None, as_json: bool, **options: Any) -> None:
    """Write the graph of one training step of WHAT: forward, loss, backward and optimizer.

    WHAT is a script with model() and batch(), or train.py:make where make() answers (model, batch,
    loss, optimizer). Runs on fake tensors: no GPU, no weights, no data.
    """
    from foretell.cli.progress import working
    from foretell.graph import save

    with working(f"capturing {Path(what).name}") as tell:
        tell("loading torch and the script")
        graph = _captured(what, batch, {**options, "progress": tell})
        save(graph, output)
    answer(_summary(graph), as_json, _text)
    say(f"written: {output}")


def _captured(what: str, batch: int | None, options: dict[str, Any]) -> Any:
    capture, find = _loaded()
    parts = find(what, batch, options.pop("ranks"))
    optimizer = options.pop("optimizer") or parts.optimizer
    return capture(
        *(parts.model, parts.batch, parts.loss, optimizer),
        on=options.pop("kernels_of"),
        real=parts.real,
        **options,
    )


def _summary(graph: Any) -> dict[str, Any]:
    from foretell.report.summary import graph_summary

    phases = ("forward", "loss", "backward", "update")
    by_phase = {phase: graph.select(kind="kernel", phase=phase) for phase in phases}
    return {
        **graph_summary(graph),
        "parameters": graph.facts["parameters"],
        "peak_bytes": graph.facts["peak_bytes"],
        "phases": {
            phase: {
                "kernels": len(tasks),
                "flops": float(graph.flops[tasks].sum()),
                "bytes": float(graph.bytes[tasks].sum()),
            }
            for phase, tasks in by_phase.items()
        },
        "assumed": list(graph.facts.get("assumed", ())),
    }


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words
    from foretell.report.terminal import table

    head = (
        f"{found['facts']['captured']}: {found['parameters']:,} parameters, "
        f"{found['tasks']:,} tasks, peak memory {words.size(found['peak_bytes'])}"
    )
    rows = [
        (phase, f"{p['kernels']:,}", f"{p['flops'] / 1e9:,.1f}", words.size(p["bytes"]))
        for phase, p in found["phases"].items()
    ]
    taken = [f"assumed the data of {text}" for text in found["assumed"]]
    return "\n".join([head, table(("phase", "kernels>", "GFLOP>", "moved>"), rows), *taken])


def _loaded() -> tuple[Any, Any]:
    from foretell.errors import InputError

    try:
        from foretell.pytorch.capture import capture
        from foretell.pytorch.capture.source import find
    except ModuleNotFoundError as error:
        raise InputError(
            f"a capture needs PyTorch: {error}", hint="pip install 'foretell[torch]'"
        ) from None
    return capture, find
