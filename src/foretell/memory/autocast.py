"""A tape as autocast would make it: which tensors become half as wide, and which copies come in.

From the op lists of PyTorch's documentation (Automatic Mixed Precision, CUDA op-specific
behavior): matmuls, convolutions and attention cast their inputs to the narrow format;
norms, powers, losses and the like cast theirs to fp32; all others take what they get, the widest
of it. Casts of parameters are made once and held until the forward pass has ended, casts of
activations are held as long as anything keeps them. Gradients have the format of what they are
gradients of; those of parameters are cast back to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from foretell.graph.columns import NONE, BufferKind, Phase
from foretell.memory import recurrent
from foretell.memory.outputs import copied
from foretell.memory.tape import FORWARD, WIDENED, Op, Rewrite, Tape, swapped, with_workspace

HALF = 2  # bytes
NARROW = {
    "addmm", "mm", "bmm", "baddbmm", "_addmm_activation", "convolution",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention", recurrent.FORWARD,
}  # fmt: skip
WIDE = {
    "native_layer_norm", "native_group_norm", "pow", "exp", "expm1", "log", "log1p", "log2",
    "reciprocal", "rsqrt", "softplus", "norm", "cumsum", "prod", "nll_loss_forward",
    "nll_loss2d_forward", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy_with_logits",
}  # fmt: skip
WIDENS = {"_softmax", "_log_softmax", "_safe_softmax", "sum"}  # read narrow, write wide numbers
NORMS = ("batch_norm",)  # their parameters stay wide beside narrow inputs


class Written(NamedTuple):
    """Attention written out for lack of a kernel: ops that go in half precision or stay wide."""

    gone: set[int]
    wide: set[int]


def written_out(ops: Sequence[Op]) -> Written:
    """Softmaxes that one kernel will hold, or their matmuls where the bias has a gradient.

    No kernel has that gradient, and PyTorch then runs all of it in fp32 (attention.cpp in
    aten/src/ATen/native/transformers). It is a sum right behind the gradient of the softmax.
    """
    found = Written(set(), set())
    ends = {o.node: k for k, o in enumerate(ops) if o.ends and o.node != NONE}
    for k, op in enumerate(ops):
        if op.name != WRITTEN_OUT:
            continue
        behind = ends.get(op.node, len(ops))
        if any(o.name == "sum" for o in ops[behind + 1 : behind + 1 + _BEHIND]):
            near = range(max(k - _AROUND, 0), min(k + _AROUND + 1, len(ops)))
            found.wide.update(j for j in near if ops[j].name == "bmm")
        else:
            found.gone.add(k)
    return found


WRITTEN_OUT = "_safe_softmax"  # the softmax that attention has for lack of a kernel
_AROUND, _BEHIND = 4, 4  # ops between the softmax and its matmuls; and behind its gradient


class Autocast(Rewrite):
    """Goes along a tape and decides about each op."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.narrow: set[int] = set()  # storages that have become so
        self.casts: dict[int, int] = {}  # of parameters
        self.node_is_narrow: dict[int, bool] = {}
        self.widened: dict[int, int] = {}  # copies that the model asks for itself
        self.written = written_out(tape.ops)
        self.back: list[Op] = []  # casts of gradients that wait for the end of their node

    def run(self) -> Tape:
        forward = [k for k, o in enumerate(self.before.ops) if o.phase in FORWARD]
        last = forward[-1] if forward else NONE
        for k, op in enumerate(self.before.ops):
            if op.phase in FORWARD:
                self.forward(op, k)
            elif op.phase == Phase.BACKWARD:
                self.backward(op)
            else:
                self.ops.append(op)
            if k == last and self.casts:
                self.ops.append(Op("autocast", op.phase, reads=tuple(self.casts.values())))
        return self.tape()

    def is_wide(self, k: int) -> bool:
        s = self.storages[k]
        return s.is_float and s.item == 4 and s.count > 1 and k not in self.narrow

    def is_gradient(self, k: int) -> bool:
        return self.storages[k].kind == BufferKind.GRADIENT

    def cast(self, k: int, op: Op, item: int) -> int:
        """A copy of a storage in another format; of a parameter there is one for all."""
        if k in self.casts:
            return self.casts[k]
        is_own = self.storages[k].kind == BufferKind.PARAMETER
        new = self.new(k, item=item, kind=int(BufferKind.ACTIVATION))
        name = WIDENED if op.name == WIDENED else "_to_copy"
        self.ops.append(Op(name, op.phase, NONE, (k,), (new,)))
        if item == HALF:
            self.narrow.add(new)
            if is_own:
                self.casts[k] = new
        return new

    def forward(self, op: Op, at: int) -> None:
        op = _with(op, self.widened)
        if op.name == WIDENED:
            self.widened |= {k: self.cast(k, op, 4) for k in op.reads if k in self.narrow}
            return
        if at in self.written.gone:
            for k in (*op.reads, *op.makes):
                self.storages[k] = replace(self.storages[k], count=0.0)
        casts, is_narrow = self.decided(op, stays_wide=at in self.written.wide)
        if is_narrow:
            self.shrink(op)
        if op.node != NONE:
            self.node_is_narrow[op.node] = is_narrow
        self.ops.append(_with(op, casts))

    def decided(self, op: Op, *, stays_wide: bool) -> tuple[dict[int, int], bool]:
        """Copies that an op reads instead of its inputs, and whether it makes narrow tensors."""
        if op.name in NARROW and not stays_wide:
            return {k: self.cast(k, op, HALF) for k in op.reads if self.is_wide(k)}, True
        if op.name in WIDE or stays_wide:
            return {k: self.cast(k, op, 4) for k in op.reads if k in self.narrow}, False
        # A cross entropy asks its log-softmax for the format that it was given itself.
        widens = op.name in WIDENS and op.phase != Phase.LOSS
        return {}, not widens and self.all_narrow(op)

    def all_narrow(self, op: Op) -> bool:
        """Whether all numbers that an op reads are narrow by now."""
        reads = op.reads[:1] if any(n in op.name for n in NORMS) else op.reads
        floats = [k for k in reads if self.storages[k].is_float and self.storages[k].count > 1]
        return bool(floats) and all(k in self.narrow for k in floats)

    def shrink(self, op: Op) -> None:
        """What an op makes becomes narrow; the statistics of norms and attention do not."""
        makes = op.makes[:1] if "norm" in op.name or "attention" in op.name else op.makes
        for k in makes:
            s = self.storages[k]
            if s.is_float and s.item == 4:
                self.storages[k] = replace(s, item=HALF)
                self.narrow.add(k)

    def backward(self, op: Op) -> None:
        is_narrow = self.node_is_narrow.get(op.node, False) or (
            op.node not in self.node_is_narrow and self.all_narrow(op)
        )
        if is_narrow and op.makes:
            op = self.narrowed(op)
        self.ops.append(op)
        if op.ends:  # by then the node has let go of what it kept
            self.ops += self.back
            self.back = []

    def narrowed(self, op: Op) -> Op:
        """A backward op that makes narrow gradients; those of parameters are cast back."""
        own = [k for k in op.makes if self.is_gradient(k) and "norm" not in op.name]
        new = {k: self.new(k, item=HALF, kind=int(BufferKind.ACTIVATION)) for k in own}
        self.narrow.update(new.values())
        self.shrink(replace(op, makes=tuple(k for k in op.makes if not self.is_gradient(k))))
        self.back += [Op("_to_copy", op.phase, NONE, (half,), (k,)) for k, half in new.items()]
        return replace(op, makes=swapped(op.makes, new))


def _with(op: Op, new: dict[int, int]) -> Op:
    """An op that reads and keeps some storages in the place of others."""
    return replace(op, reads=swapped(op.reads, new), keeps=swapped(op.keeps, new))


def autocast(tape: Tape) -> Tape:
    """The tape under autocast to a 16-bit format; convolutions run on tensor cores."""
    return with_workspace(Autocast(tape).run(), lambda op, n: copied(n, HALF))
