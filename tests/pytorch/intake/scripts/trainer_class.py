"""A class of one's own around the loop, evaluation in between, exceptions caught."""

import torch
from torch import nn


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        self.best = float("inf")

    def step(self, x, y):
        self.model.train()
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        if torch.isnan(loss):
            raise ValueError("the loss is not a number")
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        return self.model(torch.randn(4, 3, 16, 16)).mean().item()

    def fit(self, steps):
        for number in range(steps):
            try:
                self.step(torch.randn(4, 3, 16, 16), torch.randn(4, 8))
            except Exception as error:
                print("skipped", error)
            if number % 20 == 19 and self.evaluate() < self.best:
                torch.save(self.model.state_dict(), "best.pt")


if __name__ == "__main__":
    Trainer(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 8),
        )
    ).fit(60)
