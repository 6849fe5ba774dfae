"""The `foretell` command: its subcommands are loaded when they are used, so that help is quick."""

from __future__ import annotations

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

# name -> (module, one line of help). Listed in the order a newcomer meets them.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "The whole loop on embedded data; ends with a report."),
    "show": ("show", "What is in a file: a graph, a trace, a cluster, a placement."),
    "simulate": ("simulate", "Play a graph: how long it takes, where the time goes, and why."),
    "replay": ("replay", "Simulate a trace unchanged: how far from what was measured."),
    "whatif": ("whatif", "What changes would make of a step, before anybody makes them."),
    "advise": ("advise", "Every change that applies to a step, tried and ranked."),
    "predict": ("predict", "One layout of a model on a cluster: step time, memory, bottleneck."),
    "oracle": ("oracle", "Every parallel strategy against scale: time, memory, money, limits."),
    "plan": ("plan", "Look for the plan with the shortest step."),
    "schedule": ("schedule", "In which order the blocks of a pipeline run."),
    "capture": ("capture", "A training step from a model alone: no GPU, no weights."),
    "profile": ("profile", "Time and trace a training script's steps."),
    "export": ("export", "A plan in the words of torchtitan, Megatron, DeepSpeed or PyTorch."),
    "run": ("run", "A plan on real ranks: measured beside predicted."),
    "bench": ("bench", "Measure this machine: operators, links, collectives."),
    "lab": ("lab", "Models x plans x networks on this machine, beside what was foretold."),
    "compare": ("compare", "A predicted step beside a measured one: where they part."),
    "fit": ("fit", "Measured runs fed back, so that the next prediction is better."),
    "report": ("report", "One page of a step, what would help, layouts, plans and schedules."),
    "studio": ("studio", "The page where you play with what-ifs and plans."),
    "check": ("check", "A budget for a step, for CI: exits with 3 where it is not kept."),
    "tune-ddp": ("tune_ddp", "Buckets for DistributedDataParallel: searched, then measured."),
    "train-policy": ("train_policy", "The network that guides the placement search, by self-play."),
    "explain": ("explain", "What stands behind a name: model, assumptions, accuracy."),
    "validate": ("validate", "Every accuracy figure, from measured data."),
    "completion": ("completion", "The line that turns on completion in your shell."),
}
LAB_COMMANDS = {"lab", "train-policy", "validate"}  # of the second package, foretell_lab


class Commands(click.Group):
    """A group that imports a command when it is asked for."""

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
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="foretell %(version)s")
def foretell() -> None:
    """Tells how a training step will run before it is run, and finds a faster way to run it."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line; turn errors a user can mend into one message and exit code 2."""
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


def fail(message: str, hint: str = "") -> None:
    """Say what is wrong and end; nothing of a file's own text reaches the terminal raw."""
    lines = [shown(line, MOST_LINE) for line in message.split("\n")[:MOST_LINES]]
    click.echo(
        "\n".join(["error: " + lines[0], *lines[1:], *([f"\nhint: {hint}"] * bool(hint))]), err=True
    )
    sys.exit(2)


def _usage_hint(error: click.ClickException) -> str:
    ctx = getattr(error, "ctx", None)
    return f"\n\nhint: `{ctx.command_path} --help` shows what it takes" if ctx else ""
