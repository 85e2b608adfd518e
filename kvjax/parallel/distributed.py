"""Several processes that run one program together, usually one a host, through `jax.distributed`.

Every process is given the same command. An array on a mesh of all devices belongs to all of them: each holds the
shards of its own devices, and every process takes part in every computation. Files are written by the first process
alone. Without `initialize`, or with one process, the functions here do what NumPy and `jax.device_put` do.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import ArrayLike

from kvjax.errors import ConfigError, KvjaxError

T = TypeVar("T")
PyTree = Any  # a tree of arrays


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the other processes. Call it once in each, before anything else uses JAX.

    What is not given is taken from the environment, as `jax.distributed.initialize` finds it: of a Cloud TPU slice,
    SLURM, Open MPI, or Kubernetes (with the package ``kubernetes``). Processes of CPUs communicate through Gloo.

    Args:
      coordinator_address: host and port of the first process, such as ``"10.0.0.1:1234"``.
      num_processes: the number of processes.
      process_id: the number of this one, from 0.

    Raises:
      ConfigError: if the environment does not say what is not given, the numbers contradict each other, or the other
        processes cannot be reached.
    """
    if coordinator_address is not None and not coordinator_address.rpartition(":")[2].isdigit():
        raise ConfigError(f"coordinator_address={coordinator_address!r} is not of the form HOST:PORT.")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"the processes cannot be joined: {str(error).strip()} Give coordinator_address=HOST:PORT of the first "
            "process, num_processes, and a process_id from 0 to num_processes - 1, or start them by SLURM, on a Cloud "
            "TPU, by Open MPI or on Kubernetes."
        ) from None


def count() -> int:
    """Returns the number of processes."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def number() -> int:
    """Returns the number of this process, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Returns whether this is the process that writes files and reports."""
    return number() == 0


def check_mesh(mesh: Mesh | None) -> None:
    """Checks that every process has a part in what runs on a mesh.

    Raises:
      ConfigError: if there are several processes, and no mesh or one without devices of some process.
    """
    if count() == 1:
        return
    advice = f"give a mesh of all {jax.device_count()} devices, such as 'data:{jax.device_count()}'"
    if mesh is None:
        raise ConfigError(f"{count()} processes share a model on a mesh; {advice}.")
    absent = count() - len({device.process_index for device in mesh.devices.flat})
    if absent:
        raise ConfigError(f"mesh {dict(mesh.shape)} has no device of {absent} of the {count()} processes; {advice}.")


def shares(tree: PyTree) -> bool:
    """Returns whether some array of a tree is spread over several processes."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(tree))


def check_alone(tree: PyTree, what: str) -> None:
    """Checks that one process has all of the arrays that something for one process is given.

    Args:
      tree: of arrays, such as the parameters of a model.
      what: the thing, for the message, such as ``calibrate``.

    Raises:
      ConfigError: if some array is spread over several processes.
    """
    if shares(tree):
        raise ConfigError(
            f"{what} needs a model in one process, and this one is divided over {count()} processes; run it in one "
            "process, without the flags that join others."
        )


def check_single(what: str) -> None:
    """Checks that no other processes were joined.

    Args:
      what: is a program of one process, for the message.

    Raises:
      ConfigError: if there are several processes.
    """
    if count() > 1:
        raise ConfigError(f"{what} runs in one process, but {count()} were joined; omit the flags that join them.")


def put(x: ArrayLike, place: Sharding | None) -> jax.Array:
    """Moves an array to devices, of which some may belong to other processes.

    Args:
      x: on the host: the same in every process, which moves what its own devices hold; nothing is exchanged. Or an
        array that is on the devices of `place` already.
      place: where it goes; None for the default device.
    """
    if place is None or place.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, place)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, place, lambda index: host[index], dtype=host.dtype)


def to_host(tree: PyTree) -> PyTree:
    """Copies arrays to the host, whole, in every process; each process must call it with the same arrays.

    Args:
      tree: of JAX or NumPy arrays.

    Returns:
      The tree with NumPy arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    far = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not _is_here(leaf)]
    if far:
        places = tuple(NamedSharding(leaves[i].sharding.mesh, PartitionSpec()) for i in far)
        gathered = jax.jit(_unchanged, out_shardings=places)(tuple(leaves[i] for i in far))
        for i, leaf in zip(far, gathered, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])


def _unchanged(x: T) -> T:
    return x


def _is_here(x: jax.Array) -> bool:
    """Whether this process has all of an array."""
    return x.is_fully_addressable or x.is_fully_replicated


def from_first(value: ArrayLike) -> np.ndarray:
    """Returns the first process's value, which has the same shape and dtype in all."""
    return from_all(value)[0]


def from_all(value: ArrayLike) -> np.ndarray:
    """Returns the values of all processes, of one shape and dtype, stacked: [processes, ...]."""
    host = np.asarray(value)
    if count() == 1:
        return host[None]
    # As bytes, because JAX would make 32 bits of 64.
    data = np.asarray(multihost_utils.process_allgather(np.frombuffer(host.tobytes(), np.uint8)))
    return np.frombuffer(data.tobytes(), host.dtype).reshape(len(data), *host.shape)


@contextlib.contextmanager
def first_before_others() -> Iterator[None]:
    """A context that the first process leaves before the others enter it."""
    if not is_first():
        from_all(True)
    yield
    if is_first():
        from_all(True)


@contextlib.contextmanager
def collective(what: str) -> Iterator[None]:
    """A context that ends with an error in every process if it does in one of them, so that none waits for another.

    Args:
      what: is done in the context, for the message of the others.

    Raises:
      KvjaxError: if there was an error in another process and none in this one.
    """
    try:
        yield
    except Exception:
        from_all(True)
        raise
    failed = np.flatnonzero(from_all(False))
    if failed.size:
        raise KvjaxError(f"{what} failed in process {failed[0]} of {count()}, whose message says why.")


def leave(status: int) -> NoReturn:
    """Ends this process at once, without waiting for the others, which JAX ends when this one gives no more signs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
