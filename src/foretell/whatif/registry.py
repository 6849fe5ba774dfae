"""Every what-if by its name; a new one is one file, one line here and its place in `compose.ORDER`.

A what-if is imported when it is asked for: most steps are asked about one or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from foretell.spec import parse as parse_spec
from foretell.whatif.base import WhatIf

# name -> module in this room and class
KINDS: dict[str, tuple[str, str]] = {
    "accumulate": ("accumulate", "Accumulate"),
    "amp": ("amp", "Amp"),
    "async-copies": ("async_copies", "AsyncCopies"),
    "batch": ("batch", "Batch"),
    "blueconnect": ("blueconnect", "BlueConnect"),
    "bucket-size": ("bucket_size", "BucketSize"),
    "channels-last": ("channels_last", "ChannelsLast"),
    "checkpoint": ("checkpoint", "Checkpoint"),
    "compile": ("compile", "Compile"),
    "cuda-graph": ("cuda_graph", "CudaGraph"),
    "data-parallel": ("data_parallel", "DataParallel"),
    "device": ("device", "OtherDevice"),
    "dgc": ("dgc", "Dgc"),
    "faster": ("scale", "Faster"),
    "faster-host": ("faster_host", "FasterHost"),
    "flash-attention": ("flash_attention", "FlashAttention"),
    "foreach-optimizer": ("optimizer", "ForeachOptimizer"),
    "fsdp": ("fsdp", "Fsdp"),
    "fused-optimizer": ("optimizer", "FusedOptimizer"),
    "gist": ("gist", "Gist"),
    "insert": ("remove", "Insert"),
    "loader": ("loader", "Loader"),
    "local-sgd": ("local_sgd", "LocalSgd"),
    "metaflow": ("metaflow", "Metaflow"),
    "network": ("network", "Network"),
    "overlap": ("overlap", "Overlap"),
    "p3": ("p3", "P3"),
    "parameter-server": ("parameter_server", "ParameterServer"),
    "powersgd": ("powersgd", "PowerSgd"),
    "reconstructed-batchnorm": ("reconstructed_batchnorm", "ReconstructedBatchnorm"),
    "remove": ("remove", "Remove"),
    "remove-sync": ("remove_sync", "RemoveSync"),
    "scale": ("scale", "Scale"),
    "tf32": ("tf32", "Tf32"),
    "vdnn": ("vdnn", "Vdnn"),
}


class Registry(Mapping[str, type[WhatIf]]):
    """What-ifs by name."""

    def __getitem__(self, name: str) -> type[WhatIf]:
        module, kind = KINDS[name]
        found: type[WhatIf] = getattr(import_module(f"foretell.whatif.{module}"), kind)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


WHATIFS = Registry()


def parse(spec: str) -> WhatIf:
    """The what-if a spec stands for."""
    found = parse_spec(spec, WHATIFS, "what-if")
    assert isinstance(found, WhatIf)
    return found
