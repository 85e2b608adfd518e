"""The SHA-256 of a model's parameters, which saved caches are recognised by."""

import hashlib
import weakref

import jax
import numpy as np

from kvjax.parallel import distributed
from kvjax.typing import PyTree

_known = dict[int, bytes]()  # by the id of an array that exists


def model_digest(params: PyTree) -> str:
    """Returns the SHA-256 of parameters: of the path, dtype, shape and digest of each, in the order of paths.

    One array at a time is copied to the host, and once: the digests of JAX arrays, which do not change, are kept as
    long as the arrays are.
    """
    digest = hashlib.sha256()
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    for path, leaf in sorted(named.items()):
        digest.update(f"{path} {leaf.dtype} {leaf.shape}".encode())
        digest.update(_array_digest(leaf))
    return digest.hexdigest()


def _array_digest(leaf: jax.Array | np.ndarray) -> bytes:
    if not isinstance(leaf, jax.Array):
        return _hashed(leaf)
    found = _known.get(id(leaf))
    if found is None:
        found = _known[id(leaf)] = _hashed(leaf)
        # None, since two threads may have made a digest of the same array.
        weakref.finalize(leaf, _known.pop, id(leaf), None).atexit = False
    return found


def _hashed(leaf: jax.Array | np.ndarray) -> bytes:
    """Returns the SHA-256 of the numbers of an array."""
    return hashlib.sha256(np.ascontiguousarray(distributed.to_host(leaf)).tobytes()).digest()
