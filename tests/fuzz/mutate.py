"""Mutations that keep most of a file's structure, so that what lies behind its first check is met.

All of them are drawn from one `random.Random`: a case is its format and its number.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

LONG = "x" * 5000
WORDS = (
    "", " ", "\x00", "\x1b[2J\x1b]0;t\x07", "\u202e\u2066", "NaN", "inf", "-1", "1e999", "9" * 400,
    "../../etc/passwd", "/dev/zero", "<script>alert(1)</script>", "[red]x[/red]", "%s%n{}", LONG,
    "gpt", "dp=8", "1 GB/s", "true", "null", "0x10", "1_000", "\ud7ff", "é" * 300,
    "²", "--5", "٣", "9..1",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64,
    -(2**63), 10**30, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e-12, 1e15, 1e30, 1e100, 1.7e308, -1e308,
)  # fmt: skip


def value(draw: random.Random, depth: int = 0) -> Any:
    """Something a field was not made for."""
    kind = draw.randrange(9)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 5:
        return draw.choice(WORDS)
    if kind == 5:
        return draw.choice((None, True, False))
    if kind == 6 and depth < 3:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7 and depth < 3:
        return {draw.choice(WORDS): value(draw, depth + 1) for _ in range(draw.randrange(3))}
    nested: Any = draw.choice(NUMBERS)
    for _ in range(draw.choice((1, 5, 70, 300))):
        nested = [nested]
    return nested


def _places(found: Any, at: list[Any]) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside a value."""
    if isinstance(found, dict):
        items: Any = list(found.items())
    elif isinstance(found, list):
        items = list(enumerate(found))
    else:
        return []
    out = []
    for key, inner in items:
        out.append((found, key))
        out += _places(inner, at)
    return out


def tree(found: Any, draw: random.Random) -> Any:
    """A parsed document with a few of its values replaced, dropped, doubled or renamed."""
    made = json.loads(json.dumps(found))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = _places(made, [])
        if not places:
            return value(draw)
        where, key = draw.choice(places)
        act = draw.randrange(8)
        if act == 0:
            del where[key]
        elif act == 1 and isinstance(where, list):
            where.insert(key, json.loads(json.dumps(where[key])))
        elif act == 2 and isinstance(where, dict):
            where[draw.choice(WORDS)] = where.pop(key)
        elif act == 3:
            other, name = draw.choice(places)
            if _has(other, name):
                where[key] = json.loads(json.dumps(other[name]))
        elif act == 4 and isinstance(where[key], int | float):
            where[key] = where[key] * draw.choice((-1, 0, 2, 1000, 10**12))
        else:
            where[key] = value(draw)
    return made


def _has(where: Any, key: Any) -> bool:
    return key in where if isinstance(where, dict) else key < len(where)


def as_json(found: Any, draw: random.Random) -> bytes:
    """JSON of a value; now and then with what only sloppy writers write."""
    ascii_only, indent = draw.random() < 0.5, draw.choice((None, None, 1))
    try:
        text = json.dumps(found, ensure_ascii=ascii_only, indent=indent)
    except RecursionError:  # Python's own writer takes three frames a level where it indents
        text = json.dumps(found, ensure_ascii=ascii_only)
    if draw.random() < 0.05:
        text = re.sub(r"\d+", lambda m: draw.choice((m[0], m[0], "NaN", "Infinity")), text)
    return text.encode("utf-8", "surrogatepass")


def text(raw: str, draw: random.Random) -> bytes:
    """Lines of text with values replaced, lines dropped, doubled, swapped or joined."""
    lines = raw.split("\n")
    for _ in range(draw.choice((1, 1, 2, 4))):
        k = draw.randrange(len(lines))
        act = draw.randrange(7)
        if act == 0:
            lines[k] = ""
        elif act == 1:
            lines.insert(k, lines[k])
        elif act == 2:
            other = draw.randrange(len(lines))
            lines[k], lines[other] = lines[other], lines[k]
        elif act == 3:
            lines[k] = re.sub(r"[^\s,=:\"]+$", lambda _: _token(draw), lines[k], count=1)
        else:
            words = re.split(r"([\s,=:\"+]+)", lines[k])
            words[draw.randrange(len(words))] = _token(draw)
            lines[k] = "".join(words)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _token(draw: random.Random) -> str:
    if draw.random() < 0.5:
        return str(draw.choice(NUMBERS))
    return draw.choice(WORDS)


def data(raw: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or put in."""
    made = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(made) + 1)
        act = draw.randrange(6)
        if act == 0 and at < len(made):
            made[at] ^= 1 << draw.randrange(8)
        elif act == 1:
            del made[at : at + draw.choice((1, 4, 100))]
        elif act == 2:
            made[at:at] = draw.choice(WORDS).encode("utf-8", "surrogatepass")[:64]
        elif act == 3:
            made[at:at] = made[at : at + draw.choice((1, 8, 200))]
        elif act == 4 and draw.random() < 0.3:
            del made[at:]
        elif at < len(made):
            made[at] = draw.randrange(256)
    return bytes(made)


def numbers(found: Any, draw: random.Random) -> Any:
    """An array with a number replaced by one it was not made for, doubled or dropped."""
    import numpy as np

    size, kind = len(found), found.dtype.kind
    at, act = draw.randrange(size) if size else 0, draw.randrange(16)
    if act == 0 or not size:
        return np.insert(found, at, found[at] if size else 0)
    if act == 1:
        return np.delete(found, at)
    if act == 2:
        return found[:: draw.choice((-1, 2))].copy()
    ends = [True, False] if kind == "b" else [float("nan"), float("inf"), 1e-320, 1e15, 1.7e308, -1]
    if kind in "iu":
        info = np.iinfo(found.dtype)
        ends = [info.min, info.max, size, size + 1, 0, 1, -1 if info.min else 2]
        ends = [min(max(v, info.min), info.max) for v in ends]
    chosen = draw.choice((*ends, found[draw.randrange(size)]))
    found[at if act < 14 else slice(at, None)] = chosen
    return found
