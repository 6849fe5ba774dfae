"""A policy that acts in an environment of Python, then learns from its rewards."""

import random

import torch
from torch import nn
from torch.distributions import Categorical

random.seed(0)
torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
adam = torch.optim.Adam(policy.parameters(), lr=1e-2)


def act(state):
    choice = Categorical(logits=policy(torch.tensor(state)))
    action = choice.sample()
    return action.item(), choice.log_prob(action)


for episode in range(50):
    state, logs, rewards = [0.0] * 4, [], []
    for _ in range(5):
        action, log = act(state)
        state = [s + random.random() - 0.5 + 0.1 * action for s in state]
        logs.append(log)
        rewards.append(1.0 if state[0] > 0 else 0.0)
    returns = torch.tensor([sum(rewards[k:]) for k in range(len(rewards))])
    loss = -(torch.stack(logs) * (returns - returns.mean())).sum()
    adam.zero_grad()
    loss.backward()
    adam.step()
