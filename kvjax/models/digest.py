"""The SHA-256 of a model's parameters, which saved caches are recognised by, and keys that need it seldom."""

import hashlib
import weakref

import jax
import numpy as np

from kvjax.models.stacked_params import LAYER, StackedParams
from kvjax.numerics.slices import slice_of
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.typing import PyTree

#: By the id of an array that exists, the digests of its slices along the first axis, and under None its own.
_known = dict[int, dict[int | None, bytes]]()


def model_digest(params: Params) -> str:
    """Returns the SHA-256 of parameters: of the path, dtype, shape and digest of each, in the order of paths.

    One array at a time, or one layer's slice of a stack, is copied to the host, and once: the digests of JAX arrays,
    which do not change, are kept as long as the arrays are.
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        index = int(name.removeprefix(LAYER)) if name.startswith(LAYER) else None
        stacks = params.layers if index is not None and isinstance(params, StackedParams) else None
        leaves = jax.tree_util.tree_flatten_with_path({name: params[name] if stacks is None else stacks})[0]
        named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        for path, leaf in sorted(named.items()):
            shape = leaf.shape if stacks is None else leaf.shape[1:]
            digest.update(f"{path} {leaf.dtype} {shape}".encode())
            digest.update(_array_digest(leaf, None if stacks is None else index))
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


def _array_digest(leaf: jax.Array | np.ndarray, index: int | None = None) -> bytes:
    """Returns the SHA-256 of the numbers of an array, or of one of its slices."""
    if not isinstance(leaf, jax.Array):
        return _hashed(leaf if index is None else leaf[index])
    known = _known.get(id(leaf))
    if known is None:
        known = _known[id(leaf)] = {}
        # None, since two threads may have made a digest of the same array.
        weakref.finalize(leaf, _known.pop, id(leaf), None).atexit = False
    if index not in known:
        known[index] = _hashed(leaf if index is None else slice_of(leaf, index, 0))
    return known[index]


def _hashed(leaf: jax.Array | np.ndarray) -> bytes:
    """Returns the SHA-256 of the numbers of an array."""
    return hashlib.sha256(np.ascontiguousarray(distributed.to_host(leaf)).tobytes()).digest()
