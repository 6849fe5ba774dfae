"""What a shell offers where a name is wanted: what-ifs, planners, strategies, clusters.

Loaded when a user presses Tab; the options of a spec are for the user to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import click

from foretell.cli.script import command_line, module_option
from foretell.errors import InputError


def changes(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Names of what-ifs."""
    from foretell.whatif import WHATIFS

    return _starting(WHATIFS, begun)


def names(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """All that `foretell explain` knows."""
    from foretell.search.kit import PLANNERS
    from foretell.search.oracle.scale import STRATEGIES
    from foretell.whatif import WHATIFS

    return _starting({*WHATIFS, *PLANNERS, *STRATEGIES}, begun)


def planners(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Names of planners."""
    from foretell.search.kit import PLANNERS

    return _starting(PLANNERS, begun)


def models(_: click.Context, __: click.Parameter, begun: str) -> list[Any]:
    """Names of shipped models and families, and files."""
    from click.shell_completion import CompletionItem

    from foretell.workload.load import names as known

    found = _starting(known(), begun)
    return [CompletionItem(name) for name in found] or [CompletionItem(begun, type="file")]


def clusters(_: click.Context, __: click.Parameter, begun: str) -> list[Any]:
    """Names of presets, and files."""
    from click.shell_completion import CompletionItem

    from foretell.cluster.read import names as presets

    found = _starting(presets(), begun)
    return [CompletionItem(name) for name in found] or [CompletionItem(begun, type="file")]


def _starting(known: Iterable[str], begun: str) -> list[str]:
    return sorted(name for name in known if name.startswith(begun))


def workload_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """WORKLOAD, or `--model` with a model id, a folder or a shipped name."""

    @wraps(command)
    def chosen(
        *args: Any, workload: str | None, model: str | None, is_module: bool, **more: Any
    ) -> Any:
        if workload and model:
            raise InputError(
                f"both a workload, `{workload}`, and --model {model}", hint="give one of them"
            )
        named = command_line(workload, is_module) if workload else model
        return command(*args, workload=named, **more)

    help_ = "Instead of WORKLOAD: a model id in the local cache, a folder, or a shipped name."
    given = click.argument("workload", required=False, shell_complete=models)(chosen)
    given = module_option(given)
    made: Callable[..., Any] = click.option("--model", shell_complete=models, help=help_)(given)
    return made


def require_workload(workload: str | None) -> str:
    """The workload, or an error that says how to name one."""
    if workload:
        return workload
    raise InputError(
        "no WORKLOAD is given",
        hint="name a script, a config.json, a model such as llama-3.1-8b, or gpt:layers=24,…",
    )
