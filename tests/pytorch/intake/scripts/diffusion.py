"""Denoising diffusion: a small U-Net, noise by timestep, an averaged copy, samples now and then."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 50


class Res(nn.Module):
    def __init__(self, inner, out, wide):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inner), nn.GroupNorm(8, out)
        self.conv1, self.conv2 = (
            nn.Conv2d(inner, out, 3, padding=1),
            nn.Conv2d(out, out, 3, padding=1),
        )
        self.time = nn.Linear(wide, out)
        self.skip = nn.Conv2d(inner, out, 1) if inner != out else nn.Identity()

    def forward(self, x, t):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Unet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.wide = 4 * c
        self.first, self.last = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 1, 3, padding=1)
        self.time = nn.Sequential(
            nn.Linear(c, self.wide), nn.SiLU(), nn.Linear(self.wide, self.wide)
        )
        self.down1, self.down2 = Res(c, c, self.wide), Res(c, 2 * c, self.wide)
        self.attend = nn.MultiheadAttention(2 * c, 4, batch_first=True)
        self.up1, self.up2 = Res(4 * c, c, self.wide), Res(2 * c, c, self.wide)
        self.c = c

    def forward(self, x, t):
        half = self.c // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        angles = t[:, None].float() * rates
        t = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        a = self.down1(self.first(x), t)
        b = self.down2(F.avg_pool2d(a, 2), t)
        tokens = b.flatten(2).transpose(1, 2)
        tokens = tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0]
        c = self.up1(torch.cat([tokens.transpose(1, 2).reshape(b.shape), b], 1), t)
        return self.last(self.up2(torch.cat([F.interpolate(c, scale_factor=2.0), a], 1), t))


@torch.no_grad()
def sample(net, alphas, shape):
    x = torch.randn(shape)
    for k in reversed(range(STEPS)):
        noise = net(x, torch.full((shape[0],), k))
        x = x - (1 - alphas[k]) * noise
    return x


net = Unet()
average = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-4)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), 0)
for step in range(40):
    x, noise = torch.randn(4, 1, 16, 16), torch.randn(4, 1, 16, 16)
    t = torch.randint(0, STEPS, (4,))
    a = alphas[t][:, None, None, None]
    loss = F.mse_loss(net(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(average.parameters(), net.parameters(), strict=True):
            old.lerp_(new, 0.01)
    if step % 20 == 19:
        torch.save(sample(average, alphas, (2, 1, 16, 16)), "sample.pt")
