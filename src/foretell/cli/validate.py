"""`foretell validate`: accuracy figures, recomputed from measured data."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click

from foretell.cli.output import Command, answer, json_option
from foretell.cli.progress import working
from foretell.report.terminal import fitted

PARTS = (
    "kernels",
    "collectives",
    "whatifs",
    "scaling",
    "memory",
    "fused",
)  # what can be validated, and the module in validate/ that does
# CPU-seconds each takes where it takes more than a moment: for the bar alone.
TAKES = {"kernels": 9.0, "whatifs": 28.0, "scaling": 10.0, "memory": 3.0, "capture": 90.0,
         "oracle": 53.0, "fused": 17.0}  # fmt: skip
SHIPPED = {"lab", "agreement"}  # parts whose measurements are in the package, or need none


def _part(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(f"--{name}", "parts", flag_value=name, multiple=True, help=text)


@click.command()
@click.option("--truth", type=click.Path(path_type=Path), help="Folder of measured data.")
@_part("kernels", "Kernel formulas against measured kernels.")
@_part("collectives", "Collective formulas against measured collectives.")
@_part("whatifs", "What-ifs from one trace against the change made and timed.")
@_part("scaling", "Data parallelism from one trace against published throughputs.")
@_part("memory", "Peak memory of what-ifs from one trace against the change made and measured.")
@_part("capture", "Steps captured from the model alone against steps run and timed.")
@_part("oracle", "Layouts and memory from the model alone against runs of others.")
@_part("agreement", "Built-in models against captures of the same: parameters, flop, steps.")
@_part("fused", "Prices of fused ops against measured ones.")
@_part("lab", "Plans on small networks against runs of the laboratory, which are shipped.")
@json_option
def command(truth: Path | None, parts: tuple[str, ...], as_json: bool) -> None:
    """Hold predictions against measurements and print the errors; all parts unless named."""
    from foretell.validate import truth_folder

    folder = None if parts and set(parts) <= SHIPPED else truth_folder(truth)
    asked = parts or PARTS
    for k, part in enumerate(asked, 1):
        module = import_module(f"foretell.validate.{part}")
        with working(f"validating {part} ({k} of {len(asked)})", about=TAKES.get(part, 0.0)):
            found = {"part": part, **module.report(folder)}
        answer(found, as_json, lambda a: fitted(a["text"]))
