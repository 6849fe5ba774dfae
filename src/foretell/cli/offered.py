"""Shell completion of names: what-ifs, planners, strategies, clusters.

Loaded when a user presses Tab; the options of a spec are for the user to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from typing import Any

import click

from foretell.cli.script import command_line, module_option
from foretell.errors import InputError

Offer = Callable[[click.Context, click.Parameter, str], list[Any]]


# Names that are offered: the module and the table or function that has them.
_WHATIFS, _PLANNERS = ("foretell.whatif", "WHATIFS"), ("foretell.search.kit", "PLANNERS")
_STRATEGIES = ("foretell.search.oracle.scale", "STRATEGIES")
_MODELS, _CLUSTERS = ("foretell.workload.load", "names"), ("foretell.cluster.read", "names")


def _names(module: str, name: str) -> Iterable[str]:
    found = getattr(import_module(module), name)
    names: Iterable[str] = found() if callable(found) else found
    return names


def _offered(*tables: tuple[str, str], or_files: bool = False) -> Offer:
    """Completions: names that begin with the typed text, or else files."""

    def offer(_: click.Context, __: click.Parameter, begun: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        names = {name for table in tables for name in _names(*table)}
        found = [CompletionItem(name) for name in sorted(names) if name.startswith(begun)]
        return found or ([CompletionItem(begun, type="file")] if or_files else [])

    return offer


changes, planners = _offered(_WHATIFS), _offered(_PLANNERS)
names = _offered(_WHATIFS, _PLANNERS, _STRATEGIES)
models, clusters = _offered(_MODELS, or_files=True), _offered(_CLUSTERS, or_files=True)


def cluster_option(text: str, *, required: bool = False) -> Callable[[Any], Any]:
    """`--on`, the cluster."""
    return click.option("--on", "cluster", shell_complete=clusters, required=required, help=text)


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
