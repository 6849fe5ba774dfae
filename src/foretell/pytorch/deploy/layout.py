"""Which gradients travel together: buckets by parameter name, the order they leave in, their parts.

Plain data, no torch. A layout covers every parameter it is checked against exactly once; buckets
leave in `order` whatever the order in which their gradients become ready, so that all ranks agree
without asking each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretell.errors import InputError

# torch/nn/parallel/distributed.py: the first bucket is small so that sending starts early.
FIRST_BYTES = 1024 * 1024
BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True)
class Layout:
    """Buckets of parameter names, the order they leave in, and into how many parts each is cut."""

    buckets: tuple[tuple[str, ...], ...]
    order: tuple[int, ...] = ()  # places in `buckets`; empty: as they stand
    parts: tuple[int, ...] = ()  # messages of each bucket; empty: one

    def __post_init__(self) -> None:
        num = len(self.buckets)
        object.__setattr__(self, "order", self.order or tuple(range(num)))
        object.__setattr__(self, "parts", self.parts or (1,) * num)
        if sorted(self.order) != list(range(num)):
            raise InputError(
                f"the order of buckets is {list(self.order)}",
                hint=f"name each of 0 to {num - 1} once",
            )
        if len(self.parts) != num or min(self.parts, default=1) < 1:
            raise InputError(
                f"the parts of {num} buckets are {list(self.parts)}",
                hint="give each bucket one part or more",
            )

    def check(self, names: Sequence[str]) -> None:
        """Raise unless the buckets hold each of these parameters once and nothing else."""
        held = Counter(name for bucket in self.buckets for name in bucket)
        for what, found in (
            ("not in any bucket", [n for n in names if not held[n]]),
            ("in several buckets", [n for n, times in held.items() if times > 1]),
            ("not parameters of the model", sorted(held.keys() - set(names))),
        ):
            if found:
                raise InputError(
                    f"{_listed(found)} {'is' if len(found) == 1 else 'are'} {what}",
                    hint="list every trained parameter in exactly one bucket",
                )


def by_size(
    sizes: Mapping[str, int], bucket_bytes: float = BUCKET_BYTES, first_bytes: float | None = None
) -> Layout:
    """Buckets as DDP makes them: last parameter first, closed when they reach their size."""
    first = min(FIRST_BYTES, bucket_bytes) if first_bytes is None else first_bytes
    buckets: list[list[str]] = [[]]
    held = 0
    for name in reversed(list(sizes)):
        buckets[-1].append(name)
        held += sizes[name]
        if held >= (first if len(buckets) == 1 else bucket_bytes):
            buckets.append([])
            held = 0
    return Layout(tuple(tuple(b) for b in buckets if b))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{n}`" for n in names[:6])
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")
