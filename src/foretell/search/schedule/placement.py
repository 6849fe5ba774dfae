"""Placement files: a JSON object with the blocks of one micro-batch, read into a `Problem` and
back.

    {"name": …, "ndevs": 4, "mode": "train",
     "blocks": [{"id": 0, "kind": "F", "devices": [0], "time": 1, "mem": 1}, …],
     "deps": [[0, 1], [1, 2, 0.5], …]}

A dependency is [first, then] or [first, then, lag]. `mem` changes memory when the block starts,
`mem_end` when it ends. Optional beside `blocks`: `memory` and `speed` (a number, or one for each
device, null where there is no limit) and `choices` ({name: [blocks that would stand in]}). Other
keys are left alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.io import read_json
from foretell.search.schedule.problem import Block, Choice, Problem, Wait

MOST_DEVICES, MOST_BLOCKS = 1 << 14, 100_000
_MOST = 1e15  # of a time or an amount of memory


def load(path: str | Path) -> Problem:
    """The problem in a placement file."""
    return read(read_json(path, what="placement"), where=f"placement `{path}`")


def read(found: Any, where: str = "placement") -> Problem:
    """The problem in a placement that was already parsed."""
    if not isinstance(found, Mapping) or not isinstance(found.get("blocks"), list):
        raise InputError(f"{where} has no list of `blocks`", hint="see the format in the docs")
    blocks = tuple(_block(b, where) for b in found["blocks"])
    num = _number(found.get("ndevs", 0), f"`ndevs` of {where}", whole=True)
    num_devices = int(num) or 1 + max((d for b in blocks for d in b.devices), default=0)
    if num_devices > MOST_DEVICES or len(blocks) > MOST_BLOCKS:
        raise InputError(
            f"{where} has {num_devices} devices and {len(blocks)} blocks",
            hint=f"{MOST_DEVICES} devices and {MOST_BLOCKS} blocks at most",
        )
    mode = found.get("mode", "train")
    if mode not in ("train", "infer"):
        raise InputError(f"mode of {where} is `{mode}`", hint="write `train` or `infer`")
    bare = Problem(
        blocks,
        (),
        num_devices,
        _each(found.get("memory"), num_devices, f"`memory` of {where}"),
        _each(found.get("speed"), num_devices, f"`speed` of {where}"),
        mode,
        str(found.get("name", "")),
        _choices(found.get("choices", {}), where),
    )
    return replace(bare, waits=_waits(found.get("deps", []), blocks, where))


def write(problem: Problem) -> dict[str, Any]:
    """The placement file of a problem; `read` gives an equal problem back."""
    ids = [b.id for b in problem.blocks]
    deps = [[ids[w.on], ids[w.block], *([w.lag] if w.lag else [])] for w in problem.waits]
    found: dict[str, Any] = {"name": problem.name, "ndevs": problem.num_devices}
    found |= {"mode": problem.mode, "blocks": [_written(b) for b in problem.blocks], "deps": deps}
    if any(c != float("inf") for c in problem.capacity):
        found["memory"] = [None if c == float("inf") else c for c in problem.capacity]
    if any(s != 1 for s in problem.speed):
        found["speed"] = list(problem.speed)
    if problem.choices:
        found["choices"] = {c.name: [_written(b) for b in c.blocks] for c in problem.choices}
    return found


def _block(found: Any, where: str) -> Block:
    if not isinstance(found, Mapping) or "id" not in found:
        raise InputError(f"a block of {where} has no `id`: {str(found)[:60]}")
    here = f"block {found['id']} of {where}"
    devices = found.get("devices", [])
    if not isinstance(devices, list):
        raise InputError(f"`devices` of {here} is `{devices}`, not a list")
    if "time" not in found:
        raise InputError(f"{here} has no `time`")
    return Block(
        int(_number(found["id"], f"`id` of {here}", whole=True)),
        str(found.get("kind", "F")),
        tuple(int(_number(d, f"a device of {here}", whole=True)) for d in devices),
        _number(found["time"], f"`time` of {here}"),
        _number(found.get("mem", 0), f"`mem` of {here}"),
        _number(found.get("mem_end", 0), f"`mem_end` of {here}"),
        str(found.get("name", "")),
    )


def _written(block: Block) -> dict[str, Any]:
    found: dict[str, Any] = {"id": block.id, "kind": block.kind, "devices": list(block.devices)}
    found |= {"time": block.time, "mem": block.memory}
    if block.memory_end:
        found["mem_end"] = block.memory_end
    if block.name:
        found["name"] = block.name
    return found


def _waits(deps: Any, blocks: tuple[Block, ...], where: str) -> tuple[Wait, ...]:
    place = {b.id: i for i, b in enumerate(blocks)}
    if not isinstance(deps, list):
        raise InputError(f"`deps` of {where} is not a list")
    waits = []
    for dep in deps:
        if not isinstance(dep, list) or len(dep) not in (2, 3):
            raise InputError(f"dependency `{dep}` of {where} is not [first, then] or with a lag")
        for end in dep[:2]:
            if not isinstance(end, int) or end not in place:
                raise InputError(
                    f"a dependency of {where} names block {end}, there is none",
                    hint=f"blocks are {', '.join(map(str, list(place)[:12]))} …",
                )
        lag = _number(dep[2], f"lag of {dep} in {where}") if len(dep) == 3 else 0.0
        waits.append(Wait(place[dep[1]], place[dep[0]], lag))
    return tuple(waits)


def _each(found: Any, num_devices: int, where: str) -> tuple[float, ...]:
    if found is None:
        return ()
    if isinstance(found, list):
        return tuple(_unlimited(x, where) for x in found)
    return (_unlimited(found, where),) * num_devices


def _unlimited(value: Any, where: str) -> float:
    """A number, or no limit where there is none."""
    return float("inf") if value in (None, float("inf")) else _number(value, where)


def _choices(found: Any, where: str) -> tuple[Choice, ...]:
    if not isinstance(found, Mapping):
        raise InputError(f"`choices` of {where} is not an object")
    if not all(isinstance(blocks, list) for blocks in found.values()):
        raise InputError(f"a choice of {where} is not a list of blocks")
    return tuple(Choice(str(n), tuple(_block(b, where) for b in bs)) for n, bs in found.items())


def _number(value: Any, where: str, whole: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _MOST or (whole and value % 1):
        noun = f"{'whole ' if whole else ''}number"
        raise InputError(f"{where} is `{str(value)[:40]}`, not a {noun} up to {_MOST:g}")
    return float(value)
