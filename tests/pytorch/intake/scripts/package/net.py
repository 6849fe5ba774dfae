import torch


class Net(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))
