"""DistributedDataParallel as torchrun starts it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = int(os.environ["LOCAL_RANK"])
torch.manual_seed(rank)
net = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(50):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(torch.randn(8, 16)), torch.randint(0, 4, (8,)))
    loss.backward()
    optimizer.step()
total = loss.detach().clone()
dist.all_reduce(total)
if rank == 0:
    print(total.item() / dist.get_world_size())
dist.destroy_process_group()
