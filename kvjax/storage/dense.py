"""Holds keys and values as the model computes them."""

from kvjax.storage.base import Exact, Storage, factory


@factory
def dense() -> Storage:
    """Holds keys and values in the model's dtype."""
    return Storage(key=Exact(), value=Exact(), name="dense")
