"""`kvjax.reuse_prompts`: activations of prompts, kept for calls on the same prompts under other caches.

A prompt in one shot attends to its own keys and values, whatever a cache keeps of them. Its queries, keys and values in
all layers are therefore the same under every cache that does not act on prompts, and most of the work of a prompt is to
compute them. `kvjax.generation.prompt_reuse` has the programs that record them, and that make caches of them.
"""

import collections
import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Hashable, Iterator

import flax.struct
import jax
import jax.numpy as jnp

from kvjax.arguments import number_argument
from kvjax.cache.layer_stack import LayerRun, LayerRuns
from kvjax.errors import ConfigError
from kvjax.units import size

Array = jax.Array
LARGEST = 1 << 60  # bytes
LARGE = 0.25  # of the bytes of a store: what may be beside it
Projected = tuple[Array, ...]  # queries [B, H, n, D], keys [B, K, n, D], values [B, K, n, D]


class Activations(flax.struct.PyTreeNode):
    """Activations of prompts that do not depend on the cache.

    Attributes:
      projected: queries, keys and values of each span: [B, heads, n, D] of one layer, [L, B, heads, n, D] of several.
      spans: the layers of each span.
      hidden: [B, n, E], the input of the output head.
    """

    projected: tuple[Projected, ...]
    spans: LayerRuns = flax.struct.field(pytree_node=False)
    hidden: Array

    def of_layer(self, index: int) -> Projected:
        """Returns queries, keys and values of a layer."""
        for own, span in zip(self.projected, self.spans, strict=True):
            if index in span.layers:
                return own if len(span) == 1 else tuple(each[index - span.start] for each in own)
        raise AssertionError(f"no layer {index}")

    def of_run(self, run: LayerRun) -> Projected:
        """Returns queries, keys and values of consecutive layers, [L, B, heads, n, D] each."""
        for own, span in zip(self.projected, self.spans, strict=True):
            if span == run:
                return own
        layers = [self.of_layer(index) for index in run.layers]
        return tuple(jnp.stack(each) for each in zip(*layers, strict=True))


@dataclasses.dataclass
class Entry:
    """An entry of a store.

    Attributes:
      activations: of a batch of prompts.
      weights: the parameters that they depend on. An entry holds them, so that their ids stay unique.
      nbytes: the bytes of the activations and of one array of log-probabilities.
      targets: a digest of the next tokens that were scored last; None if none were.
      logprobs: [B, n] float32, the log-probabilities of these.
    """

    activations: Activations
    weights: tuple[Array, ...]
    nbytes: int
    targets: str | None = None
    logprobs: Array | None = None


class PromptStore:
    """Activations of prompts. The least recently used ones are dropped where there is no room for new ones.

    Prompts that were computed before and not found since do not replace what was used since: they come in turns with
    prompts that do not all have room, for example batches of questions that are asked under one cache after the other,
    and each batch would be dropped before it comes again.

    Attributes:
      max_bytes: the maximum number of bytes of all entries.
      hits: the number of calls whose prompts were in the store.
      misses: the number of calls whose prompts were computed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = self.misses = 0
        # Threads of one caller compute a prompt that has room once.
        self.lock = threading.RLock()
        self._entries: collections.OrderedDict[Hashable, Entry] = collections.OrderedDict()
        # For every key that was looked up, kept or not: the number of its last lookup, and whether it was found after
        # its prompts were last computed. The hashes are stored, because keys hold configs and layouts. If two hashes
        # are equal, different prompts may be kept, but results do not change.
        self._last_lookup: dict[int, int] = {}
        self._found: set[int] = set()
        self._lookups = 0

    def __repr__(self) -> str:
        return f"PromptStore({size(self.nbytes)} of {size(self.max_bytes)}, {self.hits} hits, {self.misses} misses)"

    @property
    def nbytes(self) -> int:
        """The number of bytes of all entries."""
        with self.lock:
            return sum(entry.nbytes for entry in self._entries.values())

    def find(self, key: Hashable) -> Entry | None:
        """Returns an entry, which becomes the most recently used one, or None."""
        self._lookups += 1
        if (found := self._entries.get(key)) is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        self._last_lookup[hash(key)] = self._lookups
        self._found.add(hash(key))
        return found

    def make_room(self, key: Hashable, nbytes: int) -> bool:
        """Drops the least recently used entries until there is room for another one.

        Args:
          key: of the entry, which was not found.
          nbytes: of the entry.

        Returns:
          Whether there is room. There is none if the prompts were computed before and not found since, and an entry
          that would have to be dropped was used since; but large entries (`LARGE`) get room in any case.
        """
        name = hash(key)
        in_turns = name in self._last_lookup and name not in self._found and nbytes <= LARGE * self.max_bytes
        before = self._last_lookup.get(name, 0)
        self._last_lookup[name] = self._lookups
        self._found.discard(name)
        held, dropped = self.nbytes, []
        for other, entry in self._entries.items():
            if held + nbytes <= self.max_bytes:
                break
            if in_turns and self._last_lookup[hash(other)] > before:
                return False
            dropped.append(other)
            held -= entry.nbytes
        for other in dropped:
            del self._entries[other]
        return True

    def add(self, key: Hashable, entry: Entry) -> None:
        """Adds an entry, for which there is room."""
        self._entries[key] = entry

    def clear(self) -> None:
        """Drops all entries."""
        with self.lock:
            self._entries.clear()
            self._last_lookup.clear()
            self._found.clear()


_store: contextvars.ContextVar[PromptStore | None] = contextvars.ContextVar("store", default=None)


@contextlib.contextmanager
def reuse_prompts(max_bytes: int) -> Iterator[PromptStore]:
    """Returns a context manager within which calls with equal prompts under different caches run the prompts once.

    `kvjax.log_likelihood`, `kvjax.generate` and `kvjax.score_choices` keep the queries, keys and values of a batch of
    prompts. A later call with the same model, batch and padding runs only the cache: attention, statistics, eviction
    and storage. Results may differ in rounding from those of a call outside of the context.

    Prompts in blocks, and those of selections that act on prompts, are computed in each call, because the cache changes
    them. So are those of models on meshes, in gradients, with parameters that are not JAX arrays, and with a RoPE
    scaling that depends on the number of tokens to come (``dynamic``, ``longrope``). Threads that the caller starts
    share prompts if they run in a copy of its context (`contextvars.copy_context`).

    Args:
      max_bytes: the maximum number of bytes of all activations that are kept. A batch needs (H + 2 K) D numbers for
        each token and layer, and E for each token; one that needs more than `max_bytes` is computed in each call. If
        calls cycle through more batches than fit, some stay in the store and the others are computed each time. During
        such a call, its batch needs up to a quarter of `max_bytes` more. The parameters of the model are kept as well,
        which takes no memory as long as the caller has them.

    Yields:
      The store, which counts its hits and misses. It is empty after the context.

    Raises:
      ConfigError: `max_bytes` is not a positive number.

    Example::

      with kvjax.reuse_prompts(4 << 30):
        for policy in (policies.full(), policies.h2o(0.2), policies.roco(0.2)):
          scored = kvjax.log_likelihood(model, tokens, policy, prompt_length=512)
    """
    most = number_argument("max_bytes", max_bytes, minimum=1, maximum=LARGEST, error=ConfigError)
    store = PromptStore(int(most))
    token = _store.set(store)
    try:
        yield store
    finally:
        _store.reset(token)
        store.clear()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Within this context, which may be inside of `reuse_prompts`, prompts are computed: for measurements of time."""
    token = _store.set(None)
    try:
        yield
    finally:
        _store.reset(token)


def active() -> PromptStore | None:
    """Returns the store of `reuse_prompts`, or None outside of it."""
    return _store.get()
