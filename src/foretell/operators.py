"""PyTorch's operators, from one table (`operators.toml`): what is known of each; number formats.

A trait that is a rule names a function and its arguments: `product 1` is `product(1)` of the module
that asks, `conv` the function itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

Dims = tuple[int, ...]


class Format(NamedTuple):
    """A number format: our word, its names in torch, in traces (C++) and of `c10::ScalarType`."""

    word: str
    torch: str
    traced: str
    scalar: str
    code: int  # of the ScalarType: how a trace writes a `dtype` argument
    bytes: int


FORMATS = (
    Format("fp64", "float64", "double", "Double", 7, 8),
    Format("fp32", "float32", "float", "Float", 6, 4),
    Format("fp16", "float16", "c10::Half", "Half", 5, 2),
    Format("bf16", "bfloat16", "c10::BFloat16", "BFloat16", 15, 2),
    Format("fp8", "float8_e4m3fn", "c10::Float8_e4m3fn", "Float8_e4m3fn", 24, 1),
    Format("fp8", "float8_e5m2", "c10::Float8_e5m2", "Float8_e5m2", 23, 1),
    Format("int64", "int64", "long int", "Long", 4, 8),
    Format("int64", "int64", "long", "Long", 4, 8),  # as other compilers write it
    Format("int32", "int32", "int", "Int", 3, 4),
    Format("int16", "int16", "short", "Short", 2, 2),
    Format("int8", "int8", "signed char", "Char", 1, 1),
    Format("int8", "uint8", "unsigned char", "Byte", 0, 1),
    Format("bool", "bool", "bool", "Bool", 11, 1),
    Format("complex64", "complex64", "c10::complex<float>", "ComplexFloat", 9, 8),
)
BYTES = {f.traced: f.bytes for f in FORMATS}  # of a number, by its format's name in traces
SIZES = {f.word: f.bytes for f in FORMATS} | {"tf32": 4}  # the same by our words
UNFUSED = "unfused"  # the section of operators that no fused region has a word for


def _read() -> dict[str, dict[str, Any]]:
    text = (files("foretell") / "operators.toml").read_text(encoding="utf-8")
    return {
        name: {"fusion": kind, **traits}
        for kind, rows in tomllib.loads(text).items()
        for names, traits in rows.items()
        for name in names.split()
    }


OPERATORS = _read()  # traits by operator


def having(trait: str, *values: str) -> dict[str, Any]:
    """The value of a trait, by operator; with `values`, only operators with one of these."""
    found = {name: traits[trait] for name, traits in OPERATORS.items() if trait in traits}
    return {n: value for n, value in found.items() if not values or value in values}


def rules(trait: str, functions: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The function behind a trait that is a rule, by operator."""
    return {name: _rule(text, functions, prefix) for name, text in having(trait).items()}


def _rule(text: str, functions: Mapping[str, Any], prefix: str) -> Any:
    name, *args = text.split()
    rule = functions[prefix + name]
    return rule(*map(_argument, args)) if args else rule


def _argument(text: str) -> float | str | None:
    if text == "-":
        return None
    return int(text) if text.isdecimal() else float(text) if text[0].isdecimal() else text


def places(text: str) -> tuple[int, ...]:
    """Places among inputs: `0 1` is (0, 1)."""
    return tuple(map(int, text.split()))


# Matmuls of two factors, and where the first stands.
PRODUCTS = {
    name: int(rule.split()[1])
    for name, rule in having("kernel").items()
    if rule.startswith("product") and OPERATORS[name].get("autocast") == "half"
}


def window(
    image: Sequence[int], kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int],
    dilation: Sequence[int] = (1,), more: Sequence[int] = (0,), *, turned: bool = False,
    up: bool = False,
) -> Dims:  # fmt: skip
    """Sides of what a window makes of an image, transposed where `turned`, rounded up where `up`.

    Options of one number hold for all sides.
    """
    made = []
    for i, (n, k) in enumerate(zip(image, kernel, strict=True)):
        s, p, d, m = (v[i % len(v)] for v in (stride, pad, dilation, more))
        room = n + 2 * p - d * (k - 1) - 1
        there = (-(-room // s) if up else room // s) + 1
        made.append((n - 1) * s - 2 * p + d * (k - 1) + m + 1 if turned else there)
    return tuple(made)
