"""The SHA-256 of a model's parameters, which saved caches are recognised by, and keys that need it seldom."""

import hashlib
import weakref

import jax
import numpy as np

from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.typing import PyTree

_known = dict[int, bytes]()  # by the id of an array that exists


def model_digest(params: Params) -> str:
    """Returns the SHA-256 of parameters: of the path, dtype, shape and digest of each, in the order of paths.

    One array at a time is copied to the host, and once: the digests of JAX arrays, which do not change, are kept as
    long as the arrays are.
    """
    digest = hashlib.sha256()
    # Layers in stacks are sliced one at a time.
    for name in sorted(params):
        leaves = jax.tree_util.tree_flatten_with_path({name: params[name]})[0]
        named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        for path, leaf in sorted(named.items()):
            digest.update(f"{path} {leaf.dtype} {leaf.shape}".encode())
            digest.update(_array_digest(leaf))
    return digest.hexdigest()


class ParameterKey:
    """A key of a model's parameters, equal to another one if all arrays have the same numbers.

    Arrays that are the same object are equal without a digest, so that none is computed as long as there is one model.
    The key does not keep the arrays: those that are gone are equal to none.
    """

    def __init__(self, params: PyTree) -> None:
        named = jax.tree_util.tree_flatten_with_path(params)[0]
        self._leaves = {jax.tree_util.keystr(path): weakref.ref(leaf) for path, leaf in named}
        self._hash = hash(frozenset((jax.tree_util.keystr(path), str(leaf.dtype), leaf.shape) for path, leaf in named))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParameterKey):
            return NotImplemented
        if self is other:
            return True
        if self._hash != other._hash or self._leaves.keys() != other._leaves.keys():
            return False
        pairs = [(leaf(), other._leaves[path]()) for path, leaf in self._leaves.items()]
        return all(_equal(one, two) for one, two in pairs)


def _equal(one: jax.Array | np.ndarray | None, two: jax.Array | np.ndarray | None) -> bool:
    """Returns whether two arrays have the same numbers; None is one that is gone."""
    if one is None or two is None:
        return False
    if one is two:
        return True
    return one.dtype == two.dtype and one.shape == two.shape and _array_digest(one) == _array_digest(two)


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
