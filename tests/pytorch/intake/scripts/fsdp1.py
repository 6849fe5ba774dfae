"""FullyShardedDataParallel with an auto-wrap policy, its own clipping, and a state dict."""

import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

dist.init_process_group("gloo")
torch.manual_seed(int(os.environ["RANK"]))
net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
policy = functools.partial(size_based_auto_wrap_policy, min_num_params=4000)
net = FSDP(net, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(50):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(torch.randn(8, 64)), torch.zeros(8, 64))
    loss.backward()
    net.clip_grad_norm_(1.0)
    optimizer.step()
torch.save(net.state_dict(), "last.pt")
dist.destroy_process_group()
