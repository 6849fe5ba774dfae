"""Measures for `foretell tune-ddp`: ready gradients, the wire, and how buckets do."""
