"""Ranks started one by one as processes, behind the guard of a main module."""

import os
import sys

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, size: int, port: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", port
    distributed.init_process_group("gloo", rank=rank, world_size=size)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(40):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    size, port = int(sys.argv[1]), sys.argv[2]
    started = [context.Process(target=train, args=(rank, size, port)) for rank in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join()
