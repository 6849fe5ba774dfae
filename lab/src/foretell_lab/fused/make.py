"""Makes a file of regions: cut from many sizes of many models, and drawn at random.

Regions of one captured step stay together in a block, so that a process that measures them meets
the same ops again; blocks are shuffled, so that any prefix of the file covers everything. Some
regions come a second time, far from the first: how well figures repeat.
"""

from __future__ import annotations

import gzip
import itertools
import warnings
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

from foretell.errors import unknown
from foretell_lab.fused.capture import capture_step
from foretell_lab.fused.cut import Net, regions
from foretell_lab.fused.draw import drawn
from foretell_lab.fused.measure import BLOCK
from foretell_lab.fused.models import HELD_OUT, MODELS
from foretell_lab.fused.models.parts import PRECISIONS
from foretell_lab.fused.region import Region, dumps

_AGAIN = 0.03  # share of regions that come twice
_DRAWN = 0.1  # share drawn at random: they teach little of models not seen
_HELD_OUT = 1.2  # captures of a model kept out of training, against one that is not
_REST = 0.15  # captures of a model not named, where some are
_PIECE = 8  # regions of one capture, where families come in turn


def make(path: Path, count: int, seed: int, families: Collection[str] = ()) -> int:
    """Write regions; how many. Of `families` there are more, and none of models kept out."""
    _known(families)
    chance = Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of torch's own tracing
        blocks = list(_all(chance, count, families))
    chance.shuffle(blocks)
    again = [r for block in blocks for r in block if chance.random() < _AGAIN]
    blocks += [again[i : i + BLOCK] for i in range(0, len(again), BLOCK)]
    late = blocks[: len(blocks) // 3]
    rest = blocks[len(blocks) // 3 :]
    chance.shuffle(rest)
    made = [region for block in (*late, *rest) for region in block]
    _write(path, made)
    return len(made)


def _write(path: Path, made: Sequence[Region]) -> None:
    text = "".join(dumps(region) + "\n" for region in made)
    path.write_bytes(gzip.compress(text.encode(), 6, mtime=0))


def make_only(path: Path, count: int, seed: int, families: Sequence[str]) -> int:
    """Write regions of some families alone, none drawn, and some twice; how many.

    Families come in turn with a few regions each, so any prefix has equal parts of all.
    """
    _known(families)
    chance, made = Random(seed), list[Region]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for piece in _fresh(_in_turn(chance, families), set(), count):
            again = made and chance.random() < _AGAIN * _PIECE
            made += [*piece, chance.choice(made)] if again else piece
    _write(path, made)
    return len(made)


def _in_turn(chance: Random, families: Sequence[str]) -> Iterator[list[Region]]:
    """A few regions of each family, round after round in a new order."""
    while True:
        for name in chance.sample(families, len(families)):
            yield _captured(chance, name, 2 * _PIECE)[:_PIECE]


def _all(chance: Random, count: int, families: Collection[str]) -> Iterator[list[Region]]:
    """Blocks of different regions: first of models in turn, then drawn."""
    seen: set[str] = set()
    yield from _fresh(cut_blocks(chance, families), seen, int(count * (1 - _DRAWN)))
    yield from _fresh(_at_random(chance), seen, int(count * _DRAWN))


def _fresh(blocks: Iterator[list[Region]], seen: set[str], count: int) -> Iterator[list[Region]]:
    made = 0
    for block in blocks:
        new = {r.key: r for r in block if r.key not in seen}
        seen |= set(new)
        chosen = list(new.values())[:BLOCK]
        made += len(chosen)
        if chosen:
            yield chosen
        if made >= count:
            return


def cut_blocks(chance: Random, families: Collection[str] = ()) -> Iterator[list[Region]]:
    """Regions of one captured model after another."""
    weights = [_weight(name, families) for name in MODELS]
    for _ in itertools.count():
        yield _captured(chance, chance.choices(list(MODELS), weights)[0], 2 * BLOCK)


def _captured(chance: Random, name: str, tries: int) -> list[Region]:
    """Regions of a model of some size and precision."""
    precision = chance.choice(PRECISIONS)
    net = Net(capture_step(partial(MODELS[name], chance, precision)))
    return list(regions(net, chance, name, tries))


def _known(families: Collection[str]) -> None:
    """Refuse names of no model, and models kept out of training."""
    trained_on = [name for name in MODELS if name not in HELD_OUT]
    for name in sorted(set(families) - set(trained_on)):
        raise unknown("family of models to train on", name, trained_on)


def _weight(name: str, families: Collection[str]) -> float:
    if not families:
        return _HELD_OUT if name in HELD_OUT else 1.0
    return 1.0 if name in families else 0.0 if name in HELD_OUT else _REST


def _at_random(chance: Random) -> Iterator[list[Region]]:
    while True:
        yield list(drawn(chance, BLOCK))
