"""Ranks that the script starts itself."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def train(rank, world, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    net = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        net(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(sys.argv[1])
    mp.spawn(train, args=(world, sys.argv[2]), nprocs=world)
