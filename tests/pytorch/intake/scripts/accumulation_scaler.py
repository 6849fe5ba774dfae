"""Gradient accumulation, mixed precision, a scaler, clipping and a schedule."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).to(device)
adam = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
plan = torch.optim.lr_scheduler.OneCycleLR(adam, 1e-2, total_steps=200)
dtype = torch.float16 if device == "cuda" else torch.bfloat16
for step in range(50):
    for part in range(4):
        x, y = torch.randn(4, 32, device=device), torch.randint(0, 8, (4,), device=device)
        with torch.autocast(device, dtype=dtype):
            loss = nn.functional.cross_entropy(net(x), y) / 4
        scaler.scale(loss).backward()
    scaler.unscale_(adam)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(adam)
    scaler.update()
    adam.zero_grad()
    plan.step()
