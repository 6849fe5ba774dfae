"""A step whose ops are fused and ordered as a plan says: traced once, each region compiled alone.

Forward and loss are traced together with their backward (AOT autograd, static shapes); ops outside
regions run as eager PyTorch runs them. A gradient is sent on as soon as it is there, in the
middle of the backward, so that messages leave while it goes on.

A batch of other shapes is traced again. What depends on the data of a batch, not on its shapes,
is as it was in the trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from functorch.compile import aot_module, make_boxed_func  # type: ignore[import-untyped]

from foretell.plan import Plan
from foretell.pytorch.deploy.op_regions import Compile, mark, rebuilt, split
from foretell.pytorch.deploy.traced import named_nodes, require_ops

Tensor = Any
Ready = Callable[[str, Tensor], None]


def inductor(graph: Any, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """A region compiled by Inductor, in a thread that knows nothing of the step under way."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_compiled, graph, [x.detach() for x in inputs]).result()


def _compiled(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compiled; random numbers are drawn as eager PyTorch draws them."""
    with (
        torch.no_grad(),
        torch._inductor.config.patch(fallback_random=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        found: Callable[..., Any] = torch._inductor.standalone_compile(
            graph, inputs, dynamic_shapes="from_example_inputs"
        )
    return found


class _Whole(torch.nn.Module):  # type: ignore[misc]
    """Model and loss as one module; hooks of the model itself are called outside the trace."""

    def __init__(self, model: Any, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> Tensor:
        return self.loss(self.model.forward(*inputs), target)


class FusedStep:
    """Forward and loss of a model, fused by a plan; `backward()` of what it gives is fused too."""

    def __init__(
        self,
        model: Any,
        loss: Callable[[Any, Any], Any],
        plan: Plan,
        *,
        ready: Ready | None = None,  # told of each gradient by its parameter's name
        compile_region: Compile = inductor,
    ) -> None:
        self.model, self.plan, self.ready, self.compile_region = model, plan, ready, compile_region
        self.whole = _Whole(model, loss)
        self.names = [n.removeprefix("model.") for n, _ in self.whole.named_parameters()]
        self.traced: dict[Any, Callable[..., Tensor]] = {}
        self.is_checked = False

    def __call__(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> Tensor:
        """The loss of a batch."""
        key = (self.model.training, *map(_look, (*inputs, target)))
        if key not in self.traced:
            self.traced[key] = self._trace()
        for hook in list(self.model._forward_pre_hooks.values()):
            hook(self.model, inputs)
        return self.traced[key](inputs, target)

    def prepare(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> None:
        """Trace and compile for a batch, leaving buffers and random numbers as they were."""
        before = [b.detach().clone() for b in self.model.buffers()]
        with torch.random.fork_rng():
            self(inputs, target)
        for buffer, old in zip(self.model.buffers(), before, strict=True):
            buffer.detach().copy_(old)

    def _trace(self) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = aot_module(
            self.whole, self._forward, self._backward, partition_fn=self._cut
        )
        return found

    def _cut(self, joint: Any, _: Any, *, num_fwd_outputs: int, **more: Any) -> tuple[Any, Any]:
        nodes = named_nodes(joint.graph)
        if not self.is_checked:  # later batches may be smaller; the first is what was planned for
            require_ops(self.plan, nodes)
            self.is_checked = True
        mark(joint.graph, self.plan, nodes)
        return split(joint, num_fwd_outputs, more.get("static_lifetime_input_nodes"))

    def _forward(self, module: Any, _: Any) -> Any:
        return make_boxed_func(rebuilt(module, self.compile_region))

    def _backward(self, module: Any, _: Any) -> Any:
        names = [n for n, p in zip(self.names, self.model.parameters(), strict=True)]
        return make_boxed_func(rebuilt(module, self.compile_region, names, self.ready))


def _look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return value
