"""`foretell export`: a plan as settings of torchtitan, Megatron, DeepSpeed and others."""

from __future__ import annotations

from pathlib import Path

import click

from foretell.cli.output import FILE, answer, json_option, say


@click.command()
@click.argument("plan")
@click.option(
    "--to",
    required=True,
    help="torchtitan, megatron, deepspeed, accelerate, lightning, nanotron, ddp or fsdp2.",
)
@click.option("-o", "--output", type=FILE, help="A folder for the files.")
@json_option
def command(plan: str, to: str, output: Path | None, as_json: bool) -> None:
    """Write PLAN, a file or a text such as dp=4,tp=8, as another program reads it."""
    from foretell.io import write_text
    from foretell.plan import read
    from foretell.plan.export import export

    files = export(read(plan), to)
    if output is None or as_json:
        answer(files, as_json, _text)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(output / name, text)
            say(f"written: {output / name}")


def _text(files: dict[str, str]) -> str:
    if len(files) == 1:
        return next(iter(files.values())).rstrip()
    return "\n".join(f"# {name}\n{text.rstrip()}" for name, text in files.items())
