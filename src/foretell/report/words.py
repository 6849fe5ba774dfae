"""Numbers as people write them. Conversion from base units happens here and nowhere else."""

from __future__ import annotations

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seconds(value: float) -> str:
    """0.01234 → `12.3 ms`."""
    if value == 0:
        return "0 s"
    for unit, name in _SECONDS:
        if abs(value) >= unit:
            return f"{_short(value / unit)} {name}"
    return f"{value / 1e-9:.2g} ns"


def size(value: float) -> str:
    """1.5 * 2**30 → `1.50 GiB`."""
    for unit, name in _BYTES:
        if abs(value) >= unit:
            return f"{_short(value / unit)} {name}"
    return f"{value:.0f} B"


def rate(value: float) -> str:
    """25e9 → `25 GB/s`; empty where there is no bound."""
    return "" if value == float("inf") else f"{_short(value / 1e9)} GB/s"


def count(value: float) -> str:
    """1.2e12 → `1.20 T`."""
    for unit, name in _COUNTS:
        if abs(value) >= unit:
            return f"{_short(value / unit)} {name}"
    return f"{value:g}"


def percent(share: float) -> str:
    """0.123 → `12.3 %`."""
    return f"{100 * share:.1f} %"


def bar(share: float, width: int = 20) -> str:
    """A share as a bar that can be read without colour."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "·" * (width - full)


def cut(text: str, width: int) -> str:
    """Text no longer than `width`, its middle left out."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"


def _short(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
