"""States that many requests continue: a context is run and compressed once, and saved, loaded, extended and forked.

A prefix is the cache after some tokens, and the logits after the last of them. What continues it is fed as if the model
had generated it (`kvjax.contexts.extend`): one token at a time, or in one block where that makes no
difference but for rounding. On one device, a loaded, a forked and a recomputed prefix are equal bit for bit, and so is
one that was extended one token at a time, in several parts or in one.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import plain_signature
from kvjax.cache.state import KVState
from kvjax.contexts import extend
from kvjax.errors import InputError
from kvjax.generation.cartridge import cartridge
from kvjax.generation.context import Context
from kvjax.generation.multiple_choice import takes_blocks
from kvjax.inputs import check_batch, check_count, check_one_row
from kvjax.models.config import DecoderConfig
from kvjax.parallel import host_memory
from kvjax.serve.chunked_prefill import Started
from kvjax.serve.prompts import Prompts
from kvjax.summary import one_line
from kvjax.typing import PyTree

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """A state that requests continue.

    Attributes:
      state: the cache, of one row.
      logits: [1, V] float32 after the last token.
      tokens: [n] int32, all tokens so far, including those that were evicted.
      prompt: how many of them were run as the prompt; the others were fed one at a time.
      prompts: what it was made by: model, spec and limits.
    """

    state: KVState
    logits: Array
    tokens: np.ndarray
    prompt: int
    prompts: Prompts = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return len(self.tokens)

    @property
    def room(self) -> int:
        """The number of tokens that may follow, given or generated."""
        return self.prompts.limits.new_tokens - (self.length - self.prompt)

    @property
    def at_once(self) -> bool:
        """Whether the tokens that continue it are fed in one block."""
        return takes_blocks(self.prompts.layout.decode)

    def check(self, prompts: Prompts, following: int) -> None:
        """Checks that a runner can continue the prefix.

        Args:
          prompts: of the runner.
          following: the number of tokens that follow, given and generated.

        Raises:
          InputError: it is of another model or another spec, or there is no room.
        """
        if prompts.model.params is not self.prompts.model.params:
            raise InputError(
                "the prefix belongs to another model; make or load it with Runner.prefix or Runner.load_prefix."
            )
        if prompts.layout.decode != self.prompts.layout.decode:
            raise InputError(
                f"the prefix was made under {_described(self.prompts)}, and the runner has {_described(prompts)}."
            )
        if following > (room := min(self.room, prompts.limits.new_tokens)):
            raise InputError(
                f"{following} tokens were requested after a prefix that has room for {room}; make the prefix and the "
                "runner with larger limits.new_tokens."
            )

    @plain_signature
    def extend(self, tokens: ArrayLike) -> "Prefix":
        """Returns a prefix with further tokens; this one is not changed.

        Args:
          tokens: [n] int.

        Raises:
          InputError: they are not valid for the model, or there is no room.
        """
        ids = _one_row(self.prompts.model.config, tokens, new_tokens=1 + self.length)
        # A token must be left to be chosen.
        self.check(self.prompts, len(ids) + 1)
        context = Context(self.logits, self.state, self.prompts.layout)
        logits, state, *_ = extend(self.prompts.model, context, ids, block=1)
        return dataclasses.replace(self, state=state, logits=logits, tokens=np.concatenate([self.tokens, ids]))

    @plain_signature
    def trained(self, tokens: ArrayLike, *, steps: int = 100, rate: float = 1e-2, optimizer: Any = None) -> "Prefix":
        """Returns a new prefix whose slots are trained on the text that follows it; see `kvjax.cartridge`.

        Args:
          tokens: [n] int, the text that follows, for which there must be room; it does not become part of the prefix.
          steps: see `kvjax.cartridge`.
          rate: see `kvjax.cartridge`.
          optimizer: see `kvjax.cartridge`.
        """
        ids = _one_row(self.prompts.model.config, tokens, new_tokens=1 + self.length)
        prefilled = Context(self.logits, self.state, self.prompts.layout)
        made = cartridge(self.prompts.model, prefilled, ids[None], steps=steps, rate=rate, optimizer=optimizer)
        return dataclasses.replace(self, state=made.prefilled.state)

    def started(self, tokens: np.ndarray) -> Started:
        """Returns the state that a request starts from.

        Args:
          tokens: [n] int32, those of the request; fed here if they are fed in one block.
        """
        whole = self.extend(tokens) if self.at_once and len(tokens) else self
        return Started(whole.logits, whole.state)

    def fork(self, rows: int) -> Context:
        """Copies the state, for `kvjax.generation.generate.decode`.

        Args:
          rows: the number of copies.
        """
        check_count("rows", rows)
        with self.prompts.model.on_mesh():
            logits, state = _rows((self.logits, self.state), np.zeros(rows, np.int32))
        return Context(logits, state, self.prompts.layout, np.tile(self.tokens, (rows, 1)))


def make(prompts: Prompts, tokens: ArrayLike) -> Prefix:
    """Runs a context.

    Args:
      prompts: model, spec and limits; `kvjax.serve.Runner.prompts` of the runner that will continue it.
      tokens: [n] int.

    Raises:
      InputError: the tokens are not valid for the model, or exceed the limits.
      PolicyError: the budget cannot work for their number.
    """
    model = prompts.model
    ids = _one_row(model.config, tokens, new_tokens=1)
    prompt = prompts.prompt(ids, prompts.limits.new_tokens)
    bucket = prompts.bucket(prompt)
    with model.on_mesh():
        if bucket is not None:
            started = prompts.run([prompt], bucket)
        else:
            blocks = prompts.begin(prompt)
            while (ended := blocks.advance()) is None:
                pass
            started = ended
        logits, state = _rows(tuple(started), np.zeros(1, np.int32))
    return Prefix(state, logits, ids, len(ids), prompts)


def _one_row(config: DecoderConfig, tokens: ArrayLike, *, new_tokens: int) -> np.ndarray:
    """Returns checked token ids, [n] int32; see `check_batch`."""
    check_one_row("a prefix", tokens)
    return check_batch(config, tokens, None, new_tokens=new_tokens).tokens[0]


@jax.jit
def _rows(tree: PyTree, rows: Array) -> PyTree:
    """Copies rows [R] int32 of every array of a tree."""
    return jax.tree.map(lambda leaf: host_memory.take_rows(leaf, rows), tree)


def _described(prompts: Prompts) -> str:
    limits = prompts.limits
    return f"{prompts.layout.name} with prompts of up to {limits.prompt} tokens and {limits.new_tokens} new ones"
