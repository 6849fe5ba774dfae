"""The `foretell` command: its subcommands are loaded when they are used, so that help is quick."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from foretell import __version__
from foretell.cli.lab_package import lab_module
from foretell.cli.output import quiet_option
from foretell.errors import ForetellError, unknown
from foretell.io import shown

MOST_LINE, MOST_LINES = 2000, 60  # letters and lines of an error

# name -> (module, one line of help), in groups by what a person has in hand.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "A training step you have": {
        "whatif": ("whatif", "What changes would do to a step, without making them."),
        "advise": ("advise", "Every change that applies to a step, tried and ranked."),
        "report": ("report", "One page on a step: bottleneck, remedies, layouts, plans."),
        "studio": ("studio", "The same page live: toggle what-ifs, explore plans."),
        "replay": ("replay", "Simulate a trace unchanged and compare with the measured step."),
        "profile": ("profile", "Run a training script until its step is timed and traced."),
        "capture": ("capture", "A step from a script or model alone: no GPU, no weights."),
    },
    "A model and a cluster": {
        "predict": ("predict", "One plan: step time, memory, MFU, bottleneck."),
        "oracle": ("oracle", "Every parallel strategy by number of GPUs: time, memory, cost."),
        "plan": ("plan", "Search for the plan with the shortest step."),
        "schedule": ("schedule", "Search for the order of a pipeline's blocks."),
    },
    "Run it": {
        "run": ("run", "Run a plan on real ranks; measured beside predicted."),
        "export": ("export", "A plan as torchtitan, Megatron, DeepSpeed or PyTorch settings."),
        "tune-ddp": ("tune_ddp", "Search and measure bucket sizes of DistributedDataParallel."),
        "compare": ("compare", "A predicted step beside a measured one: where they differ."),
        "fit": ("fit", "Calibrate predictions with measured runs."),
        "bench": ("bench", "Measure this machine: operators, links, collectives."),
        "check": ("check", "A budget for a step, for CI; exit code 3 where it is exceeded."),
    },
    "Look inside": {
        "demo": ("demo", "The whole loop on embedded data; ends with a report."),
        "show": ("show", "What is in a file: a graph, a trace, a cluster, a placement."),
        "simulate": ("simulate", "Simulate a graph: how long it takes, and the critical path."),
        "explain": ("explain", "The model, assumptions and accuracy behind a name."),
        "validate": ("validate", "Every accuracy figure, from measured data."),
        "lab": ("lab", "Models, plans and networks on this machine, beside predictions."),
        "train-policy": ("train_policy", "Train the network that guides the placement search."),
        "completion": ("completion", "The line that turns on completion in your shell."),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}
LAB_COMMANDS = {"lab", "train-policy", "validate"}  # of the second package, foretell_lab


class Commands(click.Group):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        file = COMMANDS[name][0]
        of_lab = name in LAB_COMMANDS
        module = lab_module(f"cli.{file}") if of_lab else import_module(f"foretell.cli.{file}")
        found: click.Command = module.command
        if not any("--quiet" in option.opts for option in found.params):
            found.params.append(quiet_option())
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise unknown("command", args[0], COMMANDS)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in group.items()])


START = """\
foretell predicts how a training step will run, finds a faster way, and runs it.

Where to start:
  a training script      foretell advise train.py
  a profiler trace       foretell whatif step.json.gz amp compile
  a model, some GPUs     foretell oracle llama-3.1-8b --on dgx-h100 --gpus 8..64
  the best layout        foretell plan llama-3.1-8b --on dgx-h100:nodes=2
  nothing yet            foretell demo

`foretell --help` lists every command; `foretell COMMAND --help` explains one."""


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(__version__, message="foretell %(version)s")
@click.pass_context
def foretell(context: click.Context) -> None:
    """Predict how a training step will run, find a faster way to run it, and run it."""
    if context.invoked_subcommand is None:
        click.echo(START)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; turn errors a user can mend into one message and exit code 2."""
    _reopen()
    try:
        foretell(argv, prog_name="foretell", standalone_mode=False)
    except ForetellError as error:
        fail(str(error))
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        fail(f"{error.format_message()}{_usage_hint(error)}")
    except BrokenPipeError:
        sys.stderr.close()  # the reader has seen enough
        sys.exit(0)
    except MemoryError:
        fail("this needs more memory than there is", hint="ask for less, or on a larger machine")
    except OSError as error:  # a full disk, a name too long: nothing of ours
        fail(f"{error.strerror or error}{f': `{error.filename}`' if error.filename else ''}")


def _reopen() -> None:
    """Let what was closed lead nowhere, or the next file that is opened would take its place."""
    if sys.stdout is not None and sys.stderr is not None:
        return
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def fail(message: str, hint: str = "") -> None:
    """Print an error and exit; text from files is escaped."""
    lines = [shown(line, MOST_LINE) for line in message.split("\n")[:MOST_LINES]]
    click.echo(
        "\n".join(["error: " + lines[0], *lines[1:], *([f"\nhint: {hint}"] * bool(hint))]), err=True
    )
    sys.exit(2)


def _usage_hint(error: click.ClickException) -> str:
    ctx = getattr(error, "ctx", None)
    return f"\n\nhint: `{ctx.command_path} --help` shows what it takes" if ctx else ""
