"""The jitted loop of rounds: levels draft, the target verifies, and rows go on at their own lengths.

Every level has fed its first ``state.length`` tokens, and the text holds what is known or drafted after them. So a
level that is behind, as one all of whose drafts were accepted, feeds what it lacks before it chooses. All shapes are
those of the most that a round can draft, so that one trace serves whatever is accepted.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.cache.cut import cut
from kvjax.cache.layer_stack import LayerRuns, arranged_state, stacked_runs
from kvjax.cache.state import Block, KVState
from kvjax.cache.step.interface import AttentionOperands
from kvjax.generation import compiling
from kvjax.generation.program import program
from kvjax.models.bound import bind, logprob_of
from kvjax.numerics.finite import PAD
from kvjax.parallel.sharding import Params
from kvjax.speculation import slot_copies
from kvjax.speculation.drafting import accept_drafts, align_logits, propose
from kvjax.speculation.levels import LevelCache, begin_round, truncate
from kvjax.speculation.loop_state import Carry, Draft, Plan, Run, Verification, count_round, empty_draft_logits, put

Array = jax.Array


@program(static_argnames=("plan",), donate_argnames=("carry",))
def run_rounds(
    params: tuple[Params, ...],
    carry: Carry,
    stop: Array,
    most: Array,
    rounds: Array | int,
    budgets: slot_copies.GroupBudgets | None,
    *,
    plan: Plan,
) -> Carry:
    """Runs rounds until every row has ended.

    Args:
      params: of the target, and of other models.
      carry: of the loop; donated.
      stop: [n] int32, token ids that end a row.
      most: int32, the number of new tokens of a row.
      rounds: int32, the largest number of rounds.
      budgets: slots that a policy ranks highest, see `slot_copies.copy_by_policy`; None if no level does so.
      plan: the loop.
    """
    compiling.traced()

    def ongoing(count: Array, carry: Carry) -> Array:
        return (count < rounds) & jnp.any(carry.active)

    run = Run(plan, params, carry.start, carry.keys)
    return loop_rounds(run, carry, stop[None], most, budgets, ongoing)[1]


def loop_rounds(
    run: Run,
    carry: Carry,
    stop: Array,
    most: Array,
    budgets: slot_copies.GroupBudgets | None,
    ongoing: Callable[[Array, Carry], Array],
) -> tuple[Array, Carry]:
    """Runs rounds within a program.

    Args:
      run: of the loop.
      carry: of the loop.
      stop: [B, n] int32, token ids that end each row, or [1, n] for those of every row.
      most: [B] int32, the number of new tokens of each row, or [] for that of every row.
      budgets: see `run_rounds`.
      ongoing: (the number of rounds so far, the carry) -> [] bool, whether another one is run.

    Returns:
      The number of rounds, [] int32, and the carry.
    """
    plan, params = run.plan, run.params
    stacked = [stacked_runs(state.layers) for state in _states(carry)]
    phases = [plan.verify, *(level.phase for level in plan.levels if not level.copies)]
    models = [(plan.config, params[0])]
    models += [(level.config, params[level.model]) for level in plan.levels if not level.copies]
    runs = [
        bind(*model).runs_now(state, phase) for model, state, phase in zip(models, _states(carry), phases, strict=True)
    ]

    def body(loop: tuple[Array, Carry]) -> tuple[Array, Carry]:
        return loop[0] + 1, _round(run, loop[1], stop, most, budgets)

    start = (jnp.int32(0), _arrange(carry, runs))
    count, carry = jax.lax.while_loop(lambda loop: ongoing(*loop), body, start)
    return count, _arrange(carry, stacked)


def _states(carry: Carry) -> list[KVState]:
    return [carry.state, *(each[0] for each in carry.caches if each is not None)]


def _arrange(carry: Carry, runs: list[LayerRuns]) -> Carry:
    """Returns the carry whose caches have the layers of some runs in stacks; see `arranged_state`."""
    rest = iter(runs[1:])
    caches = tuple(None if each is None else (arranged_state(each[0], next(rest)), each[1]) for each in carry.caches)
    return carry._replace(state=arranged_state(carry.state, runs[0]), caches=caches)


def _round(run: Run, carry: Carry, stop: Array, most: Array, budgets: slot_copies.GroupBudgets | None) -> Carry:
    """Runs one round of the target; for the arguments see `loop_rounds`."""
    plan, gamma = run.plan, run.plan.levels[0].gamma
    # [B] each
    due = jnp.where(carry.active, most - carry.made, 0)
    known, before = run.start + carry.made, carry.state.length
    state, text, caches = _begin_levels(run, carry, known, due, budgets)
    want = jnp.minimum(due, gamma)
    draft = propose(run, 0, Draft(text, empty_draft_logits(run, 0), caches, carry.counts), known, want)
    # [B, γ]
    places = jnp.arange(gamma + 1, dtype=jnp.int32)
    drafted = run.tokens_at(draft.text, known[:, None] + places[:gamma])
    # The last new token is not fed.
    end = run.start + most - 1
    verify = _verify_one_by_one if plan.scan else _verify
    verification, logits, state, operands, position = verify(
        run, state, carry.logits, draft, drafted, known, jnp.where(due > 0, jnp.minimum(known + gamma, end), 0), stop
    )
    # [B, γ + 1]
    logprobs = logprob_of(logits, verification.tokens)
    finite = jnp.isfinite(logprobs)
    ends = jnp.any(verification.tokens[..., None] == stop[:, None], axis=2)
    count = jnp.minimum(verification.accepted + 1, due)
    # [B]: tokens to the first stop, and before the first token whose log-probability is not finite
    to_stop, to_broken = (_first_true(mask, gamma + 1) for mask in (ends, ~finite))
    stopped, broken = to_stop + 1 <= jnp.minimum(count, to_broken), to_broken < jnp.minimum(count, to_stop + 1)
    reached = jnp.where(stopped, to_stop + 1, due)
    count = jnp.where(stopped, to_stop + 1, jnp.where(broken, to_broken, count))
    # The token that is not finite is `PAD`, and its log-probability is there for the error.
    tokens = jnp.where(finite, verification.tokens, PAD)
    written = count + broken.astype(jnp.int32)
    text = put(draft.text, carry.made, written, tokens)
    scores = put(carry.logprobs, carry.made, written, logprobs)
    accepted = jnp.minimum(verification.accepted, reached)
    counts = count_round(draft.counts, 0, reached, accepted, due > 0)
    number = counts[0].rounds - 1
    rows = jnp.arange(len(due))
    by_round = carry.by_round.at[rows, jnp.where(due > 0, number, carry.by_round.shape[1])].set(accepted, mode="drop")
    made = carry.made + count
    # The newest token is not fed; that before a token which is not finite is.
    length = jnp.maximum(run.start + made - jnp.where(broken, 0, 1), before)
    if operands is not None:
        verified = jnp.where(position < length[:, None], position, -1)
        state = slot_copies.update_statistics(state, operands, verified, plan.decode, plan.config)
    state = cut(state, length)
    if (choosing := plan.selecting) is not None:
        state = slot_copies.update_index(state, before, gamma + 1, choosing)
    after = [truncate(each, length) for each in draft.caches]
    kept = tuple(
        None if level.copies else (cache.state, cache.logits) for level, cache in zip(plan.levels, after, strict=True)
    )
    active = carry.active & ~stopped & ~broken & (made < most)
    return carry._replace(
        state=state, text=text, logprobs=scores, made=made, active=active, caches=kept, counts=counts,
        by_round=by_round,
    )  # fmt: skip


def _first_true(mask: Array, otherwise: int) -> Array:
    """Returns the index of the first True of each row, [B, n] bool -> [B] int32; `otherwise` if there is none."""
    index = jnp.arange(mask.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(mask, index, otherwise), axis=1)


def _begin_levels(
    run: Run, carry: Carry, known: Array, due: Array, budgets: slot_copies.GroupBudgets | None
) -> tuple[KVState, Array, tuple[LevelCache, ...]]:
    """Begins a round: copies slots for levels that read the target's cache.

    Returns:
      The target's cache, the text and the caches of levels.
    """
    state, text, caches = carry.state, carry.text, []
    for index, (level, cache) in enumerate(zip(run.plan.levels, carry.caches, strict=True)):
        if cache is not None:
            caches.append(begin_round(level, *cache))
        elif not level.selects:
            assert budgets is not None and level.choosing is not None
            copies = slot_copies.copy_by_policy(level.config, state, level.choosing, budgets, level.phase, level.tail)
            caches.append(LevelCache(copies, carry.logits))
        else:
            # The logits after a prompt are known: a first token is chosen, and chooses the slots.
            fresh = (state.length == known) & (due > 0)
            first = run.sample(index, carry.logits[:, None], known[:, None])
            text = put(text, carry.made, fresh.astype(jnp.int32), first)
            token = run.tokens_at(text, state.length[:, None])[:, 0]
            # A prompt's only new token is not fed.
            feeding = (due > 0) & (~fresh | (due > 1))
            decoder = bind(level.config, run.params[0])
            assert level.choosing is not None
            logits, copies, state = slot_copies.copy_by_selection(
                decoder, state, token, feeding, level.choosing, level.phase, level.tail
            )
            caches.append(LevelCache(copies, logits, first_draft_logits=carry.logits))
    return state, text, tuple(caches)


# The decision, logits [B, γ + 1, V], the cache, operands of attention, and the positions that were fed.
Verified = tuple[Verification, Array, KVState, dict[int, tuple[AttentionOperands, ...]] | None, Array]


def _verify(
    run: Run, state: KVState, earlier: Array, draft: Draft, drafted: Array, known: Array, end: Array, stop: Array
) -> Verified:
    """Feeds the drafts to the target as a block.

    Args:
      run: of the loop.
      state: the target's cache.
      earlier: [B, V], the logits after each prompt.
      draft: of the round.
      drafted: [B, γ] int32.
      known: [B] int32, the number of known tokens.
      end: [B] int32, the position before which tokens are fed; 0 for a row that has ended.
      stop: not used.
    """
    plan, count = run.plan, drafted.shape[1] + 1
    behind = known - state.length
    # [B, γ + 1]
    position = state.length[:, None] + jnp.arange(count, dtype=jnp.int32)
    position = jnp.where(position < end[:, None], position, -1)
    decoder = bind(plan.config, run.params[0]).looped(stacked_runs(state.layers))
    block = Block(position=position, prompt=state.prompt, total=state.total, budget=state.budget)
    tokens, operands = run.tokens_at(draft.text, position), None
    if plan.observes:
        x, state, operands = decoder.observed(tokens, state, block, plan.verify)
    else:
        x, state = decoder.hidden(tokens, state, block, plan.verify)
    logits = align_logits(earlier, decoder.logits(x), behind, count)
    return accept_drafts(run, -1, logits, draft.draft_logits, drafted, known), logits, state, operands, position


def _verify_one_by_one(
    run: Run, state: KVState, earlier: Array, draft: Draft, drafted: Array, known: Array, end: Array, stop: Array
) -> Verified:
    """Does what `_verify` does by the steps of plain generation, so that no refused draft is fed."""
    plan, count = run.plan, drafted.shape[1] + 1
    decoder = bind(plan.config, run.params[0]).looped(stacked_runs(state.layers))
    rows = jnp.arange(len(known))

    def body(place: Array, loop: tuple[KVState, Array, Array, Array]) -> tuple[KVState, Array, Array, Array]:
        kv, text, logits, going = loop
        at = known + place
        feeding = going & (kv.length < at) & (kv.length < end)
        # [B, 1]
        position = jnp.where(feeding, kv.length, -1)[:, None]
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
        x, kv = decoder.hidden(run.tokens_at(text, position), kv, block, plan.step)
        newest = jnp.where(feeding[:, None], decoder.logits(x[:, 0]), earlier)
        logits = logits.at[:, place].set(newest)
        verification = accept_drafts(run, -1, logits, draft.draft_logits, drafted, known)
        token = verification.tokens[:, place]
        ended = jnp.any(token[:, None] == stop, axis=1) | ~jnp.isfinite(logprob_of(newest, token))
        return kv, text, logits, going & (verification.accepted > place) & ~ended

    logits = jnp.zeros((len(rows), count, earlier.shape[1]), jnp.float32)
    loop = (state, draft.text, logits, end > 0)
    state, _, logits, _ = jax.lax.fori_loop(0, count, body, loop)
    return (
        accept_drafts(run, -1, logits, draft.draft_logits, drafted, known),
        logits,
        state,
        None,
        jnp.zeros((len(rows), 0), jnp.int32),
    )
