"""Pipelines on PyTorch's own schedule runtime: any order of F, B, I and W, several stages a rank.

`torch.distributed.pipelining` runs a list of actions on each rank; here any legal list is given to
it, and GPipe and 1F1B to its own classes for them. Two things the stock runtime assumes
are relaxed: that the last stage sees micro-batches in turn (losses are kept by micro-batch), and
that times do not matter (each stage notes when it computed). Both use names torch marks as
private; tests pin them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from foretell.errors import InputError
from foretell.pytorch.deploy.actions import Pipeline, Ran, name_of
from foretell.pytorch.deploy.blocks import Blocks, joined, owned
from foretell.pytorch.deploy.uses import add_up, untouched


def _made(_: Any, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(y.contiguous() for y in output)
    return output.contiguous() if isinstance(output, torch.Tensor) else output


class Stage(PipelineStage):  # type: ignore[misc]
    """A stage that notes when it computes; what it sends back lies in memory in order."""

    ran: list[Ran]
    chunk = 0  # the micro-batch that was last run forward

    def _to_tensor(self, arg: Any) -> Any:
        """What shapes are tried with: zeros, so that all ranks of a stage go the same way.

        Torch leaves it uninitialised; tensor-parallel ranks of a router then differ.
        """
        found = super()._to_tensor(arg)
        if not isinstance(arg, torch.Tensor):
            with torch.no_grad():
                found.zero_()
        return found

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with untouched(self.submod):
            return super()._forward_metadata_inference(*args, **kwargs)

    def _backward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with untouched(self.submod):
            return super()._backward_metadata_inference(*args, **kwargs)

    def _compute_input_grads(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._compute_input_grads(*args, **kwargs)
        return tuple(g.contiguous() if isinstance(g, torch.Tensor) else g for g in found)

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        self.chunk = chunk
        return self._noted("F", chunk, super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        kind = "B" if kwargs.get("full_backward", True) else "I"
        self._noted(kind, chunk, super().backward_one_chunk, *args, **kwargs)
        grads = self.bwd_cache.get(chunk, ())
        self.bwd_cache[chunk] = tuple(g if g is None else g.contiguous() for g in grads)

    def backward_weight_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        return self._noted("W", chunk, super().backward_weight_one_chunk, *args, **kwargs)

    def backward_maybe_with_nosync(self, kind: str, values: dict[str, Any], **options: Any) -> Any:
        if kind == "weight":
            values = values | {"param_groups": joined(values["param_groups"])}
        return super().backward_maybe_with_nosync(kind, values, **options)

    def _noted(self, kind: str, chunk: int, call: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        found = call(chunk, *args, **kwargs)
        self.ran.append(Ran(f"{self.stage_index}{kind}{chunk}", start, time.monotonic()))
        return found


class Runtime(_PipelineScheduleRuntime):  # type: ignore[misc]
    """Torch's runtime with losses by micro-batch, so that the last stage may take any order."""

    def _maybe_compute_loss(
        self, stage: Any, output: Any, targets: Any, chunk: int, loss_kwargs: Any = None
    ) -> None:
        if stage.is_last and self._loss_fn is not None:
            kwargs = loss_kwargs or {}
            losses = self.__dict__.setdefault("_by_chunk", {})
            losses[chunk] = self._loss_fn(output, targets[chunk], **kwargs)

    def _maybe_get_loss(self, stage: Any, chunk: int) -> Any:
        is_mine = stage.is_last and self._loss_fn is not None
        return self.__dict__["_by_chunk"][chunk] if is_mine else None

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        found = self.__dict__.pop("_by_chunk", {})
        if losses is not None:
            losses[:] = [found[m].detach() for m in sorted(found)]


Loss = Callable[[Any, Any], Any]
_CLASSES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Staged(Blocks):
    """A line of stages on torch's runtime; what is only inferred runs on our own."""

    def __init__(
        self, pipeline: Pipeline, modules: Mapping[int, Any], loss: Loss, **options: Any
    ) -> None:
        if not pipeline.is_line:
            raise InputError(
                "torch's runtime holds one line of stages, each on one rank",
                hint="run it on our own executor: foretell.pytorch.deploy.blocks",
            )
        super().__init__(pipeline, modules, loss, **options)
        self.stages = [
            Stage(module, index, pipeline.num_stages, self.device, group=self.group)
            for index, module in sorted(modules.items())
        ]
        for stage in self.stages:
            stage.ran = self.ran
            stage.submod.register_forward_hook(_made)
            if pipeline.halves:
                stage.submod.register_forward_hook(lambda _, __, output: owned(output))
        self.runtime = self._runtime(self._weighed(loss))

    def _weighed(self, loss: Loss) -> Loss:
        """The loss of a micro-batch as a part of the whole; torch asks for it after its forward."""
        end = next((s for s in self.stages if s.is_last), None)

        def part(output: Any, target: Any) -> Any:
            assert end is not None
            return loss(output, target) * (self.weights[end.chunk] * self.scale())

        return part

    def _runtime(self, loss: Loss) -> Any:
        """Torch's class for this order where it has one, which costs least; else its runtime.

        It does not scale gradients: it would those of tied stages twice. The loss is scaled.
        """
        many, own = self.pipeline.micro_batches, _CLASSES.get(name_of(self.pipeline))
        if own is not None:
            return own(self.stages[0], many, loss_fn=loss, scale_grads=False)
        runtime = Runtime(self.stages, many, loss_fn=loss, scale_grads=False)
        rows = enumerate(self.pipeline.rows())
        runtime._prepare_schedule_with_comms(
            {rank: [_Action.from_str(cell) for cell in row] for rank, row in rows}
        )
        return runtime

    def step(self, inputs: tuple[Any, ...], target: Any) -> Any:
        """Run every micro-batch there and back; the mean loss where the last stage is."""
        self._require_batch(inputs)
        self.ran.clear()
        losses: list[Any] = []
        is_first = any(s.is_first for s in self.stages)
        is_last = any(s.is_last for s in self.stages)
        self.runtime.step(
            *(inputs if is_first else ()),
            target=target if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        add_up(self.shared)
        whole = sum(self.weights) * self.scale()
        return torch.stack(losses).sum() / whole if losses else None
