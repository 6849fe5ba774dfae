"""A stopped search as a file, to go on as if it had never stopped.

JSON: the model's fingerprint, the options it ran with, the dice, what was met, and the states that
are still in play, each as its groups, copied edges and messages.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec

from foretell.errors import InputError
from foretell.io import read_json, write_text
from foretell.search.fusion.backtrack import Trail
from foretell.search.fusion.climb import Run
from foretell.search.fusion.score import Judge, Scored, buckets_of
from foretell.search.fusion.state import fused


class _State(msgspec.Struct):
    """One state: groups of fused ops, copied edges, messages."""

    groups: list[list[int]]
    copied: list[int]
    messages: list[list[int]]


class _File(msgspec.Struct):
    """What `save` writes."""

    asked: dict[str, Any]
    dice: tuple[int, list[int], float | None]
    idle: int
    evaluations: int
    pushed: int
    turns: list[int]
    seen: list[str]
    states: Annotated[list[_State], msgspec.Meta(min_length=1)]


def save(trail: Trail, run: Run, path: Path, asked: dict[str, Any]) -> None:
    """Write where a search stands."""
    states = [trail.optimum, *(held for _, _, held in trail.heap)]
    version, numbers, gauss = trail.dice.getstate()
    told = {
        "asked": _asked(run.judge, asked),
        "dice": [version, list(numbers), gauss],
        "idle": trail.idle,
        "evaluations": run.judge.evaluations,
        "pushed": trail.pushed,
        "turns": [turn for _, turn, _ in trail.heap],
        "seen": sorted(key.hex() for key in trail.seen),
        "states": [_plain(state) for state in states],
    }
    write_text(path, json.dumps(told))


def load(run: Run, path: Path, asked: dict[str, Any]) -> Trail:
    """The search that a file holds, of the same model and options."""
    told = read_json(path, _File, "search to go on with")
    _require_same(told.asked, _asked(run.judge, asked), path)
    try:
        optimum, *states = [_scored(run.judge, state) for state in told.states]
        dice = Random()
        dice.setstate((told.dice[0], tuple(told.dice[1]), told.dice[2]))
        heap = [(s.step, turn, s) for s, turn in zip(states, told.turns, strict=True)]
        seen = {bytes.fromhex(key) for key in told.seen}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise InputError(f"`{path}` holds no search of this model: {error}") from None
    run.see(optimum)
    run.judge.evaluations = told.evaluations
    return Trail(dice, optimum, heap, seen, told.idle, told.pushed)


def _asked(judge: Judge, asked: dict[str, Any]) -> dict[str, Any]:
    more = {"by_message": judge.by_message, "sharded": judge.sharded}
    return {"model": judge.problem.fingerprint, **asked, **more}


def _require_same(known: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    for name, value in wanted.items():
        if known.get(name) != value:
            raise InputError(
                f"the search in `{path}` ran with {name}={known.get(name)}, not {value}",
                hint="go on with the same model and options, or name another file",
            )


def _plain(scored: Scored) -> dict[str, Any]:
    fusion = scored.fusion
    return {
        "groups": [list(ops) for ops in fusion.members.values()],
        "copied": fusion.copied.nonzero()[0].tolist(),
        "messages": scored.buckets.lists(),
    }


def _scored(judge: Judge, state: _State) -> Scored:
    groups = [tuple(ops) for ops in state.groups]
    fusion = fused(judge.problem, groups, state.copied)
    return judge.score(fusion, buckets_of(state.messages))
