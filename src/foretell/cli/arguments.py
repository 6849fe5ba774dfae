"""What commands take: a step, a training script with its own arguments, a workload, a cluster.

What stands behind the script's name is the script's own, as with `python` and `torchrun`. Options
of foretell's may stand there too, unless the script itself knows an option of that name. Behind
`--` everything is the script's. Names of what-ifs, planners, models and clusters are completed in
a shell; they are loaded when a user presses Tab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretell.cli.output import reading, say, working
from foretell.errors import InputError
from foretell.io import limits, read_bytes

if TYPE_CHECKING:
    from foretell.api import Step


Offer = Callable[[click.Context, click.Parameter, str], list[Any]]
_IS_MODULE = "The script is the name of a module, as with python -m."
_ARGS, _MODEL, _MODULE = "foretell.script_args", "foretell_model", "foretell_module"


class ScriptCommand(click.Command):
    """A command `[OPTIONS] SCRIPT [ARGS]…` that leaves to the script what is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        mine, script, rest = self._split(args)
        if script is None:
            return super().parse_args(ctx, mine)
        own, theirs = self._split_options(rest, _source(script))
        return super().parse_args(ctx, [*mine, *own, "--", script, *theirs])

    def _split(self, args: list[str]) -> tuple[list[str], str | None, list[str]]:
        """Options before the script, the script, and what stands behind it."""
        k = 0
        while k < len(args) and args[k].startswith("-") and args[k] != "--":
            k += self._num_words(args[k])
        if k < len(args) and args[k] == "--":
            k += 1
        if k >= len(args):
            return args, None, []
        return [a for a in args[:k] if a != "--"], args[k], args[k + 1 :]

    def _split_options(self, rest: list[str], source: str) -> tuple[list[str], list[str]]:
        """Arguments behind the script's name: foretell's options, and the script's own."""
        own: list[str] = []
        theirs: list[str] = []
        k = 0
        while k < len(rest) and rest[k] != "--":
            name = rest[k].partition("=")[0]
            is_ours = name in self._options() and not _mentions(source, name)
            width = self._num_words(rest[k]) if is_ours else 1
            (own if is_ours else theirs).extend(rest[k : k + width])
            k += width
        return own, theirs + rest[k + 1 :]

    def _num_words(self, text: str) -> int:
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


def script_args() -> tuple[str, ...]:
    """The arguments behind `--`, for the script of a step."""
    context = click.get_current_context(silent=True)
    return tuple(context.meta.get(_ARGS, ())) if context else ()


def _source(script: str) -> str:
    try:
        return read_bytes(script, limits().config, "script").decode("utf-8", "replace")
    except InputError:
        return ""


def _mentions(source: str, option: str) -> bool:
    """Whether a script's text knows an option of that name."""
    return any(f"{quote}{option}{quote}" in source for quote in "\"'")


def module_option(command: Any) -> Any:
    """`-m`: SCRIPT is the name of a module, as with `python -m`."""
    return click.option("-m", "--module", "is_module", is_flag=True, help=_IS_MODULE)(command)


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


# Names that are offered: the module and the table or function that has them.
_WHATIFS, _PLANNERS = ("foretell.whatif", "WHATIFS"), ("foretell.search.kit", "PLANNERS")
_STRATEGIES = ("foretell.search.oracle.scale", "STRATEGIES")
_MODELS, _CLUSTERS = ("foretell.workload.load", "names"), ("foretell.cluster.read", "names")


def _names_in(module: str, name: str) -> Iterable[str]:
    found = getattr(import_module(module), name)
    names: Iterable[str] = found() if callable(found) else found
    return names


def _completer(*tables: tuple[str, str], or_files: bool = False) -> Offer:
    """Completions: names that begin with the typed text, or else files."""

    def offer(_: click.Context, __: click.Parameter, begun: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        names = {name for table in tables for name in _names_in(*table)}
        found = [CompletionItem(name) for name in sorted(names) if name.startswith(begun)]
        return found or ([CompletionItem(begun, type="file")] if or_files else [])

    return offer


changes, planners = _completer(_WHATIFS), _completer(_PLANNERS)
names = _completer(_WHATIFS, _PLANNERS, _STRATEGIES)
models, clusters = _completer(_MODELS, or_files=True), _completer(_CLUSTERS, or_files=True)


def cluster_option(text: str, *, required: bool = False) -> Callable[[Any], Any]:
    """`--on`, the cluster."""
    return click.option("--on", "cluster", shell_complete=clusters, required=required, help=text)


def workload_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """WORKLOAD, or `--model` with a model id, a folder or a shipped name, as one argument."""
    help_ = "Instead of WORKLOAD: a model id in the local cache, a folder, or a shipped name."
    given = click.argument("workload", required=False, shell_complete=models, callback=_workload)
    hidden: dict[str, Any] = {"expose_value": False, "is_eager": True, "callback": _store_value}
    model = click.option("--model", _MODEL, shell_complete=models, help=help_, **hidden)
    module = click.option("-m", "--module", _MODULE, is_flag=True, help=_IS_MODULE, **hidden)
    made: Callable[..., Any] = given(model(module(command)))
    return made


def _store_value(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    context.meta[parameter.name or ""] = value


def _workload(context: click.Context, _: click.Parameter, workload: str | None) -> str | None:
    """What WORKLOAD or `--model` names, with the arguments of a script."""
    model, is_module = context.meta.get(_MODEL), bool(context.meta.get(_MODULE))
    if workload and model:
        raise InputError(
            f"both a workload, `{workload}`, and --model {model}", hint="give one of them"
        )
    return command_line(workload, is_module) if workload else model


def require_workload(workload: str | None) -> str:
    """The workload, or an error that says how to name one."""
    if workload:
        return workload
    raise InputError(
        "no WORKLOAD is given",
        hint="name a script, a config.json, a model such as llama-3.1-8b, or gpt:layers=24,…",
    )
