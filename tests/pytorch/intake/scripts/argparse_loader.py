"""Required arguments, a device chosen by what there is, a loader with workers, a checkpoint."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--output", default="checkpoint.pt")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    loader = DataLoader(data, 8, shuffle=True, num_workers=2, pin_memory=device == "cuda")
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    adam = torch.optim.AdamW(net.parameters(), lr=args.lr)
    with open("log.txt", "a") as log:
        for epoch in range(2):
            for x, y in loader:
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                adam.zero_grad(set_to_none=True)
                loss = nn.functional.cross_entropy(net(x), y)
                loss.backward()
                adam.step()
                log.write(f"{loss.item()}\n")
            torch.save(net.state_dict(), args.output)


if __name__ == "__main__":
    main()
