"""Documents of a request: texts before its prompt whose caches are computed once, and used in any order.

The cache of a document is computed after the tokens that begin every such prompt, and after nothing else
(`kvjax.reuse.compute`). A request puts the caches of its documents one after the other, recomputes a share of their
tokens and feeds the prompt (`kvjax.reuse.blend`), which approximates a prompt that is run as a whole.
"""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from kvjax.arguments import number_argument
from kvjax.cache.groups import Phase
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.planning.limits import prompt_bucket
from kvjax.cache.state import KVState
from kvjax.contexts.feed import resized_state
from kvjax.contexts.state_trie import Key, StateTrie, StoreCounts
from kvjax.errors import InputError, shown
from kvjax.generation.context import CHUNKS, Span
from kvjax.generation.options import CacheOptions
from kvjax.generation.program import program
from kvjax.models.config import DecoderConfig
from kvjax.reuse.blending import blend
from kvjax.reuse.cache import ChunkCache, checked_tokens, compute
from kvjax.reuse.last_block import check_cache
from kvjax.reuse.layerwise import check_movable
from kvjax.serve.chunked_prefill import Prompt, Started
from kvjax.serve.prompts import Prompts
from kvjax.summary import one_line

DOCUMENT_BYTES = 10**9  # of the caches of documents, unless the caller says otherwise
RATIO = 0.15  # see `kvjax.reuse.blend`
CHECK = 1  # see there
BEGINNING, CHUNK = "beginning", "chunk"  # kinds of caches in the trie

Tokens = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Texts that the tokens of a request follow.

    Attributes:
      chunks: the token ids of each document, [n] int; one after the other.
      beginning: [n] int, the tokens before all of them, such as a begin-of-text token, possibly none. Every document is
        computed after these, so that other ones need other caches.
      ratio: the share of the documents' tokens that are recomputed; see `kvjax.reuse.blend`.
      by_question: the part of these that the request's tokens choose; see there.
    """

    chunks: Sequence[Tokens]
    beginning: Tokens = ()
    ratio: float = RATIO
    by_question: float = 0.0

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def tokens(self) -> np.ndarray:
        """The tokens before those of the request, [n] int32."""
        return np.concatenate([np.asarray(each, np.int32).reshape(-1) for each in (self.beginning, *self.chunks)])


def checked_documents(config: DecoderConfig, documents: Documents) -> Documents:
    """Returns documents with arrays of tokens.

    Raises:
      InputError: documents that are not valid, or a model whose keys and values cannot be moved.
    """
    if not isinstance(documents, Documents):
        raise InputError(f"documents must be kvjax.serve.Documents(chunks); got {shown(documents)}.")
    if config.num_layers <= CHECK:
        raise InputError("documents need a model of two layers or more, in the second of which they are compared.")
    ratio, by_question = (
        number_argument(f"the {name} of documents", getattr(documents, name), minimum=0, maximum=1, error=InputError)
        for name in ("ratio", "by_question")
    )
    if not isinstance(documents.chunks, Sequence) or not documents.chunks:
        raise InputError("documents must have a list of at least one chunk of token ids.")
    check_movable(config)
    chunks = [checked_tokens(config, "a document", each) for each in documents.chunks]
    empty = isinstance(documents.beginning, Sequence | np.ndarray) and not len(documents.beginning)
    beginning = np.zeros(0, np.int32) if empty else checked_tokens(config, "beginning", documents.beginning)
    return Documents(chunks, beginning, ratio, by_question)


class DocumentCaches:
    """The caches of documents, of at most `max_bytes` bytes; see `kvjax.contexts.state_trie.StateTrie`.

    While a prompt is run, it also holds the caches of its documents, which this bound does not count.

    Attributes:
      max_bytes: the most bytes of keys and values; 0 = there are no documents.
    """

    def __init__(self, prompts: Prompts, max_bytes: int) -> None:
        """Begins without caches.

        Args:
          prompts: of the runner.
          max_bytes: the most bytes of keys and values.

        Raises:
          InputError: it is no whole number of at least 0.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int | np.integer) or max_bytes < 0:
            raise InputError(f"document_bytes must be a whole number of bytes of at least 0; got {shown(max_bytes)}.")
        self.max_bytes, self._prompts, self._trie = int(max_bytes), prompts, StateTrie(int(max_bytes))

    def check(self, documents: Documents, following: int) -> None:
        """Checks that documents can be put into the cache.

        Args:
          documents: from `checked_documents`.
          following: the number of tokens of the request that follow them.

        Raises:
          InputError: there is no room for any, or the cache needs the attention of all tokens.
        """
        if not self.max_bytes:
            raise InputError("this runner keeps no caches of documents; give it document_bytes.")
        if not following:
            raise InputError("a request with documents needs at least one token after them.")
        check_cache(self._prompts.spec, self._prompts.layout, following)

    def counts(self, namespace: Hashable) -> StoreCounts:
        """Returns the counts of the caches of a namespace."""
        return self._trie.counts(namespace)

    def begin(self, prompt: Prompt, documents: Documents, namespace: Hashable) -> "DocumentPrompt":
        """Begins a prompt.

        Args:
          prompt: all of its tokens.
          documents: those that it begins with.
          namespace: whose caches it may use.
        """
        return DocumentPrompt(self._prompts, self, prompt, documents, namespace)

    def find(self, namespace: Hashable, beginning: np.ndarray, chunk: np.ndarray | None) -> ChunkCache | None:
        """Returns a cache, or None if it is not there.

        Args:
          namespace: whose cache it is.
          beginning: [n] int32, the tokens before all documents.
          chunk: [m] int32, the document; None = the cache of `beginning`.
        """
        key, tokens = self._key(namespace, beginning, chunk)
        state = next((each for each in self._trie.along(key, tokens) if len(each.tokens) == len(tokens)), None)
        if state is None:
            self._trie.miss(namespace)
            return None
        self._trie.use(state, len(tokens))
        found: ChunkCache = state.value
        return found

    def add(self, namespace: Hashable, beginning: np.ndarray, chunk: np.ndarray | None, cache: ChunkCache) -> None:
        """Keeps a cache, without that of the tokens before it, which is kept by itself; for arguments see `find`."""
        key, tokens = self._key(namespace, beginning, chunk)
        self._trie.add(key, tokens, dataclasses.replace(cache, prefix=None), cache.nbytes)

    def clear(self) -> None:
        """Forgets all caches."""
        self._trie.clear()

    def _key(self, namespace: Hashable, beginning: np.ndarray, chunk: np.ndarray | None) -> tuple[Key, np.ndarray]:
        if chunk is None:
            return Key(namespace, BEGINNING), beginning
        return Key(namespace, (CHUNK, beginning.tobytes())), chunk


class DocumentPrompt:
    """A prompt with documents, which is run part by part: each cache that is missing, and then all together.

    Attributes:
      step: the number of tokens that the last part has run, padding and those that it has looked at included.
      found: the number of the documents' tokens whose caches were there.
    """

    def __init__(
        self, prompts: Prompts, caches: DocumentCaches, prompt: Prompt, documents: Documents, namespace: Hashable
    ) -> None:
        """See `DocumentCaches.begin`."""
        self._prompts, self._caches, self._prompt = prompts, caches, prompt
        self._namespace, self._documents = namespace, documents
        self._beginning, self._chunks = np.asarray(documents.beginning), [np.asarray(each) for each in documents.chunks]
        self._prefix: ChunkCache | None = None
        self._held: dict[bytes, ChunkCache] = {}
        self.step = self.found = 0
        if len(self._beginning):
            self._prefix = caches.find(namespace, self._beginning, None)
        for chunk in self._chunks:
            if chunk.tobytes() in self._held:
                continue
            if (cache := caches.find(namespace, self._beginning, chunk)) is not None:
                self._held[chunk.tobytes()] = cache
                self.found += len(chunk)

    def advance(self) -> Started | None:
        """Runs the next part; returns the prompt's state after the last one."""
        if len(self._beginning) and self._prefix is None:
            self._prefix = self._computed(self._beginning, None)
            return None
        missing = next((each for each in self._chunks if each.tobytes() not in self._held), None)
        if missing is not None:
            self._held[missing.tobytes()] = self._computed(missing, missing)
            return None
        return self._blend()

    def _computed(self, tokens: np.ndarray, chunk: np.ndarray | None) -> ChunkCache:
        made = compute(self._prompts.model, tokens, None if chunk is None else self._prefix)
        self._caches.add(self._namespace, self._beginning, chunk, made)
        before = 0 if made.prefix is None else len(made.prefix)
        self.step = prompt_bucket(before + len(tokens))
        return made

    def _blend(self) -> Started:
        prompts, tokens = self._prompts, self._prompt.tokens
        chunks = [dataclasses.replace(self._held[each.tobytes()], prefix=self._prefix) for each in self._chunks]
        length = len(self._beginning) + sum(map(len, chunks))
        # The last token is not fed, as in `Prompts`, whose arrays these are then but for special cases.
        limits = dataclasses.replace(prompts.limits, new_tokens=max(1, prompts.limits.new_tokens - 1))
        made = blend(
            prompts.model, chunks, tokens[length:], prompts.spec, ratio=self._documents.ratio, check=CHECK,
            by_question=self._documents.by_question,
            room=self._prompt.total, options=CacheOptions(limits=limits, implementation=prompts.implementation),
        )  # fmt: skip
        self.step = prompt_bucket(len(tokens))
        context = made.context
        state = _in_rows(context.state, before=context.layout.decode, after=prompts.layout.decode)
        return Started(context.logits, state)


@program(static_argnames=("before", "after"))
def _in_rows(state: KVState, *, before: Phase, after: Phase) -> KVState:
    """Returns a cache in the arrays of a runner's rows, whose layers are not in stacks."""
    state = arranged_state(state, ())
    return state if before == after else resized_state(state, before, after)


def spans_of(documents: Documents, length: int) -> tuple[Span, ...]:
    """Returns how the tokens of a prompt of `length` tokens were fed; see `kvjax.Context`."""
    before = len(documents.tokens)
    return Span(before, before, CHUNKS), Span(length, length - before)
