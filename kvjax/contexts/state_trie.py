"""A bounded trie of states by the tokens that they are of; the least recently used ones are dropped.

Of several namespaces, the one with the most bytes loses states first, so that one client cannot take all the room.
"""

import collections
import dataclasses
import itertools
import threading
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvjax.errors import InputError, shown

Namespace = Hashable


def check_namespace(namespace: object) -> None:
    """Checks that states can be found by a namespace.

    Raises:
      InputError: it has no hash.
    """
    try:
        hash(namespace)
    except TypeError:
        raise InputError(f"namespace must be a value with a hash, such as a string; got {shown(namespace)}.") from None


class Key(NamedTuple):
    """States of different keys never meet.

    Attributes:
      namespace: whose states they are, such as an API key; None = everybody's.
      kind: the model, the cache, and all else that a state depends on besides its tokens.
    """

    namespace: Namespace
    kind: Hashable


@dataclasses.dataclass(frozen=True)
class StoreCounts:
    """Counts of a store, or of one of its namespaces.

    Attributes:
      states: the number of states.
      nbytes: their bytes.
      hits: lookups that have found a state.
      misses: lookups that have found none.
      saved_tokens: the tokens that were not computed since a state had them.
    """

    states: int = 0
    nbytes: int = 0
    hits: int = 0
    misses: int = 0
    saved_tokens: int = 0

    def plus(self, **changes: int) -> "StoreCounts":
        """Returns the counts with some of them larger, or smaller, by a number."""
        return dataclasses.replace(self, **{name: getattr(self, name) + by for name, by in changes.items()})


class _Node:
    """A point in a trie, after `tokens` from its parent's. Nodes without states have several children.

    A root is removed by its own key, since the keys of its states are equal to it only while the parameters exist.
    """

    __slots__ = ("children", "key", "parent", "states", "tokens")

    def __init__(self, tokens: np.ndarray, parent: "_Node | None", key: Key | None = None) -> None:
        self.tokens, self.parent, self.key = tokens, parent, key
        self.children: dict[int, _Node] = {}
        self.states: dict[Hashable, State] = {}


@dataclasses.dataclass(eq=False)
class State:
    """A state in a trie.

    Attributes:
      key: see `Key`.
      tokens: [n] int32, the tokens that it is of.
      label: distinguishes it from other states of the same tokens.
      value: the state.
      nbytes: its bytes.
    """

    key: Key
    tokens: np.ndarray
    label: Hashable
    value: Any
    nbytes: int
    _node: _Node | None = None
    _used_at: int = 0


class StateTrie:
    """States by key and tokens, of at most `max_bytes` bytes in all.

    It is safe to use from several threads. Tokens lie in a radix tree for each key, so that a lookup takes time by the
    number of its tokens, whatever the number of states.

    When there is no room, the namespace with the most bytes loses its least recently used state; of several with as
    many, the one whose state was used the longest ago. A namespace with no more than an equal share of the bytes thus
    keeps its states, whatever the others add, and a new state may be the one that is dropped.

    Attributes:
      max_bytes: the most bytes of all states.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self._roots: dict[Key, _Node] = {}
        # By namespace, and then by id, the last one used last.
        self._used: dict[Namespace, collections.OrderedDict[int, State]] = {}
        self._clock = itertools.count(1)
        self._counts: dict[Namespace, StoreCounts] = {}
        self._nbytes = 0

    def counts(self, namespace: Namespace) -> StoreCounts:
        """Returns the counts of a namespace."""
        with self._lock:
            return self._counts.get(namespace, StoreCounts())

    def total(self) -> StoreCounts:
        """Returns the counts of all namespaces."""
        with self._lock:
            made = StoreCounts()
            for each in self._counts.values():
                made = made.plus(**dataclasses.asdict(each))
            return made

    def kinds(self, namespace: Namespace) -> list[Hashable]:
        """Returns the kinds of the states of a namespace."""
        with self._lock:
            return [key.kind for key in self._roots if key.namespace == namespace]

    def add(self, key: Key, tokens: np.ndarray, value: Any, nbytes: int, *, label: Hashable = None) -> bool:
        """Adds a state, unless there is one of the same key, tokens and label, which becomes the last one used.

        Returns:
          Whether the state is in the trie; it is not if there is no room for it.
        """
        if nbytes > self.max_bytes:
            return False
        with self._lock:
            node = self._node(key, tokens)
            if (known := node.states.get(label)) is not None:
                self._touch(known)
                return True
            made = State(key, tokens, label, value, nbytes, node)
            own = self._used.setdefault(key.namespace, collections.OrderedDict())
            node.states[label] = own[id(made)] = made
            self._touch(made)
            self._count(key, states=1, nbytes=nbytes)
            while self._nbytes > self.max_bytes:
                self.remove(self._next_dropped())
            return id(made) in own

    def remove(self, state: State) -> None:
        """Removes a state, if it is still there."""
        with self._lock:
            own = self._used.get(state.key.namespace)
            if own is None or own.pop(id(state), None) is None:
                return
            if not own:
                del self._used[state.key.namespace]
            node = state._node
            assert node is not None
            del node.states[state.label]
            self._count(state.key, states=-1, nbytes=-state.nbytes)
            while node.parent is not None and not node.states and not node.children:
                del node.parent.children[int(node.tokens[0])]
                node = node.parent
            if node.parent is None:
                if not node.children and not node.states:
                    assert node.key is not None
                    del self._roots[node.key]
            elif not node.states and len(node.children) == 1:
                _join_child(node)

    def along(self, key: Key, tokens: np.ndarray) -> list[State]:
        """Returns the states whose tokens are a prefix of `tokens`, the longest ones first."""
        with self._lock:
            nodes = [node for node, shared in self._path(key, tokens) if shared == len(node.tokens)]
            return [state for node in reversed(nodes) for state in node.states.values()]

    def nearest(self, key: Key, tokens: np.ndarray) -> tuple[State | None, int]:
        """Returns a state that has the most tokens in common with `tokens` from the first on, and their number.

        Among several, it is one without further tokens, if there is one.
        """
        with self._lock:
            path = list(self._path(key, tokens))
            if not path:
                return None, 0
            node, common = path[-1][0], sum(shared for _, shared in path)
            while not node.states:
                node = next(iter(node.children.values()))
            return next(iter(node.states.values())), common

    def use(self, state: State, saved_tokens: int) -> None:
        """Counts a hit; the state becomes the last one used."""
        with self._lock:
            self._count(state.key, hits=1, saved_tokens=saved_tokens)
            if id(state) in self._used.get(state.key.namespace, ()):
                self._touch(state)

    def miss(self, namespace: Namespace) -> None:
        """Counts a lookup that has found nothing."""
        with self._lock:
            self._counts[namespace] = self.counts(namespace).plus(misses=1)

    def clear(self) -> None:
        """Removes all states."""
        with self._lock:
            for state in [state for own in self._used.values() for state in own.values()]:
                self.remove(state)

    def _touch(self, state: State) -> None:
        """Makes a state the last one used."""
        self._used[state.key.namespace].move_to_end(id(state))
        state._used_at = next(self._clock)

    def _next_dropped(self) -> State:
        most = max(self.counts(namespace).nbytes for namespace in self._used)
        first = (next(iter(own.values())) for name, own in self._used.items() if self.counts(name).nbytes == most)
        return min(first, key=lambda state: state._used_at)

    def _count(self, key: Key, **changes: int) -> None:
        self._nbytes += changes.get("nbytes", 0)
        self._counts[key.namespace] = self.counts(key.namespace).plus(**changes)

    def _path(self, key: Key, tokens: np.ndarray) -> Iterator[tuple[_Node, int]]:
        """Yields the nodes that tokens lead through, and how many tokens of each they share, at least one."""
        node = self._roots.get(key)
        while node is not None and len(tokens):
            node = node.children.get(int(tokens[0]))
            if node is not None:
                shared = _common(node.tokens, tokens)
                yield node, shared
                tokens = tokens[shared:]
                node = node if shared == len(node.tokens) else None

    def _node(self, key: Key, tokens: np.ndarray) -> _Node:
        """Returns the node of tokens, which is made if there is none."""
        node = self._roots.setdefault(key, _Node(np.zeros(0, np.int32), None, key))
        while len(tokens):
            child = node.children.get(int(tokens[0]))
            if child is None:
                child = node.children[int(tokens[0])] = _Node(tokens.copy(), node)
            shared = _common(child.tokens, tokens)
            if shared < len(child.tokens):
                child = _divide(child, shared)
            node, tokens = child, tokens[shared:]
        return node


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Returns the number of tokens that two rows share from the first on."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _divide(node: _Node, length: int) -> _Node:
    """Puts a node before another one, which has the first `length` of its tokens; returns it."""
    assert node.parent is not None
    made = _Node(node.tokens[:length].copy(), node.parent)
    node.parent.children[int(made.tokens[0])] = made
    node.tokens, node.parent = node.tokens[length:].copy(), made
    made.children[int(node.tokens[0])] = node
    return made


def _join_child(node: _Node) -> None:
    """Puts the only child of a node without states into its place."""
    (child,) = node.children.values()
    assert node.parent is not None
    child.tokens, child.parent = np.concatenate([node.tokens, child.tokens]), node.parent
    node.parent.children[int(child.tokens[0])] = child
