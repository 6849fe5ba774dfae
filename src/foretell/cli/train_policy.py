"""`foretell train-policy`: the network that guides the placement search, by self-play."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option, say
from foretell.cli.progress import working

ROUND = 25  # games between two fits
APART = 10  # every so many games is never trained on


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("policy.npz"),
              show_default=True, help="Where the weights go.")  # fmt: skip
@click.option("--games", type=click.IntRange(1), default=400, show_default=True,
              help="Games in all, those before a resumption counted.")  # fmt: skip
@click.option("--hours", type=click.FloatRange(0, min_open=True), help="Stop after so long.")
@click.option("--steps", type=click.IntRange(1), default=120, show_default=True,
              help="Steps of descent after every round of games.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of games and weights.")
@click.option("--resume", is_flag=True, help="Go on from OUTPUT.state.")
@json_option
def command(
    output: Path, games: int, hours: float | None, steps: int, seed: int, resume: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Train the network that guides `plan --with placement` by playing against itself.

    Models and machines are drawn from built-in families, some of which are kept out for judging.
    """
    trainer, state = _trainer(seed), output.with_suffix(output.suffix + ".state")
    if resume:
        _resume(trainer, state)
    ends = time.monotonic() + 3600 * hours if hours else float("inf")
    with working("self-play") as tell:
        rows = _rounds(trainer, games, steps, ends, output, state, tell)
    answer({"games": trainer.games, "examples": len(trainer.examples), "rounds": rows,
            "weights": str(output)}, as_json, _text)  # fmt: skip


def _trainer(seed: int) -> Any:
    from foretell.errors import InputError
    from foretell.search.placement.policy.prior import WIDTHS
    from foretell.search.placement.policy.view import GUESS, PER_E

    try:
        from foretell.pytorch.policy.train import Trainer
    except ModuleNotFoundError as error:
        raise InputError(
            f"training needs PyTorch and PyTorch Geometric: {error}",
            hint="pip install 'foretell[gnn]'; the weights of the package need neither",
        ) from None
    trainer = Trainer(WIDTHS, seed)
    trainer.believe(GUESS, PER_E)
    return trainer


def _resume(trainer: Any, state: Path) -> None:
    from foretell.errors import InputError
    from foretell.search.placement.policy.view import Seen

    if not state.is_file():
        raise InputError(f"there is no `{state}` to go on from", hint="leave --resume out")
    trainer.load(state, Seen)


def _rounds(
    trainer: Any, games: int, steps: int, ends: float, output: Path, state: Path,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Games, a fit, weights written; until there are enough or the time is up."""
    from foretell.search.placement.policy.prior import Learned, write

    rows: list[dict[str, Any]] = []
    while trainer.games < games and time.monotonic() < ends:
        learned = Learned(trainer.network.exported()) if trainer.rounds else None
        gains = _played(trainer, min(ROUND, games - trainer.games), learned, tell)
        apart = trainer.fit(steps)
        write(output, trainer.network.exported())
        trainer.save(state)
        rows.append({"games": trainer.games, "loss_above_least": apart, "gain": gains})
        say(f"{trainer.games} games, {len(trainer.examples)} examples, "
            f"loss {apart:.3f} above the least, games {gains:.2f} × data parallel")  # fmt: skip
    return rows


def _played(trainer: Any, count: int, learned: Any, tell: Callable[[str], None]) -> float:
    """Some games; the geometric mean of what they gained."""
    from math import exp, log

    from foretell.search.placement.policy.selfplay import game

    total = 0.0
    for _ in range(count):
        played = game(1_000_003 * trainer.seed + trainer.games, learned)
        tell(f"game {trainer.games + 1}, {played.name}")
        into = trainer.kept if trainer.games % APART == APART - 1 else trainer.examples
        into += [tuple(example) for example in played.examples]
        trainer.games += 1
        total += log(played.gain)
    return exp(total / count)


def _text(found: dict[str, Any]) -> str:
    last = found["rounds"][-1]["loss_above_least"] if found["rounds"] else float("nan")
    return (
        f"{found['games']} games, {found['examples']} examples; loss {last:.3f} above the least "
        f"on games kept apart\nweights in {found['weights']}"
    )
