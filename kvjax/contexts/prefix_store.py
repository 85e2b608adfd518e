"""`PrefixStore`: contexts keyed by their tokens, so that what texts have in common is computed once."""

import weakref
from collections.abc import Hashable
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import check_type, number_argument, plain_signature
from kvjax.cache.planning.lowering import budgets_of
from kvjax.cache.spec import CacheSpec
from kvjax.contexts.rewinding import reason_against, rewind
from kvjax.contexts.room import BY_LENGTH
from kvjax.contexts.state_trie import Key, State, StateTrie, StoreCounts, check_namespace
from kvjax.errors import InputError, PolicyError, shown
from kvjax.generation.context import CHUNKS, EDITED, Context, Made, Span, turn_of
from kvjax.inputs import check_batch, check_one_row
from kvjax.models.config import DecoderConfig
from kvjax.models.digest import ParameterKey
from kvjax.models.model import Model
from kvjax.units import size

LARGEST = 1 << 60  # bytes
Spans = tuple[Span, ...]  # of one row


class _Kind(NamedTuple):
    """The model and the cache of contexts.

    Attributes:
      parameters: the arrays, calibrations included.
      config: the decoder.
      spec: policy, storage and selection.
      dtype: of the model.
      mesh: the sizes of its axes.
    """

    parameters: ParameterKey
    config: DecoderConfig
    spec: CacheSpec
    dtype: str
    mesh: tuple[tuple[str, int], ...]


class PrefixStore:
    """Contexts of one row by model, cache, tokens and boundaries, with at most `max_bytes` bytes of arrays.

    When there is no room, the least recently used context of the namespace with the most bytes is dropped. A context in
    the store must not be donated. The store is safe to use from several threads.

    Attributes:
      max_bytes: the most bytes of all arrays of its contexts.

    Example::

      store = kvjax.PrefixStore(2 << 30)
      store.add(kvjax.contexts.prefill(model, tokens, policies.full()))
      context = store.longest(tokens[0, :100])  # or any text that begins like it
    """

    def __init__(self, max_bytes: int) -> None:
        """Begins without contexts.

        Args:
          max_bytes: the most bytes of all arrays of its contexts: keys, values, statistics, logits and tokens.

        Raises:
          InputError: `max_bytes` is not a whole number of at least 1.
        """
        # A float, such as 1e9, may be whole.
        number = number_argument("max_bytes", max_bytes, minimum=1, maximum=LARGEST, error=InputError)
        if not number.is_integer():
            raise InputError(f"max_bytes must be a whole number of bytes; got {shown(max_bytes)}.")
        self.max_bytes = int(max_bytes)
        self.trie = StateTrie(self.max_bytes)

    def __repr__(self) -> str:
        counts = self.counts()
        return (
            f"PrefixStore({size(counts.nbytes)} of {size(self.max_bytes)}, {counts.states} contexts, {counts.hits} "
            f"hits, {counts.misses} misses, {counts.saved_tokens} tokens not computed)"
        )

    def __len__(self) -> int:
        return self.counts().states

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays of its contexts."""
        return self.counts().nbytes

    @property
    def hits(self) -> int:
        """The lookups that have found a context."""
        return self.counts().hits

    @property
    def misses(self) -> int:
        """The lookups that have found none."""
        return self.counts().misses

    @property
    def saved_tokens(self) -> int:
        """The tokens that were not computed since a context had them."""
        return self.counts().saved_tokens

    def counts(self, *namespaces: Hashable) -> StoreCounts:
        """Returns the counts of all namespaces, or of one.

        Args:
          *namespaces: at most one namespace.

        Raises:
          InputError: several namespaces, or one without a hash.
        """
        if len(namespaces) > 1:
            raise InputError(f"counts has those of one namespace, or of all; got {len(namespaces)} namespaces.")
        for namespace in namespaces:
            check_namespace(namespace)
        return self.trie.counts(*namespaces) if namespaces else self.trie.total()

    def add(self, context: Context, *, namespace: Hashable = None) -> bool:
        """Adds a context, unless it is there already, and makes it the last one used.

        Args:
          context: of one row, from a function of `kvjax.contexts`.
          namespace: whose context it is; lookups of others do not find it.

        Returns:
          Whether the store has it. A context is not added if it is larger than the store, or than the part of it that
          is not held by namespaces of no more than an equal share.

        Raises:
          InputError: it is no context, or has several rows; its tokens or its cache are not known; it was made by
            `kvjax.reuse`; its keys depend on the length of the whole text (``dynamic`` and ``longrope`` RoPE); or the
            namespace has no hash.
        """
        check_namespace(namespace)
        if not isinstance(context, Context):
            raise InputError(f"the store has contexts, from kvjax.contexts.prefill and the like; got {shown(context)}.")
        text, boundaries, made = context.text, context.boundaries, context.made
        if text is None or boundaries is None or made is None or context.resolved is None:
            raise InputError("this context cannot be stored, since its tokens or its cache are not known.")
        if unlike := {span.turn for span in boundaries[0]} & {CHUNKS, EDITED}:
            made_of = "caches of chunks" if CHUNKS in unlike else "an edited text"
            raise InputError(f"this context was made of {made_of}, and differs from that of a text as it is.")
        if context.num_rows != 1:
            raise InputError(
                f"the store has contexts of one row, and this one has {context.num_rows}; add those of "
                "kvjax.contexts.rows(context, [0]) and so on."
            )
        if scalings := rotated_by_length(made.model):
            raise InputError(f"under {scalings} RoPE, the keys of a prefix depend on the length of the whole text.")
        # [n]
        tokens = text[0]
        stored = context._replace(snapshots=()) if context.snapshots else context
        label = None if reason_against(context.layout) is None else (boundaries[0], *map(int, context.resolved[0]))
        return self.trie.add(
            Key(namespace, _kind(made)), tokens, stored, nbytes_of(stored) + tokens.nbytes, label=label
        )  # fmt: skip

    @plain_signature
    def longest(
        self,
        tokens: ArrayLike,
        *,
        boundaries: Spans | None = None,
        made: Made | None = None,
        namespace: Hashable = None,
    ) -> Context | None:
        """Returns the stored context of the longest prefix of a text, or None.

        Under a cache that evicts, a context is found if it is what `kvjax.contexts` would make of the same tokens: its
        blocks and turns have ended where those of the text end, and its budgets are those of the text. What a lookup
        returns thus never depends on what was stored, but for how much of it is there. A full cache is found at any
        length: a longer context is rewound.

        Args:
          tokens: [n] int, the text.
          boundaries: how the whole text would be fed, as in ``context.boundaries[0]``; None = as one prompt, in the
            blocks that the contexts were made with.
          made: the model and the cache, as in ``context.made``; None = those of the contexts in the store, if they
            are all alike.
          namespace: see `add`.

        Raises:
          InputError: tokens that are not valid; boundaries that are no spans, or not those of `tokens`; a namespace
            without a hash; or the store has contexts of several caches, and `made` is None.
        """
        check_namespace(namespace)
        if made is not None:
            check_type("made", made, Made, "the model and the cache of a context, as in context.made")
        kind = self._kind(made, namespace)
        check_one_row("tokens", tokens)
        if boundaries is not None:
            _check_boundaries(boundaries, np.asarray(tokens).size)
        if kind is None:
            self.trie.miss(namespace)
            return None
        key = Key(namespace, kind)
        ids = check_batch(kind.config, tokens, None, new_tokens=0).tokens[0].astype(np.int32)
        state, shared = self.trie.nearest(key, ids)
        if state is not None and state.label is None:
            context: Context = state.value
            exact = shared == len(state.tokens)
            self.trie.use(state, shared if exact else shared - 1)
            if exact:
                return context
            assert context.made is not None
            return rewind(context.made.model, context, shared)
        for each in self.trie.along(key, ids):
            if _fits(each, len(ids), boundaries):
                self.trie.use(each, len(each.tokens))
                found: Context = each.value
                return found
        self.trie.miss(namespace)
        return None

    def clear(self) -> None:
        """Drops all contexts."""
        self.trie.clear()

    def _kind(self, made: Made | None, namespace: Hashable) -> "_Kind | None":
        if made is not None:
            return _kind(made)
        kinds = [each for each in self.trie.kinds(namespace) if isinstance(each, _Kind)]
        if len(kinds) > 1:
            names = ", ".join(sorted(each.spec.name for each in kinds))
            raise InputError(f"the store has contexts of several caches ({names}); give made=, as in context.made.")
        return kinds[0] if kinds else None


_kinds = weakref.WeakKeyDictionary[Made, _Kind]()  # which is then found by identity


def _kind(made: Made) -> _Kind:
    found = _kinds.get(made)
    if found is None:
        model = made.model
        mesh = () if model.mesh is None else tuple(model.mesh.shape.items())
        found = _kinds[made] = _Kind(
            ParameterKey(model.params), model.config, made.spec, str(model.dtype), mesh
        )  # fmt: skip
    return found


def _check_boundaries(boundaries: object, length: int) -> None:
    """Checks that spans divide a text of `length` tokens.

    Raises:
      InputError: they do not.
    """
    spans = boundaries if isinstance(boundaries, tuple | list) else ()
    if not spans or not all(isinstance(span, Span) for span in spans):
        raise InputError(
            "boundaries must be the spans of one row, as in context.boundaries[0] or (Span(16, 16), Span(20, 4)); got "
            f"{shown(boundaries)}."
        )
    stops = [span.stop for span in spans]
    if any(stop <= start for start, stop in zip([0, *stops], stops, strict=False)) or stops[-1] != length:
        raise InputError(
            f"boundaries must stop one after the other, the last one at {length}, where the text ends; got stops at "
            f"{shown(stops)}."
        )
    if any(span.block < 1 for span in spans):
        raise InputError(f"blocks must have at least 1 token; got boundaries={shown(boundaries)}.")


def nbytes_of(context: Context) -> int:
    """Returns the bytes of the arrays of a context."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves((context.state, context.logits)))


def rotated_by_length(model: Model) -> str | None:
    """Returns the scalings of RoPE under which keys depend on the number of tokens of the whole text, or None."""
    ropes = [model.config.kind(index).rope for index in range(model.config.num_layers)]
    return ", ".join(sorted({rope.scaling for rope in ropes if rope is not None} & {*BY_LENGTH})) or None


def _fits(state: State, length: int, boundaries: Spans | None) -> bool:
    """Returns whether a context that evicts is what a text of `length` tokens would have had."""
    context: Context = state.value
    made, resolved = context.made, context.resolved
    assert made is not None and resolved is not None and context.boundaries is not None
    own = context.boundaries[0]
    block = made.options.prefill_block or (None if made.sizes is None else made.sizes.block)  # one that was loaded
    asked = boundaries or (Span(length, length if block is None else min(block, length)),)
    appended = turn_of(context.layout) == "append"
    decodes = any(group.evicts for group in context.layout.groups)
    edges, wanted = (_edges(spans, appended=appended, decodes=decodes) for spans in (own, asked))
    if len(edges) > len(wanted) or (edges != wanted[: len(edges)]).any():
        return False
    prompt, total = map(int, resolved[0])
    # The first prompt of the text, which budgets are resolved for.
    first = _prompt_end(asked) if appended or boundaries is None else asked[0].stop
    if appended and _prompt_end(own) != first:
        return False
    if any(span.rebudget for span in own) or first == prompt:
        return True
    if any(group.policy.budget is not None and group.policy.budget.beyond_prompt for group in context.layout.groups):
        return False
    return _budgets(made, prompt, total) == _budgets(made, first, first + total - prompt)


def _edges(spans: Spans, *, appended: bool, decodes: bool) -> np.ndarray:
    """Returns where blocks and turns end, and how, [n, 3] int; blocks that evict nothing are left out."""
    made, start = [np.zeros((0, 3), np.int64)], 0
    for span in spans:
        if span.turn != "append" or decodes or not appended or span.rebudget:
            # [n]
            stops = np.append(np.arange(start + span.block, span.stop, span.block), span.stop)
            own = np.zeros((len(stops), 3), np.int64)
            own[:, 0], own[:, 1], own[-1, 2] = stops, span.turn == "compress", span.rebudget
            made.append(own)
        start = span.stop
    return np.concatenate(made)


def _prompt_end(spans: Spans) -> int:
    """Returns the number of tokens of the first prompt."""
    return max((span.stop for span in spans if span.turn == "prompt"), default=0)


def _budgets(made: Made, prompt: int, total: int) -> list[list[int]] | None:
    """Returns the budgets of a prompt, or None if they cannot work for it."""
    try:
        found = budgets_of(
            made.spec, made.model.config, np.array([prompt], np.int32), np.array([total], np.int32)
        )  # fmt: skip
    except PolicyError:
        return None
    return [[int(each[0]) for each in jax.tree.leaves(part)] for part in (found.prompt, found.decode)]
