"""What the hooks of an activation checkpoint cost the host, for each tensor that is saved.

    python benchmarks/hooks.py

Chains of small operators on the CPU that save one or two tensors each: a forward, a step, and the
same step under `torch.utils.checkpoint`. What the step takes more than a step and a second forward
is the hooks'. `whatif/checkpoint.py` has the constants.
"""

import time
from collections.abc import Callable

import torch
from table import Row, show
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LONG, TIMES, KEEP = 300, 60, 5  # operators of a chain; repetitions; the one that counts, in order
MICRO = 1e6


def seconds(run: Callable[[], object]) -> float:
    """A quiet repetition of several."""
    took = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        run()
        took.append(time.perf_counter() - begin)
    return sorted(took)[KEEP]


def sines(x: Tensor) -> Tensor:
    for _ in range(LONG):
        x = x.sin()
    return x


def products(factors: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def chain(x: Tensor) -> Tensor:
        for factor in factors:
            x = x * factor
        return x

    return chain


def hooks(chain: Callable[[Tensor], Tensor], saved: int) -> tuple[float, float]:
    """Microseconds a saved tensor: in the forward pass, and in the whole step."""
    x = torch.randn(4, requires_grad=True)
    again = lambda: checkpoint(chain, x, use_reentrant=False)  # noqa: E731
    forward, packed = seconds(lambda: chain(x)), seconds(again)
    step = seconds(lambda: chain(x).sum().backward())
    whole = seconds(lambda: again().sum().backward())
    each = MICRO / (LONG * saved)
    return (packed - forward) * each, (whole - step - forward) * each


def main() -> None:
    torch.set_num_threads(1)
    factors = [torch.randn(4, requires_grad=True) for _ in range(LONG)]
    rows = []
    for name, chain, saved in (("sin", sines, 1), ("mul", products(factors), 2)):
        packed, whole = hooks(chain, saved)
        rows.append(Row(f"{name}, {saved} saved", f"packed {packed:.1f} us, in all {whole:.1f} us"))
    show("Hooks of a checkpoint, for each saved tensor", rows)


if __name__ == "__main__":
    main()
