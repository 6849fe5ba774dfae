"""Context parallel: each rank has some of the tokens of a sample, and asks for all keys and values.

    … tokens whole │ blocks: a part of the tokens; attention of it to all of them │ tokens whole …

Blocks are those of a known layout (→ sequence.py), their weights are whole on every rank. Around
them all ranks do the same. Gradients are those of a mean over ranks that each have a sample of
their own: inside the blocks they count as many times as there are ranks, since each rank's tokens
are only a part of them. So what keeps data-parallel ranks together keeps these together, too.

torch's own context_parallel has no attention for CPUs; this works wherever DTensor does. A block
that mixes tokens by other means than attention is found out in the first step, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from foretell.errors import InputError
from foretell.pytorch.deploy.collective import times
from foretell.pytorch.deploy.sequence import blocks, require_even, rows, tokens_as

Module = Any
_SAME = 1e-3  # relative: sums in another order stay far below, another result does not
_WHOLE, _PART = Replicate(), Shard(1)


class Context:
    """Blocks in a row that share the tokens of a sample."""

    def __init__(self, row: Sequence[Module], mesh: Any) -> None:
        self.row, self.mesh = list(row), mesh
        self.is_checked, self.is_checking, self.is_on = False, False, True
        for block in self.row:
            block.forward = self._attending(block.forward)
            for module in block.modules():
                if isinstance(module, nn.MultiheadAttention):
                    module.register_forward_pre_hook(self._ask_all, with_kwargs=True)
        # tokens are cut for context ranks first, then for tensor ranks (sp), and gathered last
        self.row[0].register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        self.row[-1].register_forward_hook(self._end)

    def _begin(self, _: Any, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
        if self.is_checking:
            return None
        x = args[0]
        require_even(x, self.mesh, "cp")
        if not self.is_checked and bool(x.any()):  # zeros are for finding shapes
            self.is_checked = True
            self._check(x.detach(), args[1:], more)
            if isinstance(self.row[0], FSDPModule):
                self.row[0].unshard()  # the check has dropped its weights again
        part = times(tokens_as(x, self.mesh, _WHOLE, _PART), 1 / self.mesh.size())
        return (part, *args[1:]), more

    def _end(self, _: Any, __: Any, out: Any) -> Any:
        if self.is_checking:
            return None
        return tokens_as(times(out, self.mesh.size()), self.mesh, _PART, _WHOLE)

    def _attending(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **more: Any) -> Any:
            with _Attention(self.mesh) if self.is_on else nullcontext():
                return forward(*args, **more)

        return inside

    def _ask_all(self, module: Any, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
        """Queries of this rank's tokens, keys and values of all."""
        if not self.is_on:
            return None
        dim = 1 if module.batch_first else 0
        query, *rest = args[:3]
        all_ = {id(x): _all(x, dim, self.mesh) for x in rest}
        mask = _rows(more.get("attn_mask"), query.shape[dim], self.mesh)
        own = {"attn_mask": mask, "is_causal": False} if mask is not None else {}
        return (query, *(all_[id(x)] for x in rest), *args[3:]), more | own

    def _check(self, x: Any, others: tuple[Any, ...], more: dict[str, Any]) -> None:
        """Raise unless the blocks give the same with their tokens split."""
        with torch.no_grad(), _still(self.row):
            self.is_checking, self.is_on = True, False
            whole = self._through(x, others, more)
            self.is_on = True
            part = self._through(tokens_as(x, self.mesh, _WHOLE, _PART), others, more)
            found = tokens_as(part, self.mesh, _PART, _WHOLE)
            self.is_checking = False
        off = float((found - whole).abs().max() / whole.abs().max().clamp_min(1e-12))
        if off > _SAME:
            kind = type(self.row[0]).__name__
            raise InputError(
                f"cp: {kind} gives another result when each rank has some of the tokens "
                f"(off by {off:.2g})",
                hint="tokens may meet in scaled_dot_product_attention or nn.MultiheadAttention "
                "alone, and their places may not be counted inside a block",
            )

    def _through(self, x: Any, others: tuple[Any, ...], more: dict[str, Any]) -> Any:
        for block in self.row:
            x = block(x, *others, **more)
        return x


def split_context(model: Module, mesh: Any, layout: Any) -> list[Context]:
    """Deal the tokens out in every row of known blocks."""
    found = blocks(model, layout)
    if not found:
        raise InputError(
            f"cp: {type(model).__name__} has no block whose layers are all known",
            hint="give it a `tensor_layout` with `sequence` for norms, colwise and rowwise for all "
            "linear layers of a block",
        )
    return [Context(row, mesh) for row in rows(model, found)]


class _Attention(TorchFunctionMode):  # type: ignore[misc]
    """Lets queries of some tokens see the keys and values of all."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        more = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **more)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        asked = dict(zip(names, args, strict=False)) | more
        query = asked["query"]
        all_ = {name: _all(asked[name], query.dim() - 2, self.mesh) for name in ("key", "value")}
        mask = _rows(asked.get("attn_mask"), query.shape[-2], self.mesh)
        if asked.get("is_causal"):
            mask = _causal(query, all_["key"], self.mesh)
        return func(**asked | all_ | {"attn_mask": mask, "is_causal": False})


def _all(x: Any, dim: int, mesh: Any) -> Any:
    """The tokens of all ranks; what they learn from it is added up for each."""
    held = DTensor.from_local(x, mesh, [Shard(dim)], run_check=False)
    return held.redistribute(placements=[_WHOLE]).to_local(grad_placements=[Partial()])


def _rows(mask: Any, tokens: int, mesh: Any) -> Any:
    """The rows of a mask that are this rank's tokens."""
    if mask is None or mask.shape[-2] != tokens * mesh.size():
        return mask
    return mask.narrow(-2, mesh.get_local_rank() * tokens, tokens)


def _causal(query: Any, key: Any, mesh: Any) -> Any:
    """Which keys came before this rank's tokens."""
    tokens, device = query.shape[-2], query.device
    own = torch.arange(tokens, device=device) + mesh.get_local_rank() * tokens
    return torch.arange(key.shape[-2], device=device)[None, :] <= own[:, None]


@contextmanager
def _still(row: Sequence[Module]) -> Iterator[None]:
    """Without dropout, so that both ways can be compared."""
    before = [(m, m.training) for block in row for m in block.modules()]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, was in before:
            module.training = was
