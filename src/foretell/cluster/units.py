"""Quantities as people write them: `25 GB/s`, `200 Gb/s`, `0.6 us`, `80 GiB`, `312 Tflop/s`.

`read` and `write` are exact inverses: decimal arithmetic, so a value written and read again is
the same float. A bare number is in base units. Bits (`b`) and bytes (`B`) are never confused.
"""

import re
from decimal import Decimal

_PREFIX = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "m": -3, "u": -6, "µ": -6, "n": -9}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4}
_DIGITS = r"\d+(?:_\d+)*"
_NUMBER = rf"[-+]?(?:(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:e[-+]?\d+)?|nan|inf)"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*([^\s\d._]\S*)?\s*", re.I)

# base unit -> the spellings of one such unit, without prefix, and how many base units it is
_SPELLINGS: dict[str, dict[str, Decimal]] = {
    "B": {"B": Decimal(1)},
    "B/s": {"B/s": Decimal(1), "b/s": Decimal(1) / 8, "bit/s": Decimal(1) / 8},
    "s": {"s": Decimal(1)},
    "Hz": {"Hz": Decimal(1)},
    "W": {"W": Decimal(1)},
    "flop/s": {"flop/s": Decimal(1), "FLOPS": Decimal(1), "op/s": Decimal(1)},
    "$/h": {"$/h": Decimal(1), "USD/h": Decimal(1)},
}

_SHOWN = {
    "B": ("T", "G", "M", "k", ""),
    "B/s": ("T", "G", "M", "k", ""),
    "s": ("", "m", "u", "n"),
    "Hz": ("G", "M", "k", ""),
    "W": ("",),
    "flop/s": ("P", "T", "G", "M", ""),
    "$/h": ("",),
}


def read(value: object, unit: str) -> float:
    """The number of base units a person meant; ValueError says what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"is {value!r}, not a quantity in {unit}")
    if not isinstance(value, str):
        return float(value)
    match = _QUANTITY.fullmatch(value)
    if not match:
        raise ValueError(f"is `{value}`, not a quantity in {unit}")
    if len(value) > 64 or ("e" in match[1] and len(match[1].lower().partition("e")[2]) > 4):
        raise ValueError(f"is `{value[:40]}`, not a quantity in {unit}")
    if not match[2]:
        return float(match[1])
    scale = _scale(match[2], unit)
    if scale is None:
        raise ValueError(f"is `{value}`: `{match[2]}` is not a unit of {unit}")
    return float(Decimal(match[1].replace("_", "")) * scale)


def _scale(text: str, unit: str) -> Decimal | None:
    for spelling, size in _SPELLINGS[unit].items():
        if not text.endswith(spelling):
            continue
        prefix = text.removesuffix(spelling)
        if prefix in _PREFIX:
            return size * Decimal(10) ** _PREFIX[prefix]
        if prefix in _BINARY and unit in ("B", "B/s"):
            return size * Decimal(1024) ** _BINARY[prefix]
    return None


def write(value: float, unit: str) -> str:
    """The exact text of a quantity, in the largest unit it fills once; `read` inverts it."""
    exact = Decimal(repr(value))
    if unit == "B" and value and value % 2**20 == 0:
        prefix = next(p for p in ("Ti", "Gi", "Mi") if value % 1024 ** _BINARY[p] == 0)
        return f"{int(value) // 1024 ** _BINARY[prefix]} {prefix}{unit}"
    prefix = next((p for p in _SHOWN[unit] if abs(exact) >= Decimal(10) ** _PREFIX[p]), "")
    scaled = exact / Decimal(10) ** _PREFIX[prefix]
    return f"{scaled.normalize():f} {prefix}{unit}"


def short(value: float, unit: str) -> str:
    """The same for a reader: three significant digits, not to be read back."""
    prefix = next((p for p in _SHOWN[unit] if abs(value) >= 10.0 ** _PREFIX[p]), "")
    scaled = value / 10.0 ** _PREFIX[prefix]
    return f"{scaled:.3g} {prefix}{unit}" if abs(scaled) < 1000 else f"{scaled:.0f} {prefix}{unit}"
