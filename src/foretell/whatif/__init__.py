"""One optimisation a file: what a change would make of a step."""

from __future__ import annotations

from foretell.spec import parse as parse_spec
from foretell.whatif.accumulate import Accumulate
from foretell.whatif.amp import Amp
from foretell.whatif.async_copies import AsyncCopies
from foretell.whatif.base import DoesNotApply, Setting, WhatIf, applied
from foretell.whatif.batch import Batch
from foretell.whatif.blueconnect import BlueConnect
from foretell.whatif.bucket_size import BucketSize
from foretell.whatif.channels_last import ChannelsLast
from foretell.whatif.checkpoint import Checkpoint
from foretell.whatif.compile import Compile
from foretell.whatif.cuda_graph import CudaGraph
from foretell.whatif.data_parallel import DataParallel
from foretell.whatif.device import OtherDevice
from foretell.whatif.dgc import Dgc
from foretell.whatif.faster_host import FasterHost
from foretell.whatif.flash_attention import FlashAttention
from foretell.whatif.fsdp import Fsdp
from foretell.whatif.gist import Gist
from foretell.whatif.held import peak_bytes
from foretell.whatif.loader import Loader
from foretell.whatif.local_sgd import LocalSgd
from foretell.whatif.metaflow import Metaflow
from foretell.whatif.network import Network
from foretell.whatif.optimizer import ForeachOptimizer, FusedOptimizer
from foretell.whatif.overlap import Overlap
from foretell.whatif.p3 import P3
from foretell.whatif.parameter_server import ParameterServer
from foretell.whatif.powersgd import PowerSgd
from foretell.whatif.reconstructed_batchnorm import ReconstructedBatchnorm
from foretell.whatif.remove import Insert, Remove
from foretell.whatif.remove_sync import RemoveSync
from foretell.whatif.scale import Faster, Scale
from foretell.whatif.tf32 import Tf32
from foretell.whatif.vdnn import Vdnn

# Every what-if by its name; a new one is one file and one line here.
WHATIFS: dict[str, type[WhatIf]] = {
    change.name: change
    for change in (
        Accumulate,
        Amp,
        AsyncCopies,
        Batch,
        BlueConnect,
        BucketSize,
        ChannelsLast,
        Checkpoint,
        Compile,
        CudaGraph,
        DataParallel,
        Dgc,
        Faster,
        FasterHost,
        FlashAttention,
        ForeachOptimizer,
        Fsdp,
        FusedOptimizer,
        Gist,
        Insert,
        Loader,
        LocalSgd,
        Metaflow,
        Network,
        OtherDevice,
        Overlap,
        P3,
        ParameterServer,
        PowerSgd,
        ReconstructedBatchnorm,
        Remove,
        RemoveSync,
        Scale,
        Tf32,
        Vdnn,
    )
}


def parse(spec: str) -> WhatIf:
    """The what-if a spec stands for."""
    found = parse_spec(spec, WHATIFS, "what-if")
    assert isinstance(found, WhatIf)
    return found


__all__ = ["WHATIFS", "DoesNotApply", "Setting", "WhatIf", "applied", "parse", "peak_bytes"]
