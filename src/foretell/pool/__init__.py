"""Many pieces of independent work: here, in processes of this machine, or on a Ray cluster."""

from foretell.pool.pool import Alone, Pool, opened

__all__ = ["Alone", "Pool", "opened"]
