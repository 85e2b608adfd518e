"""Holds keys and values as the model computes them."""

from kvjax.errors import StorageError
from kvjax.parallel.host_memory import DEVICE
from kvjax.storage.base import Exact, Memory, Storage, factory


@factory
def dense(*, memory: Memory = DEVICE, residual: int = 0) -> Storage:
    """Holds keys and values in the model's dtype.

    Args:
      memory: ``device``, ``host``, or a pair of these for keys and for values.
      residual: the number of newest positions that are on the device whatever the memory.

    Raises:
      StorageError: an argument that is not valid.
    """
    made = Storage(key=Exact(), value=Exact(), residual=residual, memory=memory, name="dense")
    if made.residual and not made.on_host:
        raise StorageError(
            f"storage dense: residual={residual!r} is for memory='host'; on the device every position is exact."
        )
    return made
