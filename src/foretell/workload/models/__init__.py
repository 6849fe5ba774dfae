"""Families of models, those that `foretell.workload.load` knows by name."""
