"""How long tasks take on a cluster, where that is known from, and how surely."""

from foretell.cost.price import Model, Work, default_models, price, prices, work_of

__all__ = ["Model", "Work", "default_models", "price", "prices", "work_of"]
