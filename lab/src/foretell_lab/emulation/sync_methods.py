"""What a plan comes to: how each parameter is kept together, and in which messages.

What is sent when follows from it (→ step.py); plans that come to the same have the same mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast
from zlib import crc32

from foretell.plan import Plan
from foretell.pytorch.deploy.buckets import Layout, by_size


def same(plan: Plan, bytes: dict[str, int]) -> str:
    """A mark that plans share which come to the same step: one bucket may have several names."""
    ways = ways_of(plan, bytes)
    layout = layout_of(plan, bytes, ways)
    messages = [sorted(bucket) for bucket in layout.buckets]
    is_late = plan.overlap is False and len(messages) > 1  # the only one leaves at the end anyhow
    parts = (sorted(ways.items()), messages, is_late, plan.shares, plan.micro_batch)
    return f"{crc32(repr(parts).encode()):08x}"


def ways_of(plan: Plan, bytes: dict[str, int]) -> dict[str, str]:
    """How each parameter is kept together."""
    if plan.ranks == 1:
        return dict.fromkeys(bytes, "alone")
    if plan.zero == 1:
        return {n: f"ps:{r}" for n, r in _owners(bytes, plan.dp).items()}
    given = dict(cast(Iterable[tuple[str, str]], plan.sync))
    return {name: given.get(name, "all-reduce") for name in bytes}


def _owners(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """Each parameter with one rank: the largest first, to the rank that holds least."""
    held = [0] * ranks
    found = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = found[name] = held.index(min(held))
        held[rank] += sizes[name]
    return {name: found[name] for name in sizes}


def layout_of(plan: Plan, bytes: dict[str, int], ways: dict[str, str]) -> Layout:
    """The buckets of what is all-reduced, and their order."""
    sizes = {n: b for n, b in bytes.items() if ways[n] == "all-reduce"}
    if not sizes:
        return Layout(())
    if not plan.buckets:
        return by_size(sizes, plan.bucket_mb * 2**20)
    kept = [tuple(n for n in bucket if n in sizes) for bucket in plan.buckets]
    return Layout(tuple(bucket for bucket in kept if bucket))
