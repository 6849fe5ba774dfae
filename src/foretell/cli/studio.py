"""`foretell studio`: the page that answers what-ifs and plans live."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path

import click

from foretell.cli.output import FILE, real_option, say, working


@click.command()
@click.argument("files", nargs=-1, type=FILE)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="By default a free one.")
@click.option("--most-mib", type=click.IntRange(min=1), default=256, show_default=True,
              help="Limit of uploads.")  # fmt: skip
@real_option
@click.option("--open/--no-open", "opens", default=True, help="Open a browser at the page.")
def command(
    files: tuple[Path, ...], port: int, most_mib: int, real: float | None, opens: bool
) -> None:
    """Serve a page on this machine with FILES (traces, graphs) loaded, until Ctrl-C."""
    from foretell.studio import serve

    with working("starting"):
        running = serve(files, port, most_mib * 2**20, real)
    click.echo(running.url)
    say("Only this machine can reach it, and only with that address. Ctrl-C ends it.")
    if opens:
        webbrowser.open(running.url)
    try:
        threading.Event().wait()
    finally:
        running.close()
