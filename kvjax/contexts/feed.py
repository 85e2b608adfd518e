"""The programs that copy rows of a cache, feed tokens to the copies, and change the size of their arrays."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from kvjax.cache.groups import Phase
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.resize import resized
from kvjax.cache.state import EMPTY, Block, KVState, Layer, LayerKV
from kvjax.generation import compiling
from kvjax.generation.prefill import GroupBudgets
from kvjax.generation.program import program
from kvjax.models.bound import BoundDecoder, bind
from kvjax.models.config import DecoderConfig
from kvjax.parallel import host_memory
from kvjax.parallel.sharding import Params

Array = jax.Array
How = Literal["blocks", "steps"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How tokens are fed.

    Attributes:
      held: the groups of heads of each layer between the calls.
      during: the same while tokens are fed, with room for the tokens of a block.
      how: in blocks of `block` tokens, or one token at a time in as many steps as the longest row has tokens.
      block: the number of tokens of a block.
      is_prompt: whether the view of a policy has the tokens as part of the prompt.
      compresses: whether slots are evicted at the end of the tokens as at the end of a prompt, by their queries alone.
    """

    held: Phase
    during: Phase
    how: How
    block: int
    is_prompt: bool
    compresses: bool = False


def _feed(
    params: Params,
    state: KVState,
    logits: Array,
    rows: Array | None,
    tokens: Array,
    lengths: Array,
    real: Array | None,
    budget: GroupBudgets | None = None,
    turn_budget: GroupBudgets | None = None,
    *,
    config: DecoderConfig,
    plan: Plan,
) -> tuple[Array, KVState]:
    """Feeds tokens to copies of rows of a cache, or to the rows themselves.

    Args:
      params: of the decoder.
      state: the cache.
      logits: [B, V] float32, those of the cache's newest tokens.
      rows: [R] int32, the row that each copy is of; None = the rows themselves.
      tokens: [R, n] int32; in blocks, n is a multiple of the block.
      lengths: [R] int32, the number of tokens of each; a row without a token is only copied.
      real: [R] bool; the other copies are padding, and hold nothing afterwards. None with `rows`.
      budget: of the copies, see `KVState`; None = those of the rows.
      turn_budget: the same while the tokens are fed; None = `budget`.
      config: the decoder.
      plan: how tokens are fed.

    Returns:
      The logits after the last token of each, [R, V] float32, and the copies.
    """
    compiling.traced()
    stacked = stacked_runs(state.layers)
    # [R, V]
    before, kv = (logits, state) if rows is None or real is None else _copied(state, logits, rows, real)
    end = kv.length + lengths
    kv = kv.replace(
        prompt=jnp.where((lengths > 0) & plan.is_prompt, end, kv.prompt), total=jnp.maximum(kv.total, end)
    )  # fmt: skip
    if budget is not None:
        kv = kv.replace(budget=budget)
    after = kv.budget
    if turn_budget is not None:
        kv = kv.replace(budget=turn_budget)
    decoder = bind(config, params)
    kv = resized_state(kv, plan.held, plan.during, fresh=plan.compresses)
    runs = decoder.runs_now(kv, plan.during)
    kv, decoder = arranged_state(kv, runs), decoder.looped(runs)
    kv, last = _fed(decoder, kv, tokens, lengths, plan)
    # [R, V]
    newest = jnp.where((lengths > 0)[:, None], decoder.logits(last), before)
    kv = resized_state(kv, plan.during, plan.held, fresh=plan.compresses).replace(budget=after)
    return newest, arranged_state(kv, stacked)


feed_copies = program(static_argnames=("config", "plan"))(_feed)
feed_rows = program(static_argnames=("config", "plan"), donate_argnames=("state",))(_feed)  # instead of copies of them


def _fed(decoder: BoundDecoder, kv: KVState, tokens: Array, lengths: Array, plan: Plan) -> tuple[KVState, Array]:
    """Feeds tokens [R, n] of rows of lengths [R]; returns the cache, and the last hidden state of each row, [R, E]."""
    rows, width = tokens.shape
    start, step = kv.length, plan.block if plan.how == "blocks" else 1
    # [step]
    inside = jnp.arange(step, dtype=jnp.int32)

    def feed(first: Array | int, kv: KVState, last: Array | None, ids: Array) -> tuple[KVState, Array]:
        """Feeds the tokens from number `first` on, [R, step], and updates the last hidden states."""
        # [R, step]
        at = first + inside
        position = jnp.where(at < lengths[:, None], start[:, None] + at, -1)
        turn = start if plan.compresses else None
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget, turn=turn)
        # [R, step, E]
        x, kv = decoder.hidden(ids, kv, block, plan.during)
        # [R]: the row's last token in the block
        index = jnp.clip(lengths - 1 - first, 0, step - 1)
        # [R, E]
        newest = jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
        return kv, newest if last is None else jnp.where((lengths > first)[:, None], newest, last)

    if plan.how == "blocks" and width == step:
        return feed(0, kv, None, tokens)
    # [R, E]
    last = jnp.zeros((rows, decoder.config.embed_size), decoder.dtype)

    def body(number: Array, carry: tuple[KVState, Array]) -> tuple[KVState, Array]:
        first = number * step
        # [R, step]
        ids = jax.lax.dynamic_slice_in_dim(tokens, first, step, axis=1)
        return feed(first, *carry, ids)

    made: tuple[KVState, Array] = jax.lax.fori_loop(0, -(-jnp.max(lengths) // step), body, (kv, last))
    return made


@program()
def copy_rows(state: KVState, logits: Array, rows: Array, real: Array) -> tuple[Array, KVState]:
    """Copies rows of a cache; for the arguments see `feed_copies`."""
    return _copied(state, logits, rows, real)


def _copied(state: KVState, logits: Array, rows: Array, real: Array) -> tuple[Array, KVState]:
    kv: KVState = jax.tree.map(lambda leaf: host_memory.take_rows(leaf, rows), state)
    layers = jax.tree.map(lambda group: _emptied(group, real), kv.layers, is_leaf=lambda x: isinstance(x, LayerKV))
    return host_memory.take_rows(logits, rows), kv.replace(length=jnp.where(real, kv.length, 0), layers=layers)


@program(static_argnames=("before", "after"))
def resize(state: KVState, *, before: Phase, after: Phase) -> KVState:
    """Moves a cache into arrays of other sizes; see `resized_state`."""
    return resized_state(state, before, after)


def resized_state(state: KVState, before: Phase, after: Phase, *, fresh: bool = False) -> KVState:
    """Moves a cache into the arrays of other groups, for more or fewer tokens than those before.

    Args:
      state: the cache.
      before: its groups of heads.
      after: the others.
      fresh: whether statistics and memories are those of `after`, and begin anew.
    """
    if not fresh and all(
        one.slots == two.slots and one.storage == two.storage
        for pair in zip(before, after, strict=True) for one, two in zip(*pair, strict=True)
    ):  # fmt: skip
        return state
    # Layers that are alike in few slots need not be in more.
    stacked = tuple(run for run in stacked_runs(state.layers) if len({after[index] for index in run.layers}) == 1)
    layers = tuple(
        Layer(
            resized(own, old, new, state.length, fresh=fresh) for own, old, new in zip(layer, olds, news, strict=True)
        )
        for layer, olds, news in zip(arranged_state(state, ()).layers, before, after, strict=True)
    )
    return arranged_state(state.replace(layers=layers), stacked)


def _emptied(layer: LayerKV, real: Array) -> LayerKV:
    """Returns slots, of a layer or of a stack of layers, without those of the rows that are not real, [B] bool."""
    # [B, 1, 1] or [B, 1, 1, 1]
    mask = real.reshape(-1, *(1,) * (layer.position.ndim - 1))
    return layer.replace(position=jnp.where(mask, layer.position, EMPTY))
