"""The network that guides the placement search, on PyTorch Geometric, and its training."""
