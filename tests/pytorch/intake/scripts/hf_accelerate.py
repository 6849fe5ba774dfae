"""Accelerate around a loop, with accumulation."""

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(gradient_accumulation_steps=2)
data = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters())
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(net):
        loss = nn.functional.cross_entropy(net(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
