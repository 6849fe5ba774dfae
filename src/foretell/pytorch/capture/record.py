"""Records every operator of a step as the dispatcher sees it: forward, loss, backward,
optimizer.

An operator belongs to the innermost module that is running. A backward operator belongs to the
autograd node that runs it, and that node to the forward operator that made it: both know the
node's sequence number. Below autograd the number of a forward operator's own node is one less than
the next to be given, and operators that make no node still see it: the first to show a number is
the one that made the node.

Who made each tensor, and how long its memory lives. A tensor's memory is its storage: views share
it, and it is given back when the last one that refers to it is gone, whether that is Python,
autograd or an optimizer. Moments are counted in operators recorded so far.

How far a capture is: by modules while it runs forward, by operators from there on. A backward pass
has about twice the operators of the forward pass (two matmuls for one), and running one on fake
tensors takes the same whatever it is: so the whole is about three forward passes, and the optimizer
and the graph are the little that is left.

Memory that libraries take for themselves. cuBLAS keeps a workspace for each thread that uses it; a
step has two, its own and the one autograd runs on. Workspaces of convolutions depend on the
algorithm cuDNN picks and are not known here.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.graph import BufferKind, Dtype, Phase
from foretell.graph.graph import NONE
from foretell.operators import PRODUCTS
from foretell.pytorch.capture import words
from foretell.pytorch.capture.gpu import DEVICE_OF, ON_CPU, alias_of
from foretell.pytorch.capture.values import Values, written
from foretell.pytorch.capture.words import bytes_of, conv_work, flops_of, moved_bytes

BLOCK = 512  # bytes: PyTorch's allocator on CUDA hands out multiples of it
EVERY = 16  # operators between two words
# Operators that only reserve memory, and those that tell the host a number.
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_ASKS = ("_local_scalar_dense", "equal", "is_nonzero")
# Aliases that torch makes inside C++, in nanoseconds; not worth a task of their own.
_FREE = ("detach", "alias", "lift_fresh", "_unsafe_view")
_SILENT = ("profiler", "prim", "debugprims")  # namespaces that do nothing to data
_THREADS = 2


@dataclass(slots=True)
class Stay:
    """Memory from one operator to another."""

    bytes: float
    born: int  # the operator that made it, NONE where it was there before
    kind: BufferKind
    name: str
    dies: int = NONE  # the last operator recorded while it was there, NONE for good
    maker: int = NONE  # the operator that wrote it last
    weight: str = ""  # the parameter it is, or is a cast of


@dataclass
class Ledger:
    """Every piece of device memory met so far, in the order it was met."""

    stays: list[Stay] = field(default_factory=list)
    block: int = BLOCK
    now: int = NONE  # the last operator recorded
    is_closed: bool = False  # what is given back from now on was there for good
    _live: dict[int, Stay] = field(default_factory=dict)
    _watch: dict[int, Any] = field(default_factory=dict)

    def stay(self, tensor: torch.Tensor) -> Stay | None:
        """What is known of a tensor's memory."""
        return self._live.get(_plain(tensor).untyped_storage()._cdata)

    def meet(self, tensor: torch.Tensor, born: int, kind: BufferKind, name: str) -> Stay:
        """Enter a tensor's memory where it is not known yet."""
        storage = _plain(tensor).untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known
        size = -(-storage.nbytes() // self.block) * self.block
        made = self._live[key] = Stay(float(size), born, kind, name, maker=born)
        self._watch[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.stays.append(made)
        return made

    def close(self, *models: torch.nn.Module) -> None:
        """The step is over: gradients are known as such, and what is left was there for good."""
        for name, parameter in (pair for model in models for pair in model.named_parameters()):
            known = None if parameter.grad is None else self.stay(parameter.grad)
            if known is not None:
                known.kind, known.name = BufferKind.GRADIENT, name
        self.is_closed = True

    def _forget(self, key: int) -> None:
        gone = self._live.pop(key, None)
        self._watch.pop(key, None)
        if gone is not None and not self.is_closed:
            gone.dies = max(self.now, 0)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside those that `torch.func` wraps around it, which have no memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


FORWARD, BACKWARD = 0.32, 0.96  # shares of a capture that are done when these passes are


@dataclass
class Pace:
    """Progress of a capture, from the modules and operators seen so far."""

    progress: Callable[[str, float], None] = lambda words, share: None
    modules: int = 0  # of the model
    entered: int = 0
    forward: int = 0  # operators of the forward pass

    def enter(self) -> None:
        """A module begins to run."""
        self.entered += 1
        of = max(self.modules, self.entered)
        self.progress(f"forward, module {self.entered} of {of}", FORWARD * self.entered / of)

    def note(self, phase: Phase, operators: int) -> None:
        """So many operators have been written down."""
        if phase in (Phase.FORWARD, Phase.LOSS):
            self.forward = operators
        elif operators % EVERY == 0:
            done = min((operators - self.forward) / (2 * self.forward + 1), 1.0)
            share = BACKWARD if phase == Phase.UPDATE else FORWARD + (BACKWARD - FORWARD) * done
            self.progress(f"{phase.name.lower()}, {operators:,} operators", share)


class Part(NamedTuple):
    """One kernel: which of its operator's, and what it computes and moves."""

    word: str
    flops: float
    bytes: float


def parts_of(op: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Part, ...]:
    """The kernels of an operator, in the order they are launched."""
    if op == "convolution":
        return _conv(inputs, outputs)
    if op == "convolution_backward":
        return _conv_backward(inputs, outputs)
    return (Part("", flops_of(op, inputs, outputs), moved_bytes(op, inputs, outputs)),)


def _conv(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Part, ...]:
    """cuDNN adds no bias: a kernel of its own does."""
    out = outputs[0]
    moved = bytes_of(inputs[0]) + bytes_of(inputs[1]) + bytes_of(out)
    main = Part("conv", flops_of("convolution", inputs, outputs), moved)
    if inputs[2] is None:
        return (main,)
    return (main, Part("bias", float(out.numel()), 2 * bytes_of(out)))


def _conv_backward(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Part, ...]:
    grad, x, weight = inputs[:3]
    wanted = inputs[10]
    flops = conv_work(x, grad, weight, bool(inputs[7]))
    moved = bytes_of(grad) + bytes_of(x) + bytes_of(weight)
    every = (
        Part("dgrad", flops, moved),
        Part("wgrad", flops, moved),
        Part("bias", float(grad.numel()), bytes_of(grad)),
    )
    return tuple(part for part, is_in in zip(every, wanted, strict=True) if is_in)


@dataclass(slots=True)
class Row:
    """One operator as it was issued."""

    op: str
    name: str
    layer: str
    phase: Phase
    direction: str
    dtype: Dtype
    shape: str
    parts: tuple[Part, ...]  # kernels it launches, none for a view
    after: tuple[int, ...]  # operators whose results it uses
    modules: int  # entered since the operator before
    nodes: int
    tensors: int  # of a list operator
    waits: bool = False  # the host waits for a number
    is_copy: bool = False  # over the host's bus
    reads_batch: bool = False
    weights: tuple[tuple[str, int], ...] = ()  # parameters it reads, and how many elements of each


@dataclass
class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """A mode that writes down operators while it is open."""

    names: dict[int, str]  # id of a module → its path in the model
    values: Values
    device: torch.device
    phase: Phase = Phase.NONE  # nothing is written down in `NONE`
    rows: list[Row] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    parameters: dict[int, str] = field(default_factory=dict)  # id of a parameter → its path
    weights: dict[str, Any] = field(default_factory=dict)  # parameters by paths of their own
    pace: Pace = field(default_factory=Pace)
    stopped: str = ""  # the operator and layer where an error came up
    _stack: list[str] = field(default_factory=list)
    _made: dict[int, int] = field(default_factory=dict)  # sequence number → forward operator
    _counts: Counter[str] = field(default_factory=Counter)
    _modules: int = 0
    _nodes: int = 0
    _node: Any = None

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_OF:
            return alias_of(args[0]) if hasattr(args[0], "fake_device") else args[0].device
        number = torch.autograd._get_sequence_nr() - 1
        made = self._run(func, args, kwargs)
        if self.phase != Phase.NONE and is_work(func):
            self._note(func, words.inputs_of(func, args, kwargs), made, number)
        return made

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self.values.run(func, args, kwargs, self.layer)
        except Exception:
            self.stopped = f" in `{func}`" + (f" of layer `{self.layer}`" if self.layer else "")
            raise

    @property
    def layer(self) -> str:
        """The innermost module that is running."""
        return self._stack[-1] if self._stack else ""

    def enter(self, model: Any, like: Callable[[Any], Any] = lambda tensor: tensor) -> None:
        """Make known a model that is there before the step; `like`: what stands for a tensor."""
        self.names |= {id(m): name for name, m in reversed(list(model.named_modules()))}
        for name, parameter in model.named_parameters():
            path = self.parameters[id(parameter)] = name
            while self.weights.setdefault(path, parameter) is not parameter:  # of another model
                path = f"other.{path}"
            kind = BufferKind.PARAMETER
            self.ledger.meet(like(parameter), NONE, kind, name).weight = path
        for name, buffer in model.named_buffers():
            self.ledger.meet(like(buffer), NONE, BufferKind.PARAMETER, name)

    def facts(self, name: str, on: str, autocast: str, optimizer: Any) -> dict[str, Any]:
        """What a graph says of its step: which parameters each call reads, and how it was made."""
        forward = (row for row in self.rows if row.direction == "fwd" and row.weights)
        every = {id(p): p.numel() for p in self.weights.values()}
        trained = {path: int(p.numel()) for path, p in self.weights.items() if p.requires_grad}
        facts: dict[str, Any] = {"captured": name, "parameters": sum(every.values())}
        facts |= {"torch": torch.__version__, "kernels_of": on, "weights": trained}
        facts["reads"] = {row.name: [*map(list, row.weights)] for row in forward}
        facts |= {"autocast": autocast} if autocast else {}
        facts |= {} if optimizer is None else {"optimizer": type(optimizer).__name__}
        used = self.values.used
        return facts | ({"assumed": sorted(set(used))} if used else {})

    def loss_begins(self) -> None:
        """From here on the forward pass is the loss."""
        if self.phase == Phase.FORWARD:
            self.phase = Phase.LOSS

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """While this is open, modules say when they run."""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: Any, _: Any) -> None:
        self._stack.append(self.names.get(id(module), type(module).__name__))
        self._modules += 1
        if self.phase == Phase.FORWARD:
            self.pace.enter()

    def _leave(self, module: Any, _: Any, __: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _note(self, func: Any, inputs: list[Any], made: Any, number: int) -> None:
        op, outputs = words.op_word(func), words.tensors_in(made) or written(func, inputs, {})
        i = len(self.rows)
        given = words.tensors_in(inputs)
        name, layer, direction = self._belongs(op, i, number)
        if op in _FREE and not name.endswith(".grad"):
            return
        waits = op in _ASKS and any(not self._is_on_host(t) for t in given)
        parts = self._parts(func, op, inputs, given, outputs)
        row = Row(
            op, name, layer, self.phase, direction, words.format_of(given or outputs), "", parts,
            self._sources(given), self._modules, self._nodes, _listed(inputs),
        )  # fmt: skip
        if parts or waits:
            row.shape = words.shape_text(func, inputs)
            # from the host to the device or back
            is_copy = len({t.device.type for t in (*given[:1], *outputs[:1])}) > 1
            row.waits, row.is_copy = waits, is_copy
            stays = [self.ledger.stay(t) for t in given]
            row.reads_batch = any(s and s.kind == BufferKind.INPUT for s in stays)
            size = (int(words.bytes_of(t)) // t.element_size() for t in given)  # what is read once
            pairs = zip(stays, size, strict=True)
            row.weights = tuple((s.weight, n) for s, n in pairs if s and s.weight)
        self._modules = self._nodes = 0
        self.rows.append(row)
        self.pace.note(self.phase, len(self.rows))
        self.ledger.now = i
        self._keep(func, outputs, i, row)

    def _belongs(self, op: str, i: int, number: int) -> tuple[str, str, str]:
        """Name, layer and direction of an operator."""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:  # forward, also of what is recomputed
            if op not in _FREE:
                self._made.setdefault(number, i)
                self._counts[op] += 1
            return f"{op}.{self._counts[op] - 1}", self.layer, "fwd"
        if node is not self._node:
            self._node, self._nodes = node, self._nodes + 1
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            path = self.parameters.get(id(leaf), "")
            return f"{path}.grad", path.rpartition(".")[0], "bwd"
        forward = self._made.get(node._sequence_nr(), NONE)
        if forward == NONE:
            return node.name(), "", "bwd"
        return f"{self.rows[forward].name}.backward", self.rows[forward].layer, "bwd"

    def _parts(
        self, func: Any, op: str, inputs: list[Any], given: list[Any], outputs: list[Any]
    ) -> tuple[Part, ...]:
        """The kernels of an operator; none where it only looks at memory, reserves it or asks."""
        if op in _EMPTY or op in _ASKS or not outputs or all(map(self._is_on_host, outputs)):
            return ()
        if not func._schema.is_mutable and _is_view(given, outputs):
            return ()
        if not sum(t.numel() for t in outputs):
            return ()
        return parts_of(op, inputs, outputs)

    def _is_on_host(self, tensor: Any) -> bool:
        """A tensor elsewhere than on the device; where that is a CPU, its scalars."""
        if self.device.type == "cpu":
            return bool(tensor.dim() == 0)
        return bool(tensor.device.type != self.device.type)

    def _sources(self, given: Sequence[Any]) -> tuple[int, ...]:
        known = (self.ledger.stay(t) for t in given)
        return tuple(sorted({s.maker for s in known if s and s.maker != NONE}))

    def _keep(self, func: Any, outputs: list[Any], i: int, row: Row) -> None:
        """Enter what an operator made, and that it wrote what it changed in place."""
        kind = BufferKind.OTHER if self.phase == Phase.BACKWARD else BufferKind.ACTIVATION
        for tensor in outputs:
            if not self._is_on_host(tensor):
                self.ledger.meet(tensor, i, kind, row.layer or row.op)
        if row.op == "copy_" and row.weights and not func._schema.is_mutable:
            for known in filter(None, map(self.ledger.stay, outputs)):
                known.weight = row.weights[0][0]
        if func._schema.is_mutable and row.parts:
            for known in filter(None, map(self.ledger.stay, outputs)):
                known.maker = i


def is_work(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func.namespace not in _SILENT


def _is_view(given: Sequence[Any], outputs: Sequence[Any]) -> bool:
    known = {t.untyped_storage()._cdata for t in given}
    return all(t.untyped_storage()._cdata in known for t in outputs)


def _listed(inputs: Sequence[Any]) -> int:
    """How many tensors a list operator treats."""
    first = inputs[0] if inputs else None
    return len(first) if isinstance(first, (list, tuple)) and len(first) > 1 else 0


# PyTorch documentation, CUDA semantics, cuBLAS workspaces: 32 MiB on Hopper and later, else 8.125.
_LARGE, _SMALL = 32 * 2**20, 8519680


def workspace(rows: Sequence[Row], arch: str) -> list[Stay]:
    """What cuBLAS holds where a step has matmuls."""
    if arch == ON_CPU or not any(row.op in PRODUCTS for row in rows):
        return []
    size = _LARGE if arch in ("hopper", "blackwell") else _SMALL
    return [Stay(float(size), NONE, BufferKind.WORKSPACE, "cuBLAS") for _ in range(_THREADS)]
