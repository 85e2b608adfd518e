"""A prompt that is run block by block, so that rows decode between its blocks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.empty import empty_layers
from kvjax.cache.layer_stack import repeated
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.lowering import Budgets
from kvjax.cache.state import Block, KVState
from kvjax.generation import layer_calls
from kvjax.generation.context import Span
from kvjax.generation.layer_calls import GroupBudgets
from kvjax.generation.program import program
from kvjax.generation.prompt_end import converted
from kvjax.generation.prompt_replay import replayed
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.parallel.sharding import Params

Array = jax.Array


class Prompt(NamedTuple):
    """A checked prompt.

    Attributes:
      tokens: [n] int32.
      total: the number of tokens that the row will hold in all.
      budgets: of one row.
      spans: how its tokens are fed, if neither in one shot nor in blocks.
    """

    tokens: np.ndarray
    total: int
    budgets: Budgets
    spans: tuple[Span, ...] | None = None


class Started(NamedTuple):
    """Prompts that have been run.

    Attributes:
      logits: [P, V] float32 after each prompt's last token.
      state: the cache of the P prompts, in the arrays of the decoding phase.
    """

    logits: Array
    state: KVState


class _Progress(NamedTuple):
    """A prompt of which some blocks have been run.

    Attributes:
      state: the cache, in the arrays of the prompt phase.
      last: [1, E], the hidden state of the last token.
    """

    state: KVState
    last: Array


class InBlocks:
    """A prompt that is run block by block.

    Attributes:
      step: tokens of a block.
      done: the number of blocks that have been dispatched, or were found.
    """

    def __init__(
        self, model: Model, layout: CacheLayout, prompt: Prompt, *, state: KVState | None = None, done: int = 0
    ):
        """Begins before the first block.

        Args:
          model: the model.
          layout: in blocks.
          prompt: the prompt.
          state: the cache after some blocks, in the arrays of the prompt phase, which is donated; None for none.
          done: the number of these blocks, fewer than all.
        """
        assert layout.block is not None
        self._model, self._layout, self.step = model, layout, layout.block
        count = -(-len(prompt.tokens) // layout.block)
        # [count, 1, step]
        self._blocks = np.zeros((count, 1, layout.block), np.int32)
        self._blocks.reshape(-1)[: len(prompt.tokens)] = prompt.tokens
        self.done, self._decode_budget = done, prompt.budgets.decode
        length, total = np.array([len(prompt.tokens)], np.int32), np.array([prompt.total], np.int32)
        if state is not None:
            # [1, E]: replaced by the next block
            self._progress = _Progress(state, jnp.zeros((1, model.config.embed_size), model.dtype))
            return
        self._progress = _empty(*model.place((length, total, prompt.budgets.prompt)), config=model.config,
                                layout=layout, dtype=model.dtype.name)  # fmt: skip

    @property
    def state(self) -> KVState:
        """The cache after the last block that was dispatched, in the arrays of the prompt phase."""
        return self._progress.state

    def advance(self) -> Started | None:
        """Dispatches the next block; returns the prompt's state after the last one."""
        model, layout = self._model, self._layout
        tokens = model.place(self._blocks[self.done])
        start = np.int32(self.done * self.step)
        run = _run_block_by_layer if layout.calls_layers else _run_block
        self._progress = run(model.params, self._progress, tokens, start, config=model.config, layout=layout)
        self.done += 1
        if self.done < len(self._blocks):
            return None
        budget = model.place(self._decode_budget)
        if layout.calls_layers:
            state, last = self._progress
            return Started(*layer_calls.finish(model.params, state, last, budget, config=model.config, layout=layout))
        tokens = model.place(self._blocks.reshape(1, -1))
        return Started(*_ended(model.params, self._progress, tokens, budget, config=model.config, layout=layout))


@program(static_argnames=("config", "layout", "dtype"))
def _empty(
    length: Array, total: Array, budget: GroupBudgets, *, config: DecoderConfig, layout: CacheLayout, dtype: str
) -> _Progress:
    """Allocates the cache of a prompt of `length` tokens, [1] int32, in the arrays of the prompt phase."""
    layers = repeated(empty_layers(layout.prompt, 1, config.num_kv_heads, config.head_dim, dtype), layout.runs)
    # [1]
    seen = jnp.zeros((1,), jnp.int32)
    # [1, E]
    last = jnp.zeros((1, config.embed_size), dtype)
    return _Progress(KVState(layers, seen, prompt=length, total=total, budget=budget), last)


@program(static_argnames=("config", "layout"), donate_argnames=("progress",))
def _run_block(
    params: Params, progress: _Progress, tokens: Array, start: Array, *, config: DecoderConfig, layout: CacheLayout
) -> _Progress:
    """Runs the block of tokens [1, n] int32 whose first position is `start`; `progress` is donated."""
    state = progress.state
    # [n]
    position = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    # [1, n]
    position = jnp.where(position < state.prompt[:, None], position, -1)
    block = Block(position=position, prompt=state.prompt, total=state.total, budget=state.budget)
    # [1, n, E]
    x, state = bind(config, params).looped(layout.runs).hidden(tokens, state, block, layout.prompt)
    # [1, E]: of the last token of the block that is of the prompt
    last = jnp.take_along_axis(x, jnp.sum(position >= 0, axis=1)[:, None, None] - 1, axis=1)[:, 0]
    return _Progress(state, last)


def _run_block_by_layer(
    params: Params, progress: _Progress, tokens: Array, start: np.int32, *, config: DecoderConfig, layout: CacheLayout
) -> _Progress:
    """Does what `_run_block` does, by programs of single layers."""
    x, state = layer_calls.run_block(params, tokens, start, progress.state, config=config, phase=layout.prompt)
    rest = layer_calls.without_layers(params)
    last, _ = layer_calls.leave(rest, x, tokens, state.prompt, start, progress.last, config=config, score=False)
    return _Progress(state, last)


@program(static_argnames=("config", "layout"))
def _ended(
    params: Params,
    progress: _Progress,
    tokens: Array,
    decode_budget: GroupBudgets,
    *,
    config: DecoderConfig,
    layout: CacheLayout,
) -> tuple[Array, KVState]:
    """The logits after the prompt, [1, V] float32, and its cache in the arrays of the decoding phase.

    `tokens`, [1, n] int32, are those of all blocks.
    """
    decoder, state = bind(config, params).looped(layout.runs), progress.state
    if layout.replay is not None:
        state = replayed(decoder, state, tokens, layout)
    state = state.replace(layers=converted(state, layout, config, params), budget=decode_budget)
    return decoder.logits(progress.last), state
