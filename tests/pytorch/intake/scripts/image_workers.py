"""Image classification: loader workers, channels last, autocast, mixup, one-cycle, metrics."""

import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, k):
        image = torch.randn(3, 32, 32)
        if random.random() < 0.5:
            image = image.flip(-1)
        return image, k % 10


def mixed(rows):
    x, y = torch.stack([r[0] for r in rows]), torch.tensor([r[1] for r in rows])
    share = random.betavariate(1, 1)
    y = F.one_hot(y, 10).float()
    return x * share + x.roll(1, 0) * (1 - share), y * share + y.roll(1, 0) * (1 - share)


class Basic(nn.Module):
    def __init__(self, inner, out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.skip = nn.Identity() if inner == out else nn.Conv2d(inner, out, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x), inplace=True)


class Meter:
    def __init__(self):
        self.last = deque(maxlen=20)

    def update(self, value):
        self.last.append(value)

    @property
    def median(self):
        return torch.tensor(list(self.last)).median().item()


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), Basic(16, 16, 1), Basic(16, 32, 2), Basic(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).to(device, memory_format=torch.channels_last)  # fmt: skip
    loader = DataLoader(
        Pictures(), 8, shuffle=True, num_workers=2, collate_fn=mixed, persistent_workers=True,
        drop_last=True, pin_memory=True,
    )  # fmt: skip
    decay = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 1e-4}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12 * 4)
    losses, right = Meter(), Meter()
    for epoch in range(4):
        net.train()
        for image, target in loader:
            image = image.to(device, memory_format=torch.channels_last, non_blocking=True)
            target = target.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                output = net(image)
                loss = F.cross_entropy(output, target, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            top = output.topk(5, 1).indices
            hits = top.eq(target.argmax(1, keepdim=True)).any(1).float().mean()
            losses.update(loss.item())
            right.update(hits.item())
        net.eval()
        with torch.inference_mode():
            for image, _ in loader:
                net(image.to(device))
        print(epoch, losses.median, right.median)


if __name__ == "__main__":
    main()
