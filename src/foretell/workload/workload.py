"""A model's training step before it is split: layers, operators and their kernels.

What one training step of a model is before it is split: layers of ops, repeated, and their
sizes.

GPT-3's 96 blocks are one `Layer` with `times=96`; prices and memory are worked out once for it.
Sizes of an op are those of one sample; the batch is never among them. `splits` says which dim each
axis of the device mesh divides, so that the shape a rank is left with is worked out, not work ÷
ranks:

    size(dim) = ⌈ size / degrees that split it ⌉, or with padding ⌈ size / (pad·degrees) ⌉ · pad

Axes: `tp` (tensor), `sp` (sequence, over the ranks of `tp`), `cp` (context), `ep` (experts), `etp`
(tensor, of each expert), `esp` (the same under sequence parallelism), `eseq` (tp / etp),
`filter`, `channel`, `height`, `width`, `depth`. Data parallelism splits the batch, pipelines the
layers.

Which kernels an op runs, forward and backward, from the sizes one rank is left with.

A `Call` is what `foretell.cost.kernel.seconds` prices: an op class and a shape whose numbers may be
arrays, one entry a layout. `RULES` has one function a kind:

    matmul      tokens, in, out            product        b, m, n, k (b grows with the batch)
    attention   heads, queries, keys, depth, value (depth where missing; options causal, windows:
                pairs of the keys a query sees at most and the share of layers where it is so)
    norm        any, cols                  pointwise      any (options kernel, passes, back)
    softmax     any, cols                  embedding      tokens, hidden, vocab
    loss        tokens, vocab              conv           c, h, w, k, r, s, d, t (options stride,
    pool        c, h, w, d                                pad or pads, groups, first, turned)
    recurrent   steps, in, hidden (gates)  batch_norm     c, h, w, d
    route       tokens, experts, hidden    mean           c, h, w, d
    experts     tokens (those routed, all experts), experts, in, out (option useful: share of them
                that an even rank has)
    permute     tokens (those routed), hidden, experts (option top); combine alike
    expert_bias tokens, cols, experts
    regroup     tokens, hidden, experts (a copy where a rank has some of the experts)
    biased      heads, queries, keys (a table added to scores; option back where it is learned)
    recorded    any (options forward, backward: kernels by what they have of this size)

Flags of the framework that matter here: `flash`, `fused`, `compiled`, `nhwc` (channels last), `amp`
(weights kept in fp32 and cast where they are used; norms in fp32), `eager` (PyTorch's operators),
`fp8` (matmuls of weights in eight bits), `fp8-where-faster` (logits too: each layer is chosen by
what it gains), `fp8-weights` (weights kept in them), `fp8-gather`
(shards cast before they are gathered), `written-out` (attention operator by operator),
`one-by-one` (a launch for each expert), `sent-once` (a word is sent once to a rank, not once to
each of its experts), `fp32-loss` (logits are cast to fp32 before the loss),
`torch-softmax` (scores are masked and normalised by PyTorch's operators).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.cost.kernel import added_rows, passes, visible
from foretell.errors import unknown

Number = npt.NDArray[np.float64] | float
Sizes = Mapping[str, Number]
AXES = (
    *("tp", "sp", "cp", "ep", "etp", "esp", "eseq"),
    *("filter", "channel", "height", "width", "depth"),
)
BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int64": 8.0}
BYTES |= {"int32": 4.0, "int8": 1.0, "bool": 1.0, "fp4": 0.5}
# What tensors are kept in where matmuls are computed in a format too narrow to keep.
KEPT = {"fp8": "bf16", "fp4": "bf16"}


def holds(when: str, flags: frozenset[str]) -> bool:
    """Whether a condition is met: empty, a flag that is there, or `!flag` for one that is not.

    Flags say how a stack computes: `flash` (attention keeps no scores), `fused` (chains of
    pointwise work are one kernel), `eager` (PyTorch's own operators). Conditions joined by `&` have
    to hold all.
    """
    parts = when.split("&") if when else []
    return all(p[1:] not in flags if p.startswith("!") else p in flags for p in parts)


@dataclass(frozen=True)
class Tensor:
    """A tensor by the dims whose sizes it multiplies."""

    name: str
    dims: tuple[str, ...]
    dtype: str = ""  # that of the workload where empty
    when: str = ""  # a flag of the stack, or `!flag`: there only with it, only without it
    times: float = 1.0  # for what is no whole product of dims
    frozen: bool = field(default=False, repr=False)  # a weight that is not trained

    def elements(self, sizes: Sizes) -> Number:
        """How many numbers it has, given the sizes a rank is left with."""
        out: Number = self.times
        for dim in self.dims:
            out = out * sizes[dim]
        return out

    def bytes(self, sizes: Sizes, dtype: str) -> Number:
        """Bytes it takes where the workload computes in `dtype`."""
        return self.elements(sizes) * BYTES[self.dtype or dtype]


@dataclass(frozen=True)
class Op:
    """Work on one rank; `foretell.workload.workload` has the kernels of each `kind`."""

    name: str
    kind: str
    dims: Mapping[str, float]
    splits: Mapping[str, str] = field(default_factory=dict)  # axis → dim
    weights: tuple[Tensor, ...] = ()  # parameters
    saved: tuple[Tensor, ...] = ()  # what autograd keeps for the backward
    most: Mapping[str, int] = field(default_factory=dict)  # axis → largest degree that makes sense
    pads: Mapping[str, int] = field(default_factory=dict)  # dim → multiple it is padded to, a rank
    options: Mapping[str, Any] = field(default_factory=dict)  # of the kind: passes, kernel, causal
    when: str = ""  # a flag of the stack, or `!flag`: runs only with it, only without it
    brief: tuple[Tensor, ...] = ()  # what is there only while its layer runs

    def sizes(self, degrees: Mapping[str, Number], batch: Number = 1.0) -> dict[str, Number]:
        """The sizes one rank is left with, `batch` among them; degrees may be arrays."""
        out: dict[str, Number] = {"batch": batch}
        for dim, size in self.dims.items():
            by: Number = 1.0
            for axis, split in self.splits.items():
                if split == dim:
                    by = by * degrees.get(axis, 1.0)
            pad = self.pads.get(dim, 1)
            out[dim] = np.ceil(size / (pad * by)) * pad
        return out


@dataclass(frozen=True)
class Exchange:
    """Ranks of one axis give each other what the ops around it need; nothing at degree 1.

    `forward` and `backward` are collectives, `send` (to each neighbour: a halo), or empty.
    """

    name: str
    axis: str
    forward: str
    backward: str
    dims: Mapping[str, float]  # of the whole tensor, one sample: product of all
    splits: Mapping[str, str] = field(default_factory=dict)  # by other axes
    unless: str = ""  # not where this axis is split too: `sp` has exchanges of its own
    dtype: str = ""
    times: float = 1.0
    kept: bool = True  # False: what it gathers is gathered again in the backward, not kept
    copies: float = 1.0  # of one row, to as many ranks: one to a node is enough

    def bytes(self, degrees: Mapping[str, Number], batch: Number, dtype: str) -> Number:
        """Bytes of the whole tensor in the meaning of `foretell.cost.collective`."""
        sizes = Op(self.name, "exchange", self.dims, self.splits).sizes(degrees, batch)
        out: Number = self.times * BYTES[self.dtype or dtype]
        for size in sizes.values():
            out = out * size
        return out


@dataclass(frozen=True)
class Layer:
    """Ops that run one after another, `times` times in a row, each time with its own weights."""

    name: str
    ops: tuple[Op | Exchange, ...]
    carries: Tensor  # what it hands to the next layer: all that a checkpoint keeps
    sizes: Mapping[str, float]  # the dims of `carries`, one sample
    times: int = 1
    splits: Mapping[str, str] = field(default_factory=dict)  # how axes split `carries`
    is_block: bool = True  # counted when layers are split into stages; embedding and head are not
    # layers it reads, the one before where empty; ("",): none, it reads the input
    after: tuple[str, ...] = field(default=(), repr=False)

    def works(self) -> Iterator[Op]:
        """Its ops without the exchanges."""
        return (op for op in self.ops if isinstance(op, Op))

    def output_bytes(self, degrees: Mapping[str, Number], batch: Number, dtype: str) -> Number:
        """Bytes one rank hands to the next layer."""
        sizes = Op(self.name, "carry", self.sizes, self.splits).sizes(degrees, batch)
        return self.carries.bytes(sizes, dtype)


@dataclass(frozen=True)
class Workload:
    """A model, what it is fed and in which number format it computes."""

    name: str  # the spec it was made from: `gpt:layers=24,…`
    layers: tuple[Layer, ...]  # in forward order
    batch: int = 1  # default samples of one step
    dtype: str = "bf16"
    tied: tuple[tuple[str, str], ...] = ()  # (layer/weight that is kept, layer/weight that is it)
    unit: str = "samples"  # what a sample is called
    tokens: float = 1.0  # of one sample, where it has tokens
    notes: tuple[str, ...] = ()  # what of a recorded model was not understood

    @property
    def num_blocks(self) -> int:
        """Layers that a pipeline splits to its stages."""
        return sum(layer.times for layer in self.layers if layer.is_block)

    @property
    def parameters(self) -> float:
        """Weights of the whole model; tied ones count once, padding does not count."""
        again = {other for _, other in self.tied}
        return sum(
            layer.times * float(weight.elements(op.dims))
            for layer in self.layers
            for op in layer.works()
            for weight in op.weights
            if f"{layer.name}/{weight.name}" not in again
        )

    @property
    def weights(self) -> dict[str, float]:
        """Elements of each weight, by `layer/name`; a repeated layer has one of each per time."""
        return {
            f"{layer.name}/{weight.name}": float(weight.elements(op.dims))
            for layer in self.layers
            for op in layer.works()
            for weight in op.weights
        }

    def flops(self, samples: float = 1.0) -> float:
        """Floating point operations of forward and backward for some samples, nothing twice."""
        pairs = zip(self.layers, self.layer_flops, strict=True)
        return samples * sum(layer.times * work for layer, work in pairs)

    @cached_property
    def layer_flops(self) -> list[float]:
        """Floating point operations of one sample through each layer once, forward and backward."""

        return [sum(flops(op, op.sizes({})) for op in layer.works()) for layer in self.layers]

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Embedding and head as a share of a block, by flops."""
        places = [at for at, layer in enumerate(self.layers) if layer.is_block]
        pairs = zip(self.layers, self.layer_flops, strict=True)
        work = [layer.times * once for layer, once in pairs]
        each = sum(work[at] for at in places) / max(self.num_blocks, 1)
        last = len(self.layers) - 1
        inner = [at for at in range(1, last) if at not in places]
        counted = {at: work[at] / each if at in inner and each else 1.0 for at in range(last + 1)}
        before = sum(counted[at] for at in range(places[0])) if places else 0.0
        behind = sum(counted[at] for at in range(places[-1] + 1, last + 1)) if places else 0.0
        return before, behind

    def most(self, axis: str) -> float:
        """The largest degree an axis may have; 1 where nothing can be split along it."""
        return self._limits.get(axis, 1.0)

    def splits(self, axis: str) -> bool:
        """Whether any op names a split along an axis, be its largest degree 1 (multi-query)."""
        return axis in self._limits

    @cached_property
    def _limits(self) -> dict[str, float]:
        """The largest useful degree of each axis; searches ask for it thousands of times."""
        found: dict[str, float] = {}
        for layer in self.layers:
            for op in layer.works():
                for axis in sorted({*op.splits, *op.most}):
                    most = float(op.most.get(axis, float("inf")))
                    found[axis] = min(found.get(axis, float("inf")), most)
        return found

    def fingerprint(self) -> str:
        """A hash of layers, sizes and format: a plan remembers for what it was made."""
        text = json.dumps([repr(layer) for layer in self.layers] + [self.dtype])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [f"{self.name}  {self.dtype}, batch {self.batch}"]
        lines += [f"  {layer.times:4} × {layer.name}: {_ops(layer)}" for layer in self.layers]
        flops = self.flops()
        lines += [f"  {self.parameters:,.0f} parameters, {flops:.3g} flop per sample"]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _ops(layer: Layer) -> str:
    return " ".join(op.name for op in layer.works())


class Call(NamedTuple):
    """One kernel: the class it is priced as, its shape, and its format where not the workload's."""

    op: str
    shape: dict[str, Number]
    dtype: str = ""
    flops: Number = 0.0
    bytes: Number = 0.0
    times: Number = 1.0  # how many of them in a row, on average over the layer's repetitions
    launches: Number = 0.0  # further launches of the host for it: expert by expert
    issue: str = ""  # as which kind the host issues it, where not as its class

    def moved(self, dtype: str) -> Number:
        """Bytes it reads and writes where the workload computes in `dtype`; 0 where not counted."""
        return self.bytes if self.dtype else self.bytes * BYTES[dtype] / BYTES["fp16"]


Calls = tuple[list[Call], list[Call]]  # forward, backward
_NARROW = ("gemm", "conv", "conv_dgrad", "conv_wgrad")  # what narrow formats speed up


def calls(op: Op, sizes: Sizes, flags: frozenset[str] = frozenset()) -> Calls:
    """The kernels of one op, forward and backward."""
    if op.kind not in RULES:
        raise unknown("kind of op", op.kind, RULES)
    found = RULES[op.kind](op, sizes, flags)
    if "fp8" in flags:
        return _quantised(op, sizes, found, flags)
    return _with_casts(op, sizes, found) if "amp" in flags else found


def turned(op: Op, turn: int) -> Op:
    """The op of one of the repetitions of its layer, where some have a window and some do not."""
    windows = op.options.get("windows", ())
    if len(windows) < 2:
        return op
    due = [int((turn + 1) * share + 1e-9) > int(turn * share + 1e-9) for _, share in windows[1:]]
    chosen = [w for (w, _), is_due in zip(windows[1:], due, strict=True) if is_due] or windows[0]
    return replace(op, options={**op.options, "windows": ((chosen[0], 1.0),)})


def _quantised(op: Op, sizes: Sizes, found: Calls, flags: frozenset[str]) -> Calls:
    """Eight bits: what a product of weights reads is cast before it, the rest stays in bf16.

    Each tensor is read for its largest number, read again, and written as it lies and turned, as
    the units want it (current scaling). Scores of attention and logits are not cast, as in
    Transformer Engine and torchao. Weights are not either where they are held in eight bits from
    one update to the next (flag `fp8-weights`: Transformer Engine's primary weights), or where each
    rank casts its shard before it is gathered (flag `fp8-gather`).
    """
    forward, back = found
    is_logits = op.options.get("vocabulary") and "fp8-where-faster" not in flags
    if op.kind not in ("matmul", "experts") or not op.weights or is_logits:
        return in_bf16(found)
    rows = sizes["batch"] * sizes.get("tokens", 1.0)
    matrix = sizes["in"] * sizes["out"] * sizes.get("experts", 1.0)
    each = _one_by_one(sizes, flags) if op.kind == "experts" else 0.0
    issue = "compiled_cast" if "fp8-where-faster" in flags else ""
    given = [_cast(rows * sizes["in"], each, issue)]
    if not flags & {"fp8-weights", "fp8-gather"}:
        given.append(_cast(matrix, 0.0, issue))
    return [*given, *forward], [_cast(rows * sizes["out"], each, issue), *back]


def _one_by_one(sizes: Sizes, flags: frozenset[str]) -> Number:
    """Launches beside the first where each expert of a rank has one of its own."""
    return sizes["experts"] - 1.0 if "one-by-one" in flags else 0.0


def _cast(n: Number, launches: Number, issue: str) -> Call:
    """Two kernels that move six bytes a number; a framework may take longer."""
    return Call("cast", {"n": n}, "bf16", bytes=3.0 * n, times=2.0, launches=launches, issue=issue)


def in_bf16(found: Calls) -> Calls:
    """The kernels of an op that is not brought to eight bits, where others are."""
    forward, back = ([_halved(call) for call in some] for some in found)
    return forward, back


def _halved(call: Call) -> Call:
    return call._replace(dtype="bf16") if call.op in _NARROW and not call.dtype else call


def _with_casts(op: Op, sizes: Sizes, found: Calls) -> Calls:
    """Autocast: each weight is cast before its product, its gradient back behind it."""
    if op.kind not in ("matmul", "conv", "recurrent") or not op.weights:
        return found
    forward, back = found
    many = [w.elements(sizes) for w in op.weights]
    casts = [Call("copy", {"n": n}, bytes=6.0 * n) for n in many]
    return [*casts, *forward], [*back, *casts]


def flops(op: Op, sizes: Sizes) -> float:
    """Operations of the matrix units, forward and backward: what MFU is counted by.

    Scores that a causal mask or a window hides do not count, nor what a fused backward recomputes,
    nor what the busiest of uneven ranks does more than its share (option useful).
    """
    if op.kind == "attention":
        forward, backward = _fused_attention(op, sizes, frozenset())
        backward = [call._replace(flops=0.8 * call.flops) for call in backward]  # 2 of 2.5
    else:
        forward, backward = calls(op, sizes)
    total = 0.0
    for call in forward + backward:
        total += float(np.asarray(call.flops)) * float(call.times)
    return total * float(op.options.get("useful", 1.0))


def product(b: Number, m: Number, n: Number, k: Number, **more: Number) -> Call:
    """A (batched) matmul."""
    return Call("gemm", {"b": b, "m": m, "n": n, "k": k, **more}, flops=2.0 * b * m * n * k)


def _bare(some: list[Call]) -> list[Call]:
    """Matmuls that the host issues without the views and modules around most of them."""
    return [c._replace(issue="bare") if c.op == "gemm" else c for c in some]


def _matmul(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    rows = s["batch"] * s.get("tokens", 1.0)
    n, k = s["out"], s["in"]
    forward = [product(1.0, rows, n, k, ta=0.0, tb=1.0)]
    back = [product(1.0, rows, k, n), product(1.0, n, k, rows, ta=1.0, tb=0.0)]
    if op.options.get("bare"):
        forward, back = _bare(forward), _bare(back)
    if _is_frozen(op):
        return forward, back[:1]
    if "eager" in flags and len(op.weights) > 1:  # the gradient of the bias
        back.append(Call("reduce", {"n": rows * n, "rows": n}, bytes=2.0 * rows * n))
    return forward, back[1:] if op.options.get("first") else back


def _is_frozen(op: Op) -> bool:
    """Whether an op has weights of which none is trained."""
    return bool(op.weights) and all(weight.frozen for weight in op.weights)


def _product(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    b, m, n, k = s["batch"] * s.get("b", 1.0), s["m"], s["n"], s["k"]
    return [product(b, m, n, k)], [product(b, m, k, n), product(b, k, n, m, ta=1.0)]


def _attention(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    fused = "flash" in flags or ("eager" in flags and op.options.get("sdpa"))
    if fused and not op.options.get("biased"):
        return _fused_attention(op, s, flags)
    b, q, k, d = s["batch"] * s["heads"], s["queries"], s["keys"], s["depth"]
    v, n = s.get("value", d), b * q * k
    there, back = _on_scores(op, n, {"rows": b * q, "cols": k}, flags)
    first = [product(b, q, k, v, tb=1.0), product(b, k, v, q, ta=1.0)]
    last = [product(b, q, d, k), product(b, k, d, q, ta=1.0)]
    forward = [product(b, q, k, d, tb=1.0), *there, product(b, q, v, k)]
    return _bare(forward), _bare([*first, *back, *last])


def _on_scores(op: Op, n: Number, rows: dict[str, Number], flags: frozenset[str]) -> Calls:
    """Mask, softmax and dropout of `n` scores; autocast runs the last two in fp32."""
    wide = "fp32" if flags >= {"written-out", "amp"} else ""
    forward, back = [Call("softmax", rows, wide)], [Call("softmax_backward", rows, wide)]
    if op.options.get("dropout", True):
        forward.append(Call("dropout", {"n": n}, wide))
        back.insert(0, Call("elementwise", {"n": n}, wide))
    if wide:
        cast = Call("copy", {"n": n}, "fp32", bytes=6.0 * n)
        forward, back = [cast, *forward, cast], [cast, *back, cast]
    masked, unmasked = _masked(op, n, flags)
    return [*masked, *forward], [*back, *unmasked]


def _masked(op: Op, n: Number, flags: frozenset[str]) -> Calls:
    """Scores scaled and masked where that is not part of the softmax's kernel.

    PyTorch's operators scale, then add the mask, which has no gradient; a model that adds a table
    to its scores scales its queries instead. Megatron's fused softmax takes halves alone
    (`fused_softmax.py`): in fp32 it fills masked scores in place through a view. Its gradient is
    copied into zeros (AsStridedBackward), copied twice, copied and filled, and copied back
    (CopySlices): thirteen passes, of which two read a mask that is broadcast.
    """
    one = Call("elementwise", {"n": n}, bytes=4.0 * n)
    if "written-out" in flags:
        return ([], []) if op.options.get("biased") else ([one, one], [one])
    if "torch-softmax" not in flags:
        return [], []
    filled, zeros = one._replace(shape={"n": n, "uneven": 1.0}), one._replace(bytes=2.0 * n)
    return [filled], [zeros, one._replace(times=5.0), filled]


def _fused_attention(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """One kernel each way; layers with a window beside layers without: a share of each."""
    b, heads, q, k = s["batch"], s["heads"], s["queries"], s["keys"]
    d = (s["depth"] + s.get("value", s["depth"])) / 2
    causal = 1.0 if op.options.get("causal") else 0.0
    shape = {"b": b, "heads": heads, "sq": q, "sk": k, "d": d, "causal": causal}
    shape |= {"dropout": 1.0} if "eager" in flags and op.options.get("dropout", True) else {}
    shape |= {"flash2": 1.0} if "flash2" in flags else {}
    forward, back = [], []
    for window, share in op.options.get("windows", ((0, 1.0),)):
        seen = shape | ({"window": float(window)} if window else {})
        work = 4.0 * b * heads * q * visible(k, causal, window) * d
        one = Call("attention", seen | {"direction": 0.0}, flops=work, times=share)
        forward.append(one)
        back.append(one._replace(shape=seen | {"direction": 1.0}, flops=2.5 * work))
    if "eager" in flags:  # heads are laid side by side again, gradients of all three stacked
        n = b * heads * q * s["depth"]
        forward.append(Call("copy", {"n": n}, bytes=4.0 * n))
        back.append(Call("copy", {"n": 3.0 * n}, bytes=12.0 * n))
    return forward, back


def _rows(s: Sizes, *skip: str) -> Number:
    out: Number = 1.0
    for dim, size in s.items():
        if dim not in skip:
            out = out * size
    return out


def _norm(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """A norm; `consumers` matmuls read it, `composite` ones are written out operator by operator.

    Under autocast norms run in fp32 and every consumer casts what it reads, its gradient back; the
    gradients of several consumers are added up.
    """
    shape, n = {"rows": _rows(s, "cols"), "cols": s["cols"]}, _rows(s)
    kind, mixed = op.options.get("kernel", "norm"), "amp" in flags
    many = float(op.options.get("consumers", 1)) if "eager" in flags else 1.0
    dtype, width = ("fp32", 4.0) if mixed else ("", 2.0)
    forward, back = [Call(kind, shape, dtype)], [Call(f"{kind}_backward", shape, dtype)]
    if op.options.get("composite") and "eager" in flags:
        forward, back = _composite_norm(n, mixed)
    if mixed:
        forward.append(Call("copy", {"n": n}, "fp32", bytes=6.0 * n, times=many))
        back.insert(0, Call("copy", {"n": n}, "fp32", bytes=6.0 * n, times=many))
    if many > 1:
        back.insert(0, Call("elementwise", {"n": n}, dtype, bytes=3 * width * n, times=many - 1))
    return forward, back


def _composite_norm(n: Number, mixed: bool) -> Calls:
    """RMS norm as Hugging Face writes it: cast, square, mean, scale, cast, weigh; all in fp32.

    Bytes a number of the operators (6 + 8 + 4 + 8 + 6 + 6 in halves) and of their gradients, that
    of the square alone 32.
    """
    there, back = (32.0, 96.0) if mixed else (38.0, 96.0)
    return (
        [Call("elementwise", {"n": n}, "fp32", bytes=there / 6 * n, times=6.0)],
        [Call("elementwise", {"n": n}, "fp32", bytes=back / 13 * n, times=13.0)],
    )


def _batch_norm(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """Statistics of each channel over samples and pixels.

    Channels last, cuDNN streams: 3 passes forward and 5 backward at the memory's pace (batch_norm
    nhwc rows of `tables/measured/h200.csv.gz`); bf16 goes to PyTorch's own kernels instead.
    Channels first, cuDNN's kernels take as long in fp16 as in fp32 (0.97 and 0.91, nchw rows).
    """
    n = _rows(s)
    if "nhwc" in flags and "bf16" not in flags:
        return [_stream(n, 3.0)], [_stream(n, 5.0)]
    shape = {"n": n} if "nhwc" in flags else {"n": n, "rows": s["c"], "cols": _rows(s, "c")}
    dtype = "fp32" if "fp16" in flags and "nhwc" not in flags else ""
    return [Call("batch_norm", shape, dtype)], [Call("batch_norm_backward", shape, dtype)]


def _stream(n: Number, passes: float) -> Call:
    """A kernel that reads and writes `passes` tensors; bytes of halves."""
    return Call("elementwise", {"n": n}, bytes=2.0 * passes * n)


def _mean(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """Pixels of each channel become one; its gradient is spread over them."""
    n = _rows(s)
    shape = {"n": n, "rows": s["batch"] * s["c"]}
    return [Call("reduce", shape)], [Call("elementwise", {"n": n, "uneven": 1.0})]


def _softmax(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    shape = {"rows": _rows(s, "cols"), "cols": s["cols"]}
    return [Call("softmax", shape)], [Call("softmax_backward", shape)]


def _pointwise(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """`passes` and `back` count the tensors of this size that each direction reads and writes.

    Bytes are those of half precision by default; the price model knows the workload's.
    `calls` kernels do the forward, `many` the backward; `stream` is the sum of residuals, fp32
    under autocast.
    """
    n, kind = _rows(s), op.options.get("kernel", "elementwise")
    dtype = op.options.get("dtype", "")
    if "amp" in flags and (op.options.get("stream") or op.options.get("rotary")):
        dtype = "fp32"  # so are the cosines that queries are multiplied with
    width = _WIDTH.get(dtype, 2.0)
    if "amp" in flags and "eager" in flags and dtype == "fp32":
        width *= MIXED  # halves and fp32 meet in one kernel, which then loads number by number
    there = op.options.get("passes", 2.0)
    back = op.options.get("back", there)
    if "eager" in flags and op.options.get("stream"):
        back = 3.0  # what comes back through both branches is added up
    many, turn = float(op.options.get("many", 1)), op.options.get("back_kernel", kind)
    shape = {"n": n, "rows": s["c"]} if turn == "reduce" else {"n": n}
    calls = float(op.options.get("calls", 1))
    if op.options.get("rotary") and "eager" in flags:  # over heads that lie apart, cosines repeated
        shape = {"n": n, "uneven": 1.0}
    own = {k: v for k, v in shape.items() if k != "rows"}
    ahead = Call(kind, own, dtype, bytes=there * width * n / calls, times=calls)
    forward = [ahead] if there else []
    gradient = Call(turn, shape, dtype, bytes=back * width * n / many, times=many)
    return forward, [gradient] if back else []


MIXED: float = passes()["mixed"]["times"]  # as long as its bytes say: a kernel of two formats
_WIDTH = {"fp32": 4.0, "fp64": 8.0, "fp8": 1.0, "int8": 1.0}


def _embedding(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    n = s["batch"] * s.get("tokens", 1.0) * s["hidden"]
    shape = {"n": n, "rows": n / s["hidden"], "cols": s["hidden"]}
    added = n / s["hidden"]
    if "vocab" in s:
        added = added_rows(added, s["vocab"])
    back = [Call("embedding_backward", shape | {"rows": added})]
    if op.options.get("dense"):  # the gradient is a whole table, zero but for what was looked up
        whole = s["vocab"] * s["hidden"]
        back.insert(0, Call("elementwise", {"n": whole}, bytes=2.0 * whole))
    return [Call("embedding", shape)], [] if _is_frozen(op) else back


def _biased(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """A table added to scores of heads × queries × keys, and its gradient summed where learned."""
    n = s["batch"] * s["heads"] * s["queries"] * s["keys"]
    table = n / s["batch"] / s["heads"] * s.get("each", 1.0)
    forward = [Call("elementwise", {"n": n, "uneven": 1.0}, bytes=4.0 * n)]
    back = [Call("reduce", {"n": n, "rows": table}, bytes=2.0 * n)]
    return forward, back if op.options.get("back") else []


def _loss(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """Cross entropy in fp32: cast, maximum, subtract, exp, sum, divide; one kernel where fused."""
    rows = s["batch"] * s.get("tokens", 1.0)
    n, shape = rows * s["vocab"], {"rows": rows, "cols": s["vocab"]}
    if ("fused" in flags and "written-loss" not in flags) or "eager" in flags:
        there, back = Call("softmax", shape, "fp32"), Call("softmax_backward", shape, "fp32")
        is_wide = "amp" in flags or "fp32-loss" in flags
        if "eager" in flags and not is_wide:
            there, back = there._replace(dtype=""), back._replace(dtype="")
        cast = [Call("copy", {"n": n}, "fp32", bytes=6.0 * n)] if is_wide else []
        width = 4.0 if there.dtype else 2.0
        zeros = [Call("elementwise", {"n": n}, there.dtype, bytes=width * n)]
        return [*cast, there], [*(zeros if "eager" in flags else []), back, *cast]
    half = [Call("elementwise", {"n": n}, "fp32", bytes=6.0 * n)]
    half = [] if "torch-softmax" in flags else half  # computed in fp32 already
    forward = [*half, Call("reduce", {"n": n, "rows": rows}, "fp32", bytes=4.0 * n)]
    forward += [Call("elementwise", {"n": n}, "fp32", bytes=8.0 * n)] * 3
    forward += [Call("reduce", {"n": n, "rows": rows}, "fp32", bytes=4.0 * n)]
    return forward, [Call("elementwise", {"n": n}, "fp32", bytes=8.0 * n), *half]


def _conv(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """A `turned` (transposed) one runs forward what another runs for its gradient."""
    shape = _conv_shape(op, s) | ({"nhwc": 1.0} if "nhwc" in flags else {})
    work = _conv_flops(shape)
    names = ("conv_dgrad", "conv") if op.options.get("turned") else ("conv", "conv_dgrad")
    back = [Call(names[1], shape, flops=work), Call("conv_wgrad", shape, flops=work)]
    return [Call(names[0], shape, flops=work)], back[1:] if op.options.get("first") else back


def _conv_shape(op: Op, s: Sizes) -> dict[str, Number]:
    """Sizes and options; the output's sizes are given where padding is asymmetric."""
    keys = ("c", "h", "w", "k", "r", "s", "d", "t")
    shape = {"n": s["batch"]} | {key: s[key] for key in keys if key in s}
    shape |= {k: float(op.options[k]) for k in ("stride", "pad", "groups") if k in op.options}
    for side, image, window, pad in zip("pq", "hw", "rs", op.options.get("pads", ()), strict=False):
        shape[side] = slid(s[image], s[window], float(pad), float(op.options.get("stride", 1)))
    return shape


def slid(size: Number, window: Number, pad: Number, stride: Number) -> Number:
    """How often a window fits on a side, padded at both ends."""
    out: Number = np.maximum(np.floor((size + 2 * pad - window) / stride) + 1, 1.0)
    return out


def _conv_flops(s: dict[str, Number]) -> Number:
    stride, pad, groups = s.get("stride", 1.0), s.get("pad", 0.0), s.get("groups", 1.0)
    out: Number = s["n"] * s["k"] * s["c"] / groups
    for image, window, side in (("h", "r", "p"), ("w", "s", "q"), ("d", "t", "")):
        if image in s:
            taps = s.get(window, 1.0)
            out = out * s.get(side, slid(s[image], taps, pad, stride)) * taps
    total: Number = 2.0 * out
    return total


def _pool(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    n = _rows(s)
    return [Call("pool", {"n": n})], [Call("pool_backward", {"n": n})]


def _recurrent(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    gates, steps = float(op.options.get("gates", 4)), float(op.dims["steps"])
    b, wide = s["batch"], gates * s["hidden"]
    fed = product(1.0, b * s["steps"], wide, s["in"])
    turn = product(1.0, b, wide, s["hidden"])
    own = Call("elementwise", {"n": b * wide})
    forward = [fed, turn._replace(times=steps), own._replace(times=steps)]
    back = [fed, fed, turn._replace(times=steps), product(1.0, wide, s["hidden"], b * s["steps"])]
    return forward, [*back, own._replace(times=steps)]


def _route(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """Scores of experts and the best of them; a sort of all scores goes over them a few times."""
    rows, top = s["batch"] * s["tokens"], float(op.options.get("top", 2))
    n = rows * s["experts"]
    soft = {"rows": rows, "cols": s["experts"]}
    best = Call("elementwise", {"n": n}, "fp32", bytes=4.0 * 4.0 * n)
    sort = 12.0 if flags & {"eager", "compiled"} else 3.0
    order = Call("elementwise", {"n": rows * top}, "fp32", bytes=4.0 * 4.0 * rows * top, times=sort)
    gate = product(1.0, rows, s["experts"], s["hidden"])
    forward = [gate, Call("softmax", soft, "fp32"), best, order]
    backward = [Call("softmax_backward", soft, "fp32"), gate, gate]
    return forward, backward[:-1] if _is_frozen(op) else backward


# Passes over all routed words that gathering them and adding them up takes by PyTorch's operators.
PERMUTED: dict[str, dict[str, list[float]]] = passes()["permuted"]


def _reordered(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """Words in the order of the experts they go to, and the weighted sum of what experts made.

    Fused, words are read once and written `top` times; PyTorch's operators gather them and add
    gradients up by index, which takes as long as `PERMUTED` passes over what is routed. There are
    no copies where words that go to other ranks are sent once: such a dispatcher (DeepEP, HybridEP)
    reads words where they lie and adds them up as they come.
    """
    leaves, each = op.kind == "combine", 1.0 / float(op.options.get("top", 2))
    way = next((name for name in PERMUTED if name in flags), "")
    fused = [1.0 + each, 1.0 + leaves + each]
    passed = PERMUTED[way]["out" if leaves else "into"] if way else fused
    n = s["batch"] * s["tokens"] * s["hidden"]
    here: Number = 1.0
    if "sent-once" in flags:
        here = np.where(np.asarray(s["experts"]) < op.dims["experts"], 0.0, 1.0)
    forward, back = (Call("copy", {"n": n}, bytes=2.0 * p * n, times=here) for p in passed)
    return [forward], [back]


def _regroup(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """Words that came from other ranks, in the order of this rank's experts; none come at ep=1."""
    some = np.where(np.asarray(s["experts"]) < op.dims["experts"], 1.0, 0.0)
    n = s["batch"] * s["tokens"] * s["hidden"]
    moved = [Call("copy", {"n": n}, bytes=4.0 * n, times=some)]
    return moved, moved


def _experts(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """A product for each expert a rank has, over its even share of what is routed to it."""
    rows = s["batch"] * s["tokens"] / s["experts"]
    many, n, k = s["experts"], s["out"], s["in"]
    forward = [product(many, rows, n, k, tb=1.0, grouped=1.0)]
    back = [product(many, rows, k, n, grouped=1.0)]
    back.append(product(many, n, k, rows, ta=1.0, grouped=2.0))
    each = _one_by_one(s, flags)
    forward, back = ([c._replace(launches=each) for c in some] for some in (forward, back))
    return forward, back[:1] if _is_frozen(op) else back


def _expert_bias(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """A bias times what each word weighs, expert by expert in fp32, and put together again.

    Counted in Megatron-core's TEGroupedMLP: multiplication, sum, cat and cast move 28 bytes a
    number; in the backward two casts, two multiplications with their sums and a cat 40.
    """
    n, each = s["batch"] * s["tokens"] * s["cols"], s["experts"] - 1.0
    forward = Call("elementwise", {"n": n}, "fp32", bytes=7.0 * n, times=4.0, launches=2.0 * each)
    back = Call("elementwise", {"n": n}, "fp32", bytes=5.0 * n, times=8.0, launches=5.0 * each)
    return [forward], [back]


def _recorded(op: Op, s: Sizes, flags: frozenset[str]) -> Calls:
    """Kernels as they were recorded, by their size: those `once` do not grow with the batch."""
    n = _rows(s, "batch") if op.options.get("once") else _rows(s)
    there, back = ([_call(k, n) for k in op.options[way]] for way in ("forward", "backward"))
    return there, back


def _call(kernel: tuple[Any, ...], n: Number) -> Call:
    kind, grows, fixed, moved, dtype, work = kernel
    shape = {key: share * n for key, share in grows} | dict(fixed)
    return Call(kind, shape, dtype, flops=work * n, bytes=moved * n)


RULES: dict[str, Callable[[Op, Sizes, frozenset[str]], Calls]] = {
    "matmul": _matmul,
    "product": _product,
    "attention": _attention,
    "norm": _norm,
    "softmax": _softmax,
    "pointwise": _pointwise,
    "embedding": _embedding,
    "loss": _loss,
    "biased": _biased,
    "conv": _conv,
    "pool": _pool,
    "batch_norm": _batch_norm,
    "mean": _mean,
    "recurrent": _recurrent,
    "route": _route,
    "permute": _reordered,
    "regroup": _regroup,
    "combine": _reordered,
    "experts": _experts,
    "expert_bias": _expert_bias,
    "recorded": _recorded,
}
