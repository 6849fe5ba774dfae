"""`foretell completion`: the line that turns on completion in a shell."""

from __future__ import annotations

import click

_LINES = {
    "bash": 'eval "$(_FORETELL_COMPLETE=bash_source foretell)"',
    "zsh": 'eval "$(_FORETELL_COMPLETE=zsh_source foretell)"',
    "fish": "_FORETELL_COMPLETE=fish_source foretell | source",
}


@click.command()
@click.argument("shell", type=click.Choice(sorted(_LINES)))
def command(shell: str) -> None:
    """Print the line to add to your shell's start-up file."""
    click.echo(_LINES[shell])
