"""A package that is run with `python -m`."""
