"""Every model of the zoo, captured and compared with a real step: a line each, then the figures.

python -m tests.pytorch.zoo [name …]
"""

from __future__ import annotations

import gc
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec

from tests.pytorch.zoo.case import Case
from tests.pytorch.zoo.check import checked

NEEDS = [  # package, module, its list of models
    ("torch", "plain", "CASES"),
    ("torch_geometric", "geometric", "CASES"),
    ("transformers", "transformers", "CASES"),
    ("timm", "images", "TIMM_CASES"),
    ("torchvision", "images", "TORCHVISION_CASES"),
]
FLOPS, PEAK, SHARE = 0.02, 0.05, 0.95


def cases(wanted: list[str]) -> list[Case]:
    found = []
    for package, module, models in NEEDS:
        if find_spec(package) is None:
            print(f"without {package}: pip install {package}")
            continue
        found += getattr(import_module(f"tests.pytorch.zoo.{module}"), models)
    return [case for case in found if not wanted or case.name in wanted]


def main(wanted: list[str]) -> int:
    warnings.simplefilter("ignore")
    every = cases(wanted)
    taken = flops = peaks = 0
    for case in every:
        try:
            one = checked(case)
        except Exception as error:
            print(
                f"{case.name:20} {type(error).__name__}: {str(error).splitlines()[0]}", flush=True
            )
            continue
        finally:
            gc.collect()
        taken += 1
        flops += abs(one.flops_error) <= FLOPS
        peaks += abs(one.peak_error) <= PEAK
        print(
            f"{one.name:20} {one.flops / 1e6:10.2f} Mflop {one.flops_error:+7.2%}"
            f" {one.peak / 2**20:9.2f} MiB {one.peak_error:+7.2%} {one.data}",
            flush=True,
        )
    print(f"captured {taken} of {len(every)}; flop within 2 %: {flops}; peak within 5 %: {peaks}")
    return 0 if every and taken >= SHARE * len(every) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
