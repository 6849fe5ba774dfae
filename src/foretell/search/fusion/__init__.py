"""Which ops to fuse and which gradients to send together, decided jointly."""
