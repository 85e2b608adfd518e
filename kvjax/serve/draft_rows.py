"""The rows that serve requests in rounds of drafts, and the jitted functions that admit requests to them and decode.

A round is that of `kvjax.speculation.rounds`. What differs between requests is data of a row, as in
`kvjax.serve.decode_loop`: stop tokens, the most new tokens, sampling, and the slots that a policy ranks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.state import KVState
from kvjax.generation import compiling
from kvjax.generation.decoding import CHUNK
from kvjax.generation.program import program
from kvjax.numerics.finite import PAD
from kvjax.parallel import host_memory
from kvjax.parallel.sharding import Params
from kvjax.serve.decode_loop import Chunk, DraftCounts, Entry, chunk_continues
from kvjax.serve.sampling import Settings, choose_block
from kvjax.serve.swap import put_row
from kvjax.speculation.loop_state import Carry, Counts, Keys, Plan, Run
from kvjax.speculation.rounds import loop_rounds
from kvjax.speculation.slot_copies import GroupBudgets

Array = jax.Array


class DraftRows(NamedTuple):
    """The carry of the rows. The first dimension of every leaf is the number of rows, R.

    Attributes:
      carry: of the loop of rounds. A row's first token is chosen in its first round.
      most: [R] int32, the number of new tokens of each row's request.
      stop: [R, n] int32, token ids that end the row's request, `PAD` where there are fewer.
      sampling: the settings of each row's sampler.
      reported: [R] int32, the number of new tokens that the host has.
      budgets: slots that a policy ranks highest, [R] per layer and group of heads; None if a selection drafts.
    """

    carry: Carry
    most: Array
    stop: Array
    sampling: Settings
    reported: Array
    budgets: GroupBudgets | None


@program(static_argnames=("rows", "width", "gamma"))
def empty_rows(
    state: KVState, logits: Array, entry: Entry, budgets: GroupBudgets | None, *, rows: int, width: int, gamma: int
) -> DraftRows:
    """Makes rows without requests.

    Args:
      state: any cache in the arrays of the decoding phase; its content is of no matter.
      logits: [P, V] float32, of any prompts.
      entry: any request.
      budgets: [1] int32 each, of any request.
      rows: the number of rows.
      width: the number of tokens after a prompt that there is room for, drafts included.
      gamma: the number of drafts of a round.
    """
    # [R]
    none = jnp.zeros((rows,), jnp.int32)
    made = _begun(state, logits, none, entry, budgets, width=width, gamma=gamma)
    return made._replace(carry=made.carry._replace(active=jnp.zeros((rows,), bool)))


@program(donate_argnames=("rows",))
def admit(
    rows: DraftRows,
    state: KVState,
    logits: Array,
    source: Array,
    row: Array,
    entry: Entry,
    budgets: GroupBudgets | None,
) -> DraftRows:
    """Replaces one row by a request whose prompt has been run.

    Args:
      rows: the rows; donated.
      state: the caches of some prompts; not donated.
      logits: [P, V] float32 after these prompts.
      source: int32, which of the prompts.
      row: int32, the row to replace.
      entry: the request.
      budgets: [1] int32 each, of the request; see `DraftRows`.
    """
    width, gamma = rows.carry.text.shape[1], rows.carry.counts[0].drafted.shape[1]
    return put_row(rows, row, _begun(state, logits, source[None], entry, budgets, width=width, gamma=gamma))


def _begun(
    state: KVState,
    logits: Array,
    source: Array,
    entry: Entry,
    budgets: GroupBudgets | None,
    *,
    width: int,
    gamma: int,
) -> DraftRows:
    """Returns rows before their first tokens, one for each of the prompts `source`, [n] int32; see `admit`."""
    count = source.shape[0]

    def many(x: Array) -> Array:
        return jnp.broadcast_to(x, (count, *x.shape))

    # Drafts look at the arrays of layers one by one.
    held = arranged_state(jax.tree.map(lambda leaf: host_memory.take_rows(leaf, source), state), ())
    # [n]
    none, keys = jnp.zeros((count,), jnp.int32), many(jax.random.fold_in(entry.key, entry.number))
    # [n, γ]
    no_drafts = jnp.zeros((count, gamma), jnp.int32)
    carry = Carry(
        state=held, logits=host_memory.take_rows(logits, source), text=jnp.full((count, width), PAD, jnp.int32),
        logprobs=jnp.zeros((count, width), jnp.float32), made=none, active=jnp.ones((count,), bool), start=held.length,
        keys=Keys(keys, (), (), ()), caches=(None,), counts=(Counts(none, no_drafts, no_drafts),),
        by_round=jnp.full((count, width), -1, jnp.int32),
    )  # fmt: skip
    return DraftRows(
        carry=carry, most=many(entry.max_new_tokens), stop=many(entry.stop),
        sampling=jax.tree.map(many, entry.sampling), reported=none,
        budgets=jax.tree.map(lambda each: jnp.broadcast_to(each, (count,)), budgets),
    )  # fmt: skip


@program(static_argnames=("plan", "min_row_steps"), donate_argnames=("rows",))
def decode_chunk(
    params: Params,
    rows: DraftRows,
    going_on: Array,
    rounds: Array,
    idle: Array,
    *,
    plan: Plan,
    min_row_steps: int,
) -> tuple[DraftRows, Chunk]:
    """Runs rounds until `rounds` of them are run, every request has ended, or enough rows are idle.

    Args:
      params: of the decoder.
      rows: the rows; donated.
      going_on: [R] bool, whether each row's request has not been ended by the host.
      rounds: int32, the most rounds, at most `CHUNK`.
      idle: see `kvjax.serve.decode_loop.decode_chunk`.
      plan: the loop of rounds, of one level that reads the target's cache.
      min_row_steps: see `kvjax.serve.decode_loop.decode_chunk`.
    """
    compiling.traced()
    before = rows.carry.counts[0]
    carry = rows.carry._replace(active=rows.carry.active & going_on)
    run = Run(plan, (params,), carry.start, carry.keys, functools.partial(choose_block, rows.sampling))

    def ongoing(taken: Array, carry: Carry) -> Array:
        return chunk_continues(taken, rounds, carry.active, idle, carry.counts[0].rounds - before.rounds, min_row_steps)

    taken, carry = loop_rounds(run, carry, rows.stop, rows.most, rows.budgets, ongoing)
    # [R, W]: no chunk has more tokens, and that one whose log-probability is not finite
    width = min(carry.text.shape[1], CHUNK * (plan.levels[0].gamma + 1) + 1)
    index = rows.reported[:, None] + jnp.arange(width, dtype=jnp.int32)
    tokens, logprobs = (
        jnp.take_along_axis(each, jnp.minimum(index, each.shape[1] - 1), axis=1)
        for each in (carry.text, carry.logprobs)
    )
    tokens = jnp.where(index < carry.made[:, None], tokens, PAD)
    logprobs = jnp.where(index <= carry.made[:, None], logprobs, 0.0)
    after = carry.counts[0]
    drafted, accepted = jnp.sum(after.drafted - before.drafted), jnp.sum(after.accepted - before.accepted)
    chunk = Chunk(tokens, logprobs, carry.active, taken, after.rounds - before.rounds, DraftCounts(drafted, accepted))
    return rows._replace(carry=carry, reported=carry.made), chunk
