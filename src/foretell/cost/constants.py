"""The fitted constants of the kernel formulas, as one value.

`tables/kernel.toml` is written by `benchmarks/fit_kernels.py`; `shipped` reads it once. A fit or a
test may make another `Constants` and hand it to `foretell.cost.kernel`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

Numbers = dict[str, float]


@dataclass(frozen=True)
class Constants:
    """Constants by part of the model; what each means stands where it is used."""

    gemm: Mapping[str, Numbers]  # by pipe
    conv: Mapping[str, Numbers]  # by pipe
    memory: Mapping[str, Numbers]  # by class of op, and what all share under `all`
    attention: Mapping[str, Numbers]  # by pipe
    roofline: Mapping[str, Numbers]  # by pipe: kernels known by flop and bytes alone
    arch: Mapping[str, Numbers]  # by architecture
    sigma: Mapping[str, Numbers]  # by class of op: spread of ln(measured/priced)


@cache
def shipped() -> Constants:
    """The constants that come with the package."""
    text = files("foretell.cost").joinpath("tables", "kernel.toml").read_text(encoding="utf-8")
    return parse(tomllib.loads(text))


@cache
def passes() -> dict[str, Any]:
    """What PyTorch's kernels and calls take beside flops and bytes: `tables/passes.toml`."""
    text = files("foretell.cost").joinpath("tables", "passes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def parse(table: Mapping[str, Any]) -> Constants:
    """Constants from a table of tables."""
    parts = (f for f in Constants.__dataclass_fields__)
    return Constants(**{part: {k: dict(v) for k, v in table[part].items()} for part in parts})


def write(constants: Constants) -> str:
    """The text of `tables/kernel.toml`; four digits are more than the data can tell."""
    lines = ["# Written by benchmarks/fit_kernels.py from measured kernels: do not edit."]
    for part in Constants.__dataclass_fields__:
        for name, numbers in getattr(constants, part).items():
            lines += ["", f"[{part}.{name}]", *(f"{k} = {_number(v)}" for k, v in numbers.items())]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    text = f"{value:.4g}"
    return text if any(c in text for c in ".en") else f"{text}.0"
