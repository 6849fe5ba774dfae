"""What an unedited script sees under a plan: a job of one rank, whose files are the first rank's.

The plan decides what is split over ranks, so what the script says of it itself is left out: DDP and
FSDP wrap nothing, collectives are those of one rank. Torch and foretell see the real job: answers
go by who asks.

Writes of other ranks than the first go to a place of their own, from where they read them again;
what `torch.save` is given is put together from all ranks first, so that a checkpoint is that of one
process.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from foretell.pytorch.deploy.optimizer import clip_norm
from foretell.pytorch.intake.fake import OneRank
from foretell.pytorch.intake.files import own_places

Module = Any
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DATA = os.path.join(_TORCH, "utils", "data") + os.sep  # samplers ask for the script
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_WRITES = set("wax+")


class AsOne(OneRank):
    """In place of a wrapper that would spread a model over ranks: the model as it is."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Any:
        """As FSDP 1 has it."""
        return clip_norm(self.parameters(), max_norm, norm_type)


class _Done:
    """A collective of one rank: over when it begins."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Mesh:
    """A device mesh of one rank."""

    def __init__(self, *args: Any, mesh_dim_names: Any = None, **kwargs: Any) -> None:
        self.mesh_dim_names, self.ndim, self.shape = mesh_dim_names, 1, (1,)

    def __getitem__(self, _: Any) -> _Mesh:
        return self

    def size(self, *_: Any) -> int:
        return 1

    def get_group(self, *_: Any) -> None:
        return None

    def get_rank(self) -> int:
        return 0

    def get_local_rank(self, *_: Any) -> int:
        return 0


@contextmanager
def one_rank() -> Iterator[None]:
    """Let whatever is not torch's or ours take part in a job of one rank."""
    begun = [False]

    def init(*_: Any, **__: Any) -> None:
        begun[0] = True

    def destroy(*_: Any, **__: Any) -> None:
        begun[0] = False

    answers: dict[str, Callable[..., Any]] = {
        "get_rank": lambda *_, **__: 0,
        "get_world_size": lambda *_, **__: 1,
        "get_node_local_rank": lambda *_, **__: 0,
        "is_initialized": lambda: begun[0],
        "init_process_group": init,
        "destroy_process_group": destroy,
        "new_group": lambda *_, **__: None,
        "get_process_group_ranks": lambda *_, **__: [0],
        **dict.fromkeys(("barrier", "monitored_barrier"), _nothing),
        **dict.fromkeys(("all_reduce", "broadcast", "reduce"), _nothing),
        **dict.fromkeys(("broadcast_object_list", "send", "recv"), _nothing),
        **dict.fromkeys(("all_gather", "all_gather_object", "gather"), _to_first),
        **dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor"), _copied),
        "gather_object": lambda one, every=None, *_, **__: _to_first(every or [], one),
        "init_device_mesh": _Mesh,
    }
    parallel, fsdp = import_module("torch.nn.parallel"), import_module("torch.distributed.fsdp")
    splits = import_module("torch.distributed.tensor.parallel")
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(_answered(dist, name, answer))
        mesh = import_module("torch.distributed.device_mesh")
        stack.enter_context(_answered(mesh, "init_device_mesh", _Mesh))
        stack.enter_context(_answered(fsdp, "fully_shard", lambda module, *_, **__: module))
        stack.enter_context(_answered(splits, "parallelize_module", lambda m, *_, **__: m))
        for owner in (parallel, import_module("torch.nn.parallel.distributed")):
            stack.enter_context(patch.object(owner, "DistributedDataParallel", AsOne))
        stack.enter_context(patch.object(fsdp, "FullyShardedDataParallel", AsOne))
        stack.enter_context(patch.object(parallel, "DataParallel", AsOne))
        yield


def _answered(owner: Any, name: str, answer: Callable[..., Any]) -> Any:
    """A function of torch's that answers the script's questions differently from torch's own."""
    plain = getattr(owner, name)

    def by_caller(*args: Any, **kwargs: Any) -> Any:
        asks = sys._getframe(1).f_code.co_filename
        is_theirs = asks.startswith(_DATA) or not asks.startswith((_TORCH, _OURS))
        return (answer if is_theirs else plain)(*args, **kwargs)

    return patch.object(owner, name, by_caller)


def _nothing(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
    return _Done() if async_op else None


def _to_first(every: list[Any], one: Any, *args: Any, **kwargs: Any) -> _Done | None:
    if every:
        every[0] = one.clone() if isinstance(one, torch.Tensor) else one
    return _nothing(**kwargs)


def _copied(output: Any, one: Any, *args: Any, **kwargs: Any) -> _Done | None:
    output.copy_(one)
    return _nothing(**kwargs)


@contextmanager
def one_writer(rank: int, scratch: Path) -> Iterator[None]:
    """Let only the first rank write where the script says."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "save", _whole_save(torch.save, rank)))
        if rank:
            for owner, name, new in _Elsewhere(scratch).changes():
                stack.enter_context(patch.object(owner, name, new))
        yield


def whole(x: Any) -> Any:
    """A tensor as one process has it; all ranks ask together."""
    if isinstance(x, torch.Tensor) and hasattr(x, "full_tensor"):
        found = x.detach().full_tensor()
        return torch.nn.Parameter(found) if isinstance(x, torch.nn.Parameter) else found
    return x


def _whole_save(plain: Callable[..., Any], rank: int) -> Callable[..., Any]:
    def save(what: Any, *args: Any, **kwargs: Any) -> Any:
        what = pytree.tree_map(whole, what)
        return plain(what, *args, **kwargs) if rank == 0 else None

    return save


class _Elsewhere:
    """Files of a rank other than the first: what it writes is where only it looks."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.moved = scratch, dict[str, str]()
        self.free = [os.path.realpath(p) for p in own_places()]
        self.here = os.getcwd() + os.sep  # the user's, even where it is a temporary folder

    def changes(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """What is put in place of functions that open, make and remove files."""
        plain = builtins.open
        for owner in (builtins, io):
            yield (
                owner,
                "open",
                lambda file, mode="r", *a, **k: plain(
                    self._path(file, bool(_WRITES & set(mode))), mode, *a, **k
                ),
            )
        for name in ("mkdir", "makedirs"):
            yield os, name, self._made(getattr(os, name))
        for name in ("remove", "unlink", "rmdir"):
            yield os, name, self._only_mine(getattr(os, name))
        for name in ("rename", "replace"):
            yield os, name, self._renamed(getattr(os, name))

    def _path(self, file: Any, writes: bool) -> Any:
        """Where a file of this rank is."""
        if not isinstance(file, str | os.PathLike):
            return file
        full = os.path.realpath(os.fspath(file))
        if full in self.moved:
            return self.moved[full]
        is_free = any(full.startswith(place + os.sep) for place in self.free)
        if not writes or (is_free and not full.startswith(self.here)):
            return file
        self.moved[full] = str(self.scratch / f"{len(self.moved)}")
        return self.moved[full]

    def _made(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> None:
            try:
                plain(*args, **kwargs)
            except FileExistsError:  # the first rank was faster
                return

        return make

    def _only_mine(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            found = self._path(path, True)
            if os.path.lexists(found):
                plain(found, *args, **kwargs)

        return remove

    def _renamed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def rename(old: Any, new: Any, *args: Any, **kwargs: Any) -> None:
            here, there = self._path(old, True), self._path(new, True)
            if os.path.lexists(here):
                plain(here, there, *args, **kwargs)

        return rename
