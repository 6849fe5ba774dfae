"""A learned prior for the tree search: what it sees, the network in numpy, and self-play."""
