"""What a deployed model holds: whole tensors under the names of the whole model, and checkpoints of
them that load under any plan (torch.distributed.checkpoint with an index in JSON).

    step-100/            tensors by name, each rank its own part           (torch's own files)
             index.json  which part of which tensor is where; the plan, the step, the schedule

Tensors are those of the whole model, whatever the plan that saved them: `model/NAME`,
`buffer/NAME`, `optimizer/NAME/KEY`, `ema/NAME`. A checkpoint is there when its index is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from foretell.errors import InputError
from foretell.pytorch.deploy.collective import gathered, split_of
from foretell.pytorch.deploy.optimizer import owns

Tensor = Any
INDEX = "index.json"
_STEP = re.compile(r"step-(\d+)")
_FORMAT = 1


def save(made: Any, folder: Path, step: int, **notes: Any) -> Path:
    """Write everything that training goes on from; called on every rank."""
    path = folder / f"step-{step}"
    notes = {"format": _FORMAT, "step": step, "plan": str(made.whole or made.plan)} | notes
    try:
        path.mkdir(parents=True, exist_ok=True)
        dcp.save(dict(_saved(made)), storage_writer=_Writer(path, notes))
    except CheckpointException as error:  # the same on all ranks
        raise _unwritten(path, next(why for why, _ in error.failures.values())) from None
    except OSError as error:
        raise _unwritten(path, error) from None
    dist.barrier()
    return path


def _unwritten(path: Path, why: BaseException) -> InputError:
    before = latest(path.parent)
    hint = f"; {before.name} is whole, and --resume goes on from it" if before else ""
    return InputError(
        f"the checkpoint `{path}` cannot be written: {str(why).splitlines()[0]}",
        hint=f"make room, or name another folder with --checkpoint{hint}",
    )


def load(made: Any, path: Path) -> dict[str, Any]:
    """Take up a checkpoint under whatever plan the model has; its notes. Called on every rank."""
    reader = _Reader(path)
    metadata = reader.read_metadata()
    known = metadata.state_dict_metadata
    wanted = {key: target for key, target, _ in _targets(made, known)}
    missing = sorted(key for key in wanted if key not in known)
    if missing:
        raise InputError(
            f"`{path}` has no `{missing[0]}`"
            + (f", nor {len(missing) - 1} more" if len(missing) > 1 else ""),
            hint="a checkpoint is of one model: make the same one",
        )
    for key, target, _ in _targets(made, known):
        there, here = list(known[key].size), list(target.shape)
        if there != here:
            raise InputError(
                f"`{key}` is {there} in `{path}` and {here} in this model",
                hint="a checkpoint is of one model: make the same one",
            )
    rows = list(_targets(made, known))
    dcp.load({key: target for key, target, _ in rows}, storage_reader=reader)
    with torch.no_grad():
        for _, target, keep in rows:
            if keep is not None:
                keep(target)
    return reader.notes


def latest(folder: Path) -> Path | None:
    """The checkpoint of the last step that is whole."""
    found = {}
    for path in folder.glob("step-*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / INDEX).is_file():
            found[int(match[1])] = path
    return found[max(found)] if found else None


def _saved(made: Any) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds, as whole tensors or as torch's own shards of them."""
    for name, parameter in made.here.items():
        yield f"model/{name}", _whole(parameter, parameter.detach())
        for key, value in made.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                like = value.shape == parameter.shape
                tensor = _whole(parameter, value) if like else value
                yield f"optimizer/{name}/{key}", tensor
        if made.ema is not None:
            yield f"ema/{name}", _whole(parameter, made.ema.kept[name])
    for name, buffer in buffers(made).items():
        yield f"buffer/{name}", buffer.detach()


def _whole(parameter: Tensor, value: Tensor) -> Tensor:
    split = split_of(parameter)
    return value if split is None else gathered(value, *split)


def _targets(made: Any, known: dict[str, Any]) -> Iterator[tuple[str, Tensor, Any]]:
    """What to load: its name, a tensor to load it into, and what to do with that afterwards."""
    for name, parameter in made.here.items():
        yield _into(f"model/{name}", parameter, parameter.detach())
        first = f"optimizer/{name}/"
        for key in [k for k in known if k.startswith(first)] if owns(made, parameter) else []:
            yield _state(made, parameter, key, key.removeprefix(first), known[key])
        if made.ema is not None and f"ema/{name}" in known:
            yield _into(f"ema/{name}", parameter, made.ema.kept[name])
    for name, buffer in buffers(made).items():
        yield f"buffer/{name}", buffer.detach(), None


def _into(key: str, parameter: Tensor, target: Tensor) -> tuple[str, Tensor, Any]:
    split = split_of(parameter)
    if split is None:
        return key, target, None
    dim, sizes, group = split
    shape = list(target.shape)
    shape[dim] = sum(sizes)
    rank = dist.get_rank(group)
    return key, target.new_empty(shape), lambda w: target.copy_(w.split(sizes, dim)[rank])


def _state(made: Any, parameter: Tensor, key: str, word: str, meta: Any) -> tuple[str, Tensor, Any]:
    """A tensor of the optimizer, which may have none yet."""
    held = made.optimizer.state[parameter]
    dtype = meta.properties.dtype
    if word not in held:
        is_whole = tuple(meta.size) != () and len(meta.size) == parameter.dim()
        held[word] = (
            torch.zeros_like(parameter, dtype=dtype)
            if is_whole
            else torch.zeros(tuple(meta.size), dtype=dtype)
        )
    target = held[word]
    if target.shape == parameter.shape and parameter.dim():
        return _into(key, parameter, target)
    return key, target, None


class _Writer(dcp.FileSystemWriter):  # type: ignore[misc]
    """torch's files, and an index that is plain text."""

    def __init__(self, path: Path, notes: dict[str, Any]) -> None:
        super().__init__(path)
        self.notes = notes

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        where = [(r.index, r.storage_data) for rows in results for r in rows]
        tensors = {
            key: {
                "shape": list(meta.size),
                "dtype": str(meta.properties.dtype).removeprefix("torch."),
                "parts": [[list(c.offsets), list(c.sizes)] for c in meta.chunks],
            }
            for key, meta in metadata.state_dict_metadata.items()
        }
        parts = [
            {
                "tensor": i.fqn,
                "at": None if i.offset is None else list(i.offset),
                "index": i.index,
                "file": s.relative_path,
                "offset": s.offset,
                "length": s.length,
            }
            for i, s in where
        ]
        text = json.dumps(self.notes | {"tensors": tensors, "parts": parts})
        beside = Path(self.path) / f"{INDEX}.{os.getpid()}"
        beside.write_text(text)
        beside.replace(Path(self.path) / INDEX)


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    """Reads that index; tensors are loaded as weights alone, never as code."""

    notes: dict[str, Any]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / INDEX
        try:
            found = json.loads(path.read_text())
            tensors = {key: _tensor(row) for key, row in found.pop("tensors").items()}
            parts = dict(_part(Path(self.path), row) for row in found.pop("parts"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"`{path.parent}` is no checkpoint, or a part of one: {error}",
                hint="name the folder of a step that `foretell run --checkpoint` has written",
            ) from None
        self.notes = found
        meta = StorageMeta()
        meta.load_id = self.load_id
        return Metadata(tensors, storage_data=parts, storage_meta=meta)


def _tensor(row: dict[str, Any]) -> TensorStorageMetadata:
    dtype = getattr(torch, row["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{row['dtype']} is no dtype")
    chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in row["parts"]]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(row["shape"]), chunks)


def _part(folder: Path, row: dict[str, Any]) -> tuple[MetadataIndex, _StorageInfo]:
    name = row["file"]
    if Path(name).name != name:
        raise ValueError(f"`{name}` is outside the folder")
    at = None if row["at"] is None else torch.Size(row["at"])
    info = _StorageInfo(name, int(row["offset"]), int(row["length"]))
    return MetadataIndex(row["tensor"], at, row["index"]), info


def whole(made: Any, of: Callable[[Tensor], Tensor | None]) -> Iterator[tuple[str, Tensor | None]]:
    """A tensor of each parameter here, parts put together; asked on all ranks at once.

    None where this rank has none: a gradient that another rank keeps, or that nothing made.
    """
    for name, parameter in made.here.items():
        yield name, whole_of(parameter, of(parameter))


def whole_of(parameter: Tensor, tensor: Tensor | None) -> Tensor | None:
    """A tensor of one parameter, its parts put together; asked on all ranks that have some."""
    split = split_of(parameter)
    if split is not None:
        held = torch.zeros_like(parameter) if tensor is None else tensor.detach()
        return gathered(held, *split)
    if tensor is None or not hasattr(parameter, "full_tensor"):
        return tensor
    return (tensor if hasattr(tensor, "full_tensor") else parameter.detach()).full_tensor()


def gradients(made: Any) -> Iterator[tuple[str, Tensor | None]]:
    """The gradients of the last step."""
    return whole(made, lambda p: p.grad)


def parameters(made: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters as they are now."""
    return whole(made, lambda p: p.detach())


def buffers(made: Any) -> dict[str, Tensor]:
    """The buffers of this rank by their names in the whole model."""
    return {name: buffer for module in made.modules for name, buffer in module.named_buffers()}


def still(model: nn.Module) -> list[str]:
    """Turn dropout off, wherever a module keeps its rate; which modules that were."""
    found = []
    for name, module in model.named_modules():
        rates = [k for k, v in vars(module).items() if "drop" in k and type(v) is float and v > 0]
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            rates.append("p")
        for key in rates:
            setattr(module, key, 0.0)
        found += [name] if rates else []
    return found
