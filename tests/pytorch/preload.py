"""What the process that ranks are forked from imports before it forks: all that tests use.

An optimizer, for one, imports torch's compiler when it is first made: two seconds of every rank.
"""

from importlib import import_module

import torch

MODULES = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "foretell.pytorch.deploy.apply",
    "foretell.pytorch.intake.captured",
    "foretell.search.schedule.schedule",
    "foretell.search.schedule.find",
)

torch.set_num_threads(1)
for name in MODULES:
    import_module(name)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
