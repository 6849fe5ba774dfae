"""Commands that only the lab has: `foretell lab`, `validate`, `train-policy`."""
