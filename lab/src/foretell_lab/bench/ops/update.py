"""What happens to whole lists of parameters: optimizer steps, clipping, unscaling, zeroing.

A list has `count` tensors of `total` elements together: half are vectors as biases and norms are,
the rest matrices that share what is left, some several times larger than others. Layouts are the
implementations: forloop, foreach, fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from foretell_lab.bench.call import Build, Call, Place
from foretell_lab.bench.case import Case, case, dims

# Tensors × elements: small nets, ResNet-18 to -152, MobileNet, BERT, GPT-2, ViT, a recommender.
_LISTS = dims("10x2000000 62x11700000 161x25600000 32x138000000 174x5500000 202x110000000")
_LISTS += dims("148x124000000 390x340000000 42x300000000 4x400000 320x60000000 100x1000000")

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, **kw),
    "momentum": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4, **kw),
    "adam": lambda p, **kw: torch.optim.Adam(p, lr=1e-3, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=1e-3, **kw),
    "adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=1e-2, **kw),
    "rmsprop": lambda p, **kw: torch.optim.RMSprop(p, lr=1e-2, **kw),
}
_WAYS = {"forloop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def cases() -> Iterator[Case]:
    """Every update of a parameter list to measure."""
    for i, (count, total) in enumerate(_LISTS):
        for op in ("sgd", "momentum", "adam", "adamw"):
            for way in _WAYS:
                yield case(op, "step", "fp32", way, count=count, total=total)
        if i % 3 == 0:
            for op in ("adagrad", "rmsprop"):
                for way in ("forloop", "foreach"):
                    yield case(op, "step", "fp32", way, count=count, total=total)
        for way in ("forloop", "foreach"):
            yield case("clip_grad_norm", "step", "fp32", way, count=count, total=total)
        yield case("unscale", "step", "fp32", "foreach", count=count, total=total)
        yield case("zero_grad", "step", "fp32", "foreach", count=count, total=total)
        yield case("zero_grad", "step", "fp32", "none", count=count, total=total)


def tensor_sizes(count: int, total: int) -> list[int]:
    """Elements of each tensor of a list."""
    vectors = [64 * 2 ** (i % 6) for i in range(count // 2)]
    weights = [1.0 + 3.0 * (i % 5) for i in range(count - count // 2)]
    left = max(total - sum(vectors), len(weights))
    return vectors + [max(1, int(left * w / sum(weights))) for w in weights]


def _parameters(case: Case, place: Place) -> list[Any]:
    made = []
    for size in tensor_sizes(case["count"], case["total"]):
        parameter = torch.nn.Parameter(place.randn(size))
        parameter.grad = place.randn(size)
        made.append(parameter)
    return made


def optimizer(case: Case, place: Place) -> Call:
    """One step of an optimizer over a list of parameters."""
    stepper = OPTIMIZERS[case.op](_parameters(case, place), **_WAYS[case.layout])
    return Call(stepper.step)


def clip(case: Case, place: Place) -> Call:
    """Gradients scaled down to a norm of one."""
    parameters, foreach = _parameters(case, place), case.layout == "foreach"
    return Call(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach))


def unscale(case: Case, place: Place) -> Call:
    """What a gradient scaler does before the step: check for infinities and divide by the scale."""
    gradients = [p.grad for p in _parameters(case, place)]
    found, inverse = place.randn(1).zero_(), place.randn(1).fill_(1.0)
    call = torch._amp_foreach_non_finite_check_and_unscale_
    return Call(lambda: call(gradients, found, inverse))


def zero_grad(case: Case, place: Place) -> Call:
    """Gradients forgotten (layout none) or set to zero."""
    stepper = torch.optim.SGD(_parameters(case, place), lr=0.1)
    return Call(lambda: stepper.zero_grad(set_to_none=case.layout == "none"))


BUILD: dict[str, Build] = {
    **dict.fromkeys(OPTIMIZERS, optimizer),
    "clip_grad_norm": clip,
    "unscale": unscale,
    "zero_grad": zero_grad,
}
