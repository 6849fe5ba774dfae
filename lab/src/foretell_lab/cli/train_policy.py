"""`foretell train-policy`: the network that guides the placement search, by self-play."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option, say, working

APART = 10  # every so many games is never trained on


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("policy.npz"),
              show_default=True, help="Where the weights go.")  # fmt: skip
@click.option("--games", type=click.IntRange(1), default=400, show_default=True,
              help="Games in all, those before a resumption counted.")  # fmt: skip
@click.option("--hours", type=click.FloatRange(0, min_open=True), help="Stop after so long.")
@click.option("--steps", type=click.IntRange(1), default=120, show_default=True,
              help="Steps of descent after every round of games.")  # fmt: skip
@click.option("--round", "each", type=click.IntRange(1), default=25, show_default=True,
              help="Games between two fits.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True,
              help="Processes that simulation; the answer does not depend on it.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of games and weights.")
@click.option("--resume", is_flag=True, help="Go on from OUTPUT.state.")
@json_option
def command(
    output: Path, games: int, hours: float | None, steps: int, each: int, workers: int, seed: int,
    resume: bool, as_json: bool,
) -> None:  # fmt: skip
    """Train the network that guides `plan --with placement` by simulating against itself.

    Models and machines are drawn from built-in families, some of which are kept out for judging.
    """
    trainer, state = _trainer(seed), output.with_suffix(output.suffix + ".state")
    if resume:
        _resume(trainer, state)
    ends = time.monotonic() + 3600 * hours if hours else float("inf")
    left = max(games - trainer.games, 1)
    with working("self-play", steps=left) as tell, _players(workers) as play:
        rows = _rounds(trainer, (games, each, steps), ends, (output, state), play, tell)
    answer({"games": trainer.games, "examples": len(trainer.examples), "rounds": rows,
            "weights": str(output)}, as_json, _text)  # fmt: skip


def _trainer(seed: int) -> Any:
    from foretell.errors import InputError
    from foretell.search.placement.policy import GUESS, PER_E, WIDTHS

    try:
        from foretell_lab.policy.train import Trainer
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
    from foretell.search.placement.policy import Seen

    if not state.is_file():
        raise InputError(f"there is no `{state}` to go on from", hint="leave --resume out")
    trainer.load(state, Seen)


@contextmanager
def _players(workers: int) -> Iterator[Callable[..., Any]]:
    """What simulates games: `map`, or that of so many processes."""
    if workers == 1:
        yield map
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        yield pool.map


def _rounds(
    trainer: Any, sizes: tuple[int, int, int], ends: float, paths: tuple[Path, Path],
    play: Callable[..., Any], tell: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Games, a fit, weights written; until there are enough or the time is up."""
    from foretell.search.placement.policy import Learned
    from foretell_lab.policy.expert import write

    (games, each, steps), (output, state) = sizes, paths
    rows: list[dict[str, Any]] = []
    while trainer.games < games and time.monotonic() < ends:
        learned = Learned(trainer.network.exported()) if trainer.rounds else None
        gains = _played(trainer, min(each, games - trainer.games), learned, play, tell)
        apart = trainer.fit(steps)
        write(output, trainer.network.exported())
        trainer.save(state)
        rows.append({"games": trainer.games, "loss_above_least": apart, "gain": gains})
        say(f"{trainer.games} games, {len(trainer.examples)} examples, "
            f"loss {apart:.3f} above the least, games {gains:.2f} × data parallel")  # fmt: skip
    return rows


def _played(
    trainer: Any, count: int, learned: Any, play: Callable[..., Any], tell: Callable[[str], None]
) -> float:
    """Some games; the geometric mean of what they gained."""
    from functools import partial
    from math import exp, log

    from foretell_lab.policy.selfplay import game

    total = 0.0
    first = 1_000_003 * trainer.seed + trainer.games
    for played in play(partial(game, learned=learned), range(first, first + count)):
        tell(f"game {trainer.games + 1}, {played.name}")
        trainer.add([tuple(one) for one in played.examples], trainer.games % APART == APART - 1)
        trainer.games += 1
        total += log(played.gain)
    return exp(total / count)


def _text(found: dict[str, Any]) -> str:
    last = found["rounds"][-1]["loss_above_least"] if found["rounds"] else float("nan")
    return (
        f"{found['games']} games, {found['examples']} examples; loss {last:.3f} above the least "
        f"on games kept apart\nweights in {found['weights']}"
    )
