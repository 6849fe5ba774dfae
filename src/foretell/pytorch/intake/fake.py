"""A script run as on a GPU that is not there: its weights are fake, its data is real.

Parameters become fake `cuda` tensors as soon as a module gets them; whatever is computed with them
is fake too and takes no time and no memory. Everything else, such as data, masks, lengths and
random numbers, stays real on the CPU whatever device the script names, so that code which looks at
its data works. What the script reads back from the GPU is ones (zeros for whole numbers): nothing
was computed.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from foretell.pytorch.capture import gpu
from foretell.pytorch.capture.step import copyable

aten = torch.ops.aten


class Fakes:
    """Fake tensors that stand for real ones, on the GPU that is pretended."""

    def __init__(self) -> None:
        self.mode = gpu.fake_mode(gpu.GPU)
        self.known: Any = WeakIdKeyDictionary()  # real tensor → fake
        self.bases: dict[int, Any] = {}  # storage of a real tensor → fake of all of it
        self.parameters: dict[int, tuple[Any, Any]] = {}  # id → real parameter, fake

    def of(self, real: Tensor) -> Tensor:
        """The fake of a real tensor; tensors that share memory have fakes that share it."""
        if is_fake(real) or (type(real) is not Tensor and not isinstance(real, Parameter)):
            return real
        found = self.known.get(real)
        if found is None or found.shape != real.shape:
            with _alone(), self.mode:
                found = self._viewed(real)
            self.known[real] = found
        return found

    def _viewed(self, real: Tensor) -> Tensor:
        if real.layout is not torch.strided:
            return torch.empty(real.shape, dtype=real.dtype, device=gpu.GPU)
        storage = real.untyped_storage()
        key = (storage._cdata, real.dtype)
        held = self.bases.get(hash(key))
        base = held() if held is not None else None
        size = storage.nbytes() // real.element_size()
        if base is None or base.numel() != size:
            base = torch.empty(size, dtype=real.dtype, device=gpu.GPU)
            self.bases[hash(key)] = weakref.ref(base)
        view = base.as_strided(real.shape, real.stride(), real.storage_offset())
        view._base_of_fake = base  # kept alive with it
        return view

    def parameter(self, real: Any) -> Any:
        """The fake parameter of a real one, the same on every call."""
        if id(real) not in self.parameters:
            with _alone(), self.mode:
                like = torch.empty_strided(
                    real.shape, real.stride(), dtype=real.dtype, device=gpu.GPU
                )
                made = Parameter(like, requires_grad=real.requires_grad)
            more = {k: v for k, v in vars(real).items() if not k.startswith("__")}
            for name, value in more.items():
                setattr(made, name, value)
            self.parameters[id(real)] = real, made
        return self.parameters[id(real)][1]

    def all_of(self, values: Any, *, floats: bool = False) -> Any:
        """Values with fakes for the real tensors among them; scalars stay on the host."""

        def one(t: Tensor) -> Tensor:
            is_left = (floats and not t.is_floating_point()) or (not t.dim() and not is_fake(t))
            return t if is_left else self.of(t)

        return tree_map_only(Tensor, one, values)

    def met(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Arguments of an operator with a fake among them: all are on the GPU that may be.

        A real scalar stays on the host, unless the operator writes to it.
        """
        if func in _LOOKS:
            return args, kwargs
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            args = (self.of(args[0]), *args[1:])
        return self.all_of((args, kwargs))


_LOOKS = (aten._pack_padded_sequence.default, aten.copy_.default)  # at what is on the host


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def has_fake(values: Any) -> bool:
    """Whether a fake tensor is among arguments, also in lists and dicts of them."""
    if isinstance(values, Tensor):
        return is_fake(values)
    if isinstance(values, (list, tuple)):
        return any(has_fake(v) for v in values)
    return isinstance(values, dict) and any(has_fake(v) for v in values.values())


def read_back(fake: Tensor) -> Tensor:
    """Values read back from a fake GPU: ones, and zeros for integers."""
    is_one = fake.is_floating_point() or fake.is_complex() or fake.dtype is torch.bool
    with _alone():
        return torch.full(tuple(fake.shape), 1 if is_one else 0, dtype=fake.dtype)


@contextmanager
def _alone() -> Iterator[None]:
    """Torch without the modes that are open."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


class Device(TorchDispatchMode):  # type: ignore[misc]
    """Runs operators with a fake tensor among their inputs as fakes, all others for real."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self.fakes = fakes
        self.reads: Counter[tuple[str, int]] = Counter()  # yes or no, by the line that asks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not has_fake((args, kwargs)):
            return func(*args, **_on_cpu(kwargs))
        if func is gpu.DEVICE_OF:
            return gpu.alias_of(args[0])
        if func is aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if func in (aten._to_copy.default, aten.copy_.default) and _goes_to_cpu(func, args, kwargs):
            if func is aten.copy_.default:
                return args[0].copy_(read_back(args[1]))
            return read_back(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if func is aten.equal.default:
            return True
        if func is aten._pack_padded_sequence.default:
            return self._packed(*args)
        if func is aten.copy_.default:
            args = self.fakes.all_of(args)
        args, kwargs = self.fakes.met(func, args, kwargs)
        with self.fakes.mode:
            return func(*args, **kwargs)

    def _scalar(self, fake: Tensor) -> Any:
        """The value of a fake number; a line that tests it in a loop gets the other boolean."""
        found = read_back(fake).item()
        if fake.dtype is not torch.bool:
            return found
        line = _calling_line()
        self.reads[line] += 1
        return not found if self.reads[line] > _ENDLESS else found

    def _packed(self, values: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        """Sequences packed by lengths that are real: only the values are fake."""
        thin = torch.zeros(*values.shape[:2], 1)
        data, sizes = aten._pack_padded_sequence.default(thin, lengths, batch_first)
        with self.fakes.mode:
            return values.new_empty((len(data), *values.shape[2:])), sizes


_ENDLESS = 2_000  # times that a loop's condition is true
_OURS = str(Path(__file__).parents[2])
_INNER = ("_python_dispatch.py", "_ops.py", "_compile.py", "eval_frame.py", "overrides.py")


def _calling_line() -> tuple[str, int]:
    """The line of code, of the script or of a library, that asks for a number."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS) and not name.endswith(_INNER):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _goes_to_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func is aten.copy_.default:
        return not is_fake(args[0])
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Options of an operator on real data, which stays on the CPU."""
    found = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    device = found.get("device")
    if device is not None and torch.device(device).type in ("cuda", gpu.ALIAS.type):
        found["device"] = torch.device("cpu")
    return found


class Calls(TorchFunctionMode):  # type: ignore[misc]
    """Calls of a script: what meets a weight goes to the GPU, what is read back comes from it."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self.fakes = fakes
        self.claimed: Any = WeakIdKeyDictionary()  # real tensors that the script put on the GPU

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _MOVES and args and isinstance(args[0], Tensor):
            return self._moved(func, name, args, kwargs)
        if name == "__get__" and func in _PLACES and self.claimed.get(args[0]):
            return gpu.GPU if func == _PLACES[0] else True
        if not has_fake((args, kwargs)):
            return self._claim(func(*args, **_on_cpu(kwargs)), kwargs.get("device"))
        if name in _READS and is_fake(args[0]):
            return getattr(read_back(args[0]), name)(*args[1:], **kwargs)
        if func is Tensor.backward:  # what is recomputed in it meets weights too
            given = dict(zip(_BACKWARD, args[1:], strict=False)) | kwargs
            with self:
                return torch.autograd.backward(args[0], given.pop("gradient", None), **given)
        if name in _CHECKS:  # nothing that came back would be anything but a number
            return getattr(torch, name)(read_back(args[0]))
        args, kwargs = self.fakes.all_of((args, kwargs), floats=True)
        return func(*args, **kwargs)

    def _claim(self, made: Any, device: Any) -> Any:
        """Let a real tensor say that it is where the script put it."""
        if device is not None and isinstance(made, Tensor) and not is_fake(made):
            self.claimed[made] = torch.device(device).type == "cuda"
        return made

    def _moved(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Data stays where it is, whatever device is named; what is fake is read back, or stays."""
        tensor = args[0]
        if name == "pin_memory":
            return tensor
        if name in ("cuda", "cpu"):
            is_read = name == "cpu" and is_fake(tensor)
            return read_back(tensor) if is_read else self._claim(tensor, name)
        if len(args) > 1 and isinstance(args[1], Tensor):
            args, kwargs = (tensor, args[1].dtype, *args[2:]), dict(kwargs)
        device, dtype, _, layout = torch._C._nn._parse_to(
            *args[1:], **{k: v for k, v in kwargs.items() if k != "copy"}
        )
        if device is not None and device.type == "cpu" and is_fake(tensor) and not _applying:
            return read_back(tensor).to(dtype or tensor.dtype)
        conversion = {"dtype": dtype, "memory_format": layout, "copy": kwargs.get("copy", False)}
        wanted = {k: v for k, v in conversion.items() if v}
        return self._claim(tensor.to(**wanted) if wanted else tensor, device)


_PLACES = (Tensor.device.__get__, Tensor.is_cuda.__get__)  # each access makes one anew
_MOVES = ("to", "cuda", "cpu", "pin_memory")
_READS = ("tolist", "numpy", "__array__", "__format__")
_CHECKS = ("isnan", "isinf", "isfinite")
_BACKWARD = ("gradient", "retain_graph", "create_graph", "inputs")  # of Tensor.backward
_applying: list[bool] = []  # modules are being moved: parameters stay where they are


@contextmanager
def pretended(fakes: Fakes, *, shows_gpu: bool) -> Iterator[None]:
    """While this is open, torch behaves as on a machine with a GPU, and weights are fake.

    With `shows_gpu` the script sees the GPU; else it goes the way it goes on a CPU.
    """
    with ExitStack() as stack:
        stack.enter_context(gpu.pretended(gpu.GPU))
        stack.enter_context(copyable())
        for owner, name, new in _stand_ins(fakes, shows_gpu):
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, new))
        hook = register_module_parameter_registration_hook(partial(_swap, fakes))
        stack.callback(hook.remove)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(Device(fakes))
        yield


def _swap(fakes: Fakes, _: Module, __: str, parameter: Any) -> Any:
    is_left = parameter is None or is_fake(parameter) or is_lazy(parameter)
    return None if is_left else fakes.parameter(parameter)


def adopt(root: Module, fakes: Fakes, optimizers: list[Any]) -> None:
    """Make fake a parameter that was set without `register_parameter`."""
    new: dict[int, Any] = {}
    for module in root.modules():
        for name, old in module._parameters.items():
            if old is not None and not is_fake(old) and not is_lazy(old):
                new[id(old)] = module._parameters[name] = fakes.parameter(old)
    for optimizer in optimizers if new else ():
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]


def _apply(module: Module, make: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
    """`Module._apply`: tensors are replaced where their format changes, and never moved."""
    _applying.append(True)
    try:
        for inner in module.modules() if recurse else (module,):
            for name, old in inner._parameters.items():
                if old is not None and not is_lazy(old):
                    with torch.no_grad():
                        made = make(old)
                    if made is not old and made.dtype != old.dtype:
                        inner._parameters[name] = Parameter(made, requires_grad=old.requires_grad)
            for name, old in inner._buffers.items():
                if old is not None:
                    inner._buffers[name] = make(old)
    finally:
        _applying.pop()
    return module


def _plain_loader(plain: Callable[..., None]) -> Callable[..., None]:
    """Loaders whose memory is not pinned: there is no GPU to pin it for."""

    def init(loader: Any, *args: Any, **kwargs: Any) -> None:
        plain(loader, *args, **{**kwargs, "pin_memory": False})

    return init


class OneRank(Module):  # type: ignore[misc]
    """Stand-in for a wrapper that would distribute a model: the model itself."""

    def __init__(self, module: Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> Any:
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Any:
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def register_comm_hook(self, *args: Any) -> None:
        """Nothing is communicated."""


def _init_group(plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Process groups of one rank without communication: fake tensors cannot be sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plain(backend="fake", rank=0, world_size=1, store=FakeStore())


def _sharded(module: Any, *args: Any, **kwargs: Any) -> Any:
    """`fully_shard` over one rank: nothing is sharded."""
    for name in ("set_requires_gradient_sync", "set_is_last_backward", "reshard", "unshard"):
        for one in module if isinstance(module, (list, tuple)) else (module,):
            setattr(one, name, gpu.always(None))
    return module


def _run_first(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **options: Any) -> None:
    """Ranks that a script starts: the first is run, here."""
    fn(0, *args)


def _stand_ins(fakes: Fakes, shows_gpu: bool) -> list[tuple[Any, str, Any]]:
    """Replacements of torch's functions while the GPU is fake."""
    from torch import distributed
    from torch.distributed import fsdp
    from torch.nn import parallel
    from torch.utils.data import DataLoader

    cuda = torch.cuda
    spawning = sys.modules["torch.multiprocessing.spawn"]
    found: list[tuple[Any, str, Any]] = [
        (Module, "_apply", _apply),
        (DataLoader, "__init__", _plain_loader(DataLoader.__init__)),
        (distributed, "init_process_group", partial(_init_group, distributed.init_process_group)),
        (parallel, "DistributedDataParallel", OneRank),
        (parallel.distributed, "DistributedDataParallel", OneRank),
        (fsdp, "FullyShardedDataParallel", OneRank),
        (fsdp, "fully_shard", _sharded),
        (spawning, "start_processes", _run_first),
        (cuda, "is_available", gpu.always(shows_gpu)),
        (cuda, "device_count", gpu.always(int(shows_gpu))),
        (cuda, "is_initialized", gpu.always(False)),
        (cuda, "get_device_name", gpu.always("pretended GPU")),
        (cuda, "get_rng_state", gpu.always(torch.zeros(16, dtype=torch.uint8))),
        (cuda, "get_rng_state_all", gpu.always([])),
        (cuda, "mem_get_info", gpu.always((80 << 30, 80 << 30))),
        (cuda, "memory_stats", gpu.always({})),
    ]
    silent = "set_device manual_seed manual_seed_all set_rng_state set_rng_state_all"
    silent += " reset_peak_memory_stats ipc_collect current_stream"
    found += [(cuda, name, gpu.always(None)) for name in silent.split()]
    counts = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return found + [(cuda, name, gpu.always(0)) for name in counts]
