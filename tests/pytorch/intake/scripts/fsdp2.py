"""Layers sharded by fully_shard, as torchtitan does."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)))
for layer in net:
    fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(50):
    optimizer.zero_grad()
    net(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
