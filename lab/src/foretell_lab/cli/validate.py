"""`foretell validate`: accuracy figures, recomputed from measured data."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

from foretell.cli.output import Command, answer, json_option, working
from foretell.report.words import fitted

# What can be validated, each by the module of its name in validate/, and the CPU-seconds it takes:
# for the bar alone.
PARTS = {"kernels": 9.0, "collectives": 0.0, "whatifs": 28.0, "scaling": 10.0, "memory": 3.0,
         "capture": 90.0, "oracle": 53.0, "agreement": 40.0, "fused": 17.0, "lab": 5.0,
         "unseen": 30.0, "intervals": 60.0, "refit": 120.0, "pages": 60.0}  # fmt: skip
ONLY_NAMED = {"refit", "pages", "intervals"}  # parts that run only where they are named
SHIPPED = {"lab", "agreement"}  # parts whose measurements are in the package, or need none
CAPTURED = {"capture", "agreement"}  # parts that run PyTorch programs


def _part(name: str, text: str, *, word: str = "") -> Callable[[Command], Command]:
    words = (f"--{word}",) if word else ()
    return click.option(*words, f"--{name}", "parts", flag_value=name, multiple=True, help=text)


@click.command()
@click.option("--truth", type=click.Path(path_type=Path), help="Folder of measured data.")
@_part("kernels", "Kernel formulas against measured kernels.")
@_part("collectives", "Collective formulas against measured collectives.")
@_part("whatifs", "What-ifs from one trace against the change made and timed.", word="whatif")
@_part("scaling", "Data parallelism from one trace against published throughputs.")
@_part("memory", "Peak memory of what-ifs from one trace against the change made and measured.")
@_part("capture", "Steps captured from the model alone against steps run and timed.")
@_part("oracle", "Layouts and memory from the model alone against runs of others.")
@_part("agreement", "Built-in models against captures of the same: parameters, flop, steps.")
@_part("fused", "Prices of fused ops against measured ones.")
@_part("lab", "Plans on small networks against runs of the laboratory, which are shipped.")
@_part("unseen", "Predictions for sources that no constant was fitted to.")
@_part("intervals", "Widths of intervals, fitted with each unseen source left out in turn.")
@_part(
    "refit", "Constants fitted again without the source of --leave-out, and that source's errors."
)
@_part("pages", "Write docs/accuracy: a page for each unseen source.")
@click.option("--leave-out", metavar="SOURCE", default="", help="With --refit: the source.")
@json_option
def command(truth: Path | None, parts: tuple[str, ...], leave_out: str, as_json: bool) -> None:
    """Compare predictions with measurements and print the errors; all parts unless named."""
    from foretell_lab.validate import truth_folder

    wanted = parts or (("refit",) if leave_out else _possible())
    folder = None if set(wanted) <= SHIPPED else truth_folder(truth)
    for k, part in enumerate(wanted, 1):
        module = import_module(f"foretell_lab.validate.{part}")
        with working(f"validating {part} ({k} of {len(wanted)})", about=PARTS[part]):
            more = {"leave_out": leave_out} if part == "refit" else {}
            found = {"part": part, **module.report(folder, **more)}
        answer(found, as_json, lambda a: fitted(a["text"]))


def _possible() -> tuple[str, ...]:
    """All parts; without PyTorch those that need none, and a word on the others."""
    every = tuple(part for part in PARTS if part not in ONLY_NAMED)
    if find_spec("torch"):
        return every
    click.echo(f"left out, for want of PyTorch: {', '.join(sorted(CAPTURED))}", err=True)
    return tuple(part for part in every if part not in CAPTURED)
