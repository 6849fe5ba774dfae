"""Gradients of gradients by torch.func over a batch of tasks; a spectral norm on the weights."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import spectral_norm

device = "cuda" if torch.cuda.is_available() else "cpu"
head = spectral_norm(nn.Linear(16, 1))  # its parametrization is called before it is in the model
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), head).to(device)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)


def error(weights, x, y):
    return (functional_call(model, weights, (x,)) - y).square().mean()


def adapted(weights, x, y):
    slopes = grad(error)(weights, x[:4], y[:4])
    return error({k: w - 0.01 * slopes[k] for k, w in weights.items()}, x[4:], y[4:])


model.eval()  # a spectral norm that learns changes its buffers, which vmap cannot
for _ in range(40):
    x = torch.rand(6, 8, 1, device=device)
    weights = dict(model.named_parameters())
    loss = vmap(adapted, in_dims=(None, 0, 0))(weights, x, x.sin()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
