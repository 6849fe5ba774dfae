"""Emulated networks on one machine: a matrix of runs behind shaped links, beside predictions."""
