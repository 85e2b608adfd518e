"""Conversations that a server holds: the context after the last answer of each, in host memory.

A request of a conversation has its new messages alone. They are a turn of the context (`kvjax.contexts.extend` with
``block=1``), so that nothing of what was said before goes through the model again, and what a policy has evicted stays
evicted.
"""

import dataclasses
import secrets
import threading
import time
from collections.abc import Hashable

import jax
import numpy as np

from kvjax.contexts.state_trie import Key, State, StateTrie
from kvjax.generation.context import Context
from kvjax.parallel import host_memory

CONVERSATION_BYTES = 4 * 10**9  # of all conversations, unless a flag says otherwise
ENTRY_BYTES = 2048  # of a conversation beside its context, so that the number of those without one is bounded
PREFIX, RANDOM_BYTES = "conv_", 16  # of an id
NAME_LENGTH = len(PREFIX) + 2 * RANDOM_BYTES
KIND = "conversation"


@dataclasses.dataclass(frozen=True, eq=False)
class Conversation:
    """A conversation.

    Attributes:
      id: how requests name it.
      owner: whose it is, such as an API key; None = everybody's.
      created: seconds since 1970.
      context: after the last answer; None before the first one.
    """

    id: str
    owner: Hashable
    created: int
    context: Context | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens so far."""
        return 0 if self.context is None or self.context.text is None else len(self.context.text[0])


class NoConversation(Exception):
    """There is no conversation of this id and owner."""


class ConversationBusy(Exception):
    """A message of the conversation is being answered."""


class Conversations:
    """Conversations by id, of at most `max_bytes` bytes in all.

    It is safe to use from several threads. When there is no room, the owner whose conversations have the most bytes
    loses the least recently used of these; see `StateTrie`.

    Attributes:
      max_bytes: the most bytes of all conversations; 0 = there are none.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._states = StateTrie(max_bytes)
        self._lock = threading.Lock()
        self._answered: dict[str, Conversation] = {}  # from `take`, by id, before `put` or `release`

    def begin(self, owner: Hashable) -> Conversation | None:
        """Makes a conversation without messages; returns None if there is no room for it."""
        made = Conversation(PREFIX + secrets.token_hex(RANDOM_BYTES), owner, int(time.time()))
        return made if self._add(made, ENTRY_BYTES) else None

    def find(self, name: str, owner: Hashable) -> Conversation:
        """Returns a conversation.

        Raises:
          NoConversation: the owner has none of this id.
        """
        with self._lock:
            return self._answering(name, owner) or self._stored(name, owner)

    def take(self, name: str, owner: Hashable) -> Conversation:
        """Returns a conversation that is about to be answered, its context in host memory; `release` must follow.

        Raises:
          NoConversation: the owner has none of this id.
          ConversationBusy: it is being answered.
        """
        with self._lock:
            if self._answering(name, owner) is not None:
                raise ConversationBusy
            (state,) = self._all(name, owner) or (None,)
            if state is None:
                raise NoConversation
            self._states.use(state, state.value.tokens)
            # Another object each time, by which `put` and `release` know what they end.
            taken = self._answered[name] = dataclasses.replace(state.value)
        return taken

    def put(self, conversation: Conversation, context: Context) -> bool:
        """Replaces the context of a conversation, which can then be taken again, unless it was removed meanwhile.

        Args:
          conversation: from `take`.
          context: after the answer. Its arrays move to host memory.

        Returns:
          Whether there is room for it; if not, the conversation is lost.
        """
        nbytes = ENTRY_BYTES + context_bytes(context)
        logits, cache = host_memory.to_host((context.logits, context.state))
        context = context._replace(logits=logits, state=cache)
        with self._lock:
            if self._answered.get(conversation.id) is not conversation:
                return True
            del self._answered[conversation.id]
            for state in self._all(conversation.id, conversation.owner):
                self._states.remove(state)
            return self._add(dataclasses.replace(conversation, context=context), nbytes)

    def release(self, conversation: Conversation) -> None:
        """Ends what `take` has begun. Without a `put` before, the conversation is as it was."""
        with self._lock:
            if self._answered.get(conversation.id) is conversation:
                del self._answered[conversation.id]

    def remove(self, name: str, owner: Hashable) -> None:
        """Forgets a conversation.

        Raises:
          NoConversation: the owner has none of this id.
        """
        with self._lock:
            # One that is being answered may have been dropped.
            if self._answering(name, owner) is None:
                self._stored(name, owner)
            self._answered.pop(name, None)
            for state in self._all(name, owner):
                self._states.remove(state)

    def counts(self, owner: Hashable) -> tuple[int, int]:
        """Returns the number of an owner's conversations, and their bytes."""
        counts = self._states.counts(owner)
        return counts.states, counts.nbytes

    def _add(self, conversation: Conversation, nbytes: int) -> bool:
        return self._states.add(Key(conversation.owner, KIND), _characters(conversation.id), conversation, nbytes)

    def _answering(self, name: str, owner: Hashable) -> Conversation | None:
        """Returns a conversation of an owner that is being answered."""
        found = self._answered.get(name)
        return found if found is not None and found.owner == owner else None

    def _all(self, name: str, owner: Hashable) -> list[State]:
        if len(name) != NAME_LENGTH:
            return []
        characters = _characters(name)
        found = self._states.along(Key(owner, KIND), characters)
        return [state for state in found if len(state.tokens) == len(characters)]

    def _stored(self, name: str, owner: Hashable) -> Conversation:
        found = self._all(name, owner)
        if not found:
            raise NoConversation
        stored: Conversation = found[0].value
        return stored


def context_bytes(context: Context) -> int:
    """Returns the bytes that the cache and the logits of a context take."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves((context.logits, context.state)))


def _characters(name: str) -> np.ndarray:
    """Returns the characters of an id as numbers, [n] int32, by which states are found."""
    return np.array([*map(ord, name)], np.int32)
