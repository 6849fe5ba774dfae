"""A training script run, timed and traced, so that what-ifs start from the real step."""

from foretell.pytorch.profile.run import Found, profile

__all__ = ["Found", "profile"]
