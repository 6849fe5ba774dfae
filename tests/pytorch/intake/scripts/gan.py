"""Two networks, two optimizers; the critic steps three times as often."""

import torch
from torch import nn

critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-4)
of_maker = torch.optim.Adam(maker.parameters(), lr=1e-4)
for step in range(40):
    for _ in range(3):
        real, fake = torch.randn(8, 16), maker(torch.randn(8, 8)).detach()
        of_critic.zero_grad()
        loss = critic(fake).mean() - critic(real).mean()
        loss.backward()
        of_critic.step()
    of_maker.zero_grad()
    (-critic(maker(torch.randn(8, 8))).mean()).backward()
    of_maker.step()
