"""A mixture of experts of Mixtral's shape (Jiang et al. 2024), each expert given an even share."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell_lab.samples.language import Llama, LlamaBlock
from foretell_lab.samples.sample import Sample, tokens

_EXPERTS, _TOP = 8, 2
_MIXTRAL = (4096, 32, 8, 14336, 32_000)  # width, heads, key heads, inner width, vocabulary


def mixtral(batch: int = 1, length: int = 4096, layers: int = 32) -> Sample:
    """Mixtral 8x7B, or its first layers."""
    return tokens(partial(Mixtral, layers, *_MIXTRAL), batch, length, "adamw")


class MixtralBlock(LlamaBlock):
    """A Llama block whose tokens go to two of eight experts each."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__(width, heads, key_heads, inner)
        del self.gate_proj, self.up_proj, self.down_proj
        self.router = nn.Linear(width, _EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(_EXPERTS, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(_EXPERTS, inner, width))

    def think(self, x: Tensor) -> Tensor:
        """Tokens sorted by expert, all experts at once, and back in their order."""
        flat = x.view(-1, x.shape[-1])
        weight, chosen = torch.topk(torch.softmax(self.router(flat), -1), _TOP)
        order = torch.argsort(chosen.flatten())
        sorted_rows = flat.index_select(0, order // _TOP).view(_EXPERTS, -1, flat.shape[-1])
        gate, up = torch.bmm(sorted_rows, self.up).chunk(2, -1)
        made = torch.bmm(F.silu(gate) * up, self.down).view(-1, flat.shape[-1])
        back = made.index_select(0, torch.argsort(order)).view(-1, _TOP, flat.shape[-1])
        return (back * weight.unsqueeze(-1)).sum(1).view_as(x)


class Mixtral(Llama):
    """A decoder of such blocks."""

    block = MixtralBlock
