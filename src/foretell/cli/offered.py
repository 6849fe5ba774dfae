"""Shell completion of names: what-ifs, planners, strategies, clusters.

Loaded when a user presses Tab; the options of a spec are for the user to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import click

from foretell.cli.script import command_line, module_option
from foretell.errors import InputError

Offer = Callable[[click.Context, click.Parameter, str], list[Any]]


def _offered(names: Callable[[], Iterable[str]], *, or_files: bool = False) -> Offer:
    """Completions: names that begin with the typed text, or else files."""

    def offer(_: click.Context, __: click.Parameter, begun: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name) for name in sorted(names()) if name.startswith(begun)]
        return found or ([CompletionItem(begun, type="file")] if or_files else [])

    return offer


def _whatifs() -> Iterable[str]:
    from foretell.whatif import WHATIFS

    return WHATIFS


def _planners() -> Iterable[str]:
    from foretell.search.kit import PLANNERS

    return PLANNERS


def _explained() -> Iterable[str]:
    from foretell.search.oracle.scale import STRATEGIES

    return {*_whatifs(), *_planners(), *STRATEGIES}


def _models() -> Iterable[str]:
    from foretell.workload.load import names

    return names()


def _presets() -> Iterable[str]:
    from foretell.cluster.read import names

    return names()


changes, planners, names = _offered(_whatifs), _offered(_planners), _offered(_explained)
models, clusters = _offered(_models, or_files=True), _offered(_presets, or_files=True)


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
