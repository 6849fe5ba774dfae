"""Commands that take a step or run a training script: which arguments are whose, and loading it.

What stands behind the script's name is the script's own, as with `python` and `torchrun`. Options
of foretell's may stand there too, unless the script itself knows an option of that name. Behind
`--` everything is the script's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretell.cli.output import reading, say, working
from foretell.errors import InputError
from foretell.io import limits, read_bytes

if TYPE_CHECKING:
    from foretell.api import Step


class ScriptCommand(click.Command):
    """A command `[OPTIONS] SCRIPT [ARGS]…` that leaves to the script what is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        mine, script, rest = self._split(args)
        if script is None:
            return super().parse_args(ctx, mine)
        own, theirs = self._sorted(rest, _source(script))
        return super().parse_args(ctx, [*mine, *own, "--", script, *theirs])

    def _split(self, args: list[str]) -> tuple[list[str], str | None, list[str]]:
        """Options before the script, the script, and what stands behind it."""
        k = 0
        while k < len(args) and args[k].startswith("-") and args[k] != "--":
            k += self._width(args[k])
        if k < len(args) and args[k] == "--":
            k += 1
        if k >= len(args):
            return args, None, []
        return [a for a in args[:k] if a != "--"], args[k], args[k + 1 :]

    def _sorted(self, rest: list[str], source: str) -> tuple[list[str], list[str]]:
        """Arguments behind the script's name: foretell's options, and the script's own."""
        own: list[str] = []
        theirs: list[str] = []
        k = 0
        while k < len(rest) and rest[k] != "--":
            name = rest[k].partition("=")[0]
            is_ours = name in self._options() and not _names(source, name)
            width = self._width(rest[k]) if is_ours else 1
            (own if is_ours else theirs).extend(rest[k : k + width])
            k += width
        return own, theirs + rest[k + 1 :]

    def _width(self, text: str) -> int:
        """How many words an option takes: itself, and its value where that stands apart."""
        option = self._options().get(text.partition("=")[0])
        takes = option is not None and not option.is_flag and not option.count
        return 2 if takes and "=" not in text else 1

    def _options(self) -> dict[str, click.Option]:
        found = [p for p in self.params if isinstance(p, click.Option)]
        helps = click.Option(["-h", "--help"], is_flag=True)
        return {name: p for p in (*found, helps) for name in (*p.opts, *p.secondary_opts)}


class StepCommand(click.Command):
    """A command on a step or a workload whose script may be passed arguments, behind `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        k = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGS] = tuple(args[k + 1 :])
        return super().parse_args(ctx, args[:k])


_ARGS = "foretell.script_args"


def script_args() -> tuple[str, ...]:
    """The arguments behind `--`, for the script of a step."""
    context = click.get_current_context(silent=True)
    return tuple(context.meta.get(_ARGS, ())) if context else ()


def _source(script: str) -> str:
    try:
        return read_bytes(script, limits().config, "script").decode("utf-8", "replace")
    except InputError:
        return ""


def _names(source: str, option: str) -> bool:
    """Whether a script's text knows an option of that name."""
    return any(f"{quote}{option}{quote}" in source for quote in "\"'")


def module_option(command: Any) -> Any:
    """`-m`: SCRIPT is the name of a module, as with `python -m`."""
    text = "The script is the name of a module, as with python -m."
    return click.option("-m", "--module", "is_module", is_flag=True, help=text)(command)


def show_option(command: Any) -> Any:
    """`--show-output`: what the script prints goes to stderr."""
    text = "Let through what the script prints, on stderr."
    return click.option("--show-output", "show", is_flag=True, help=text)(command)


def command_line(workload: str, is_module: bool) -> str:
    """A workload with the arguments of its script, as one text."""
    import shlex

    from foretell.api.step import arguments_for_none, is_script

    args = script_args()
    if not (args or is_module):
        return workload
    if not is_script(workload, is_module):
        raise arguments_for_none(workload)
    return shlex.join([*(["-m"] if is_module else []), workload, *args])


def load_step(
    file: Path, cluster: str | None, real: float | None = None, is_module: bool = False
) -> Step:
    """The step in a file; `real` is the time of an un-profiled step, for traces."""
    from foretell.api import Step
    from foretell.api.step import arguments_for_none

    is_script = is_module or file.suffix == ".py" or ".py:" in str(file)
    if script_args() and not is_script:
        raise arguments_for_none(str(file))
    shown = working(f"running {file.name}") if is_script else reading(file)
    with shown as tell:
        step = Step.load(
            file, cluster, args=script_args(), is_module=is_module, unprofiled=real, progress=tell
        )
    for remark in step.remarks:
        say(remark)
    return step
