"""The drafts of a round: the last level chooses tokens, and every other one verifies those of the next."""

import jax
import jax.numpy as jnp

from kvjax.generation.sampling import Greedy, Sampler
from kvjax.speculation import rules
from kvjax.speculation.levels import LevelCache, feed, truncate
from kvjax.speculation.loop_state import (
    Draft,
    Run,
    Verification,
    count_round,
    empty_draft_logits,
    fold_in_positions,
    put,
)

Array = jax.Array


def propose(run: Run, level: int, draft: Draft, known: Array, want: Array) -> Draft:
    """Drafts `want` tokens, [B] int32, after the first `known` of each row, [B] int32, at a level."""
    cache = draft.caches[level]
    # [B]: a level may have fed the first token already, which it chose from the target's logits
    count = jnp.minimum(jnp.maximum(cache.state.length - known, 0), want)
    draft_logits = draft.draft_logits
    if cache.first_draft_logits is not None and draft_logits.shape[2]:
        draft_logits = draft_logits.at[:, 0].set(jnp.where((count > 0)[:, None], cache.first_draft_logits, 0.0))
    count, draft = _choose(run, level, draft._replace(draft_logits=draft_logits), known, count, want)
    further = _draft_one if level + 1 == len(run.plan.levels) else _draft_round

    def unfinished(loop: tuple[Array, Draft]) -> Array:
        return jnp.any(loop[0] < want)

    def body(loop: tuple[Array, Draft]) -> tuple[Array, Draft]:
        return further(run, level, loop[1], known, loop[0], want)

    return jax.lax.while_loop(unfinished, body, (count, draft))[1]


def _choose(run: Run, level: int, draft: Draft, known: Array, count: Array, want: Array) -> tuple[Array, Draft]:
    """Chooses the next token of rows whose logits after all of their tokens are there; returns the new counts too."""
    cache, rows = draft.caches[level], jnp.arange(len(known))
    ready = (count < want) & (cache.state.length == known + count)
    token = run.sample(level, cache.logits[:, None], (known + count)[:, None])
    text = put(draft.text, known + count - run.start, ready.astype(jnp.int32), token)
    draft_logits = draft.draft_logits
    if draft_logits.shape[2]:
        index = jnp.where(ready, count, draft_logits.shape[1])
        draft_logits = draft_logits.at[rows, index].set(cache.logits, mode="drop")
    return count + ready.astype(jnp.int32), draft._replace(text=text, draft_logits=draft_logits)


def _draft_one(run: Run, level: int, draft: Draft, known: Array, count: Array, want: Array) -> tuple[Array, Draft]:
    """Feeds a token, and chooses the next one; the level is the last one."""
    plan, cache = run.plan.levels[level], draft.caches[level]
    # [B, 1]
    position = jnp.where(count < want, cache.state.length, -1)[:, None]
    _, cache = feed(plan, run.params[plan.model], cache, run.tokens_at(draft.text, position), position)
    return _choose(run, level, _with_cache(draft, level, cache), known, count, want)


def _with_cache(draft: Draft, level: int, cache: LevelCache) -> Draft:
    return draft._replace(caches=(*draft.caches[:level], cache, *draft.caches[level + 1 :]))


def _draft_round(run: Run, level: int, draft: Draft, known: Array, count: Array, want: Array) -> tuple[Array, Draft]:
    """Runs a round in which the next level drafts, and this one verifies."""
    plan, inner = run.plan.levels[level], run.plan.levels[level + 1]
    # [B] each
    due, at = jnp.maximum(want - count, 0), known + count
    asked = jnp.minimum(due, inner.gamma)
    below = propose(run, level + 1, draft._replace(draft_logits=empty_draft_logits(run, level + 1)), at, asked)
    cache = below.caches[level]
    places = jnp.arange(inner.gamma + 1, dtype=jnp.int32)
    drafted = run.tokens_at(below.text, at[:, None] + places[:-1])
    # A level may be behind by two tokens: one that it drafted last, and one that was chosen after it.
    width = jnp.arange(inner.gamma + 2, dtype=jnp.int32)
    end = jnp.where(due > 0, at + jnp.minimum(asked, due - 1), 0)
    position = cache.state.length[:, None] + width
    position = jnp.where(position < end[:, None], position, -1)
    behind, earlier = at - cache.state.length, cache.logits
    logits, cache = feed(plan, run.params[plan.model], cache, run.tokens_at(below.text, position), position)
    # [B, γ + 1, V]
    logits = align_logits(earlier, logits, behind, inner.gamma + 1)
    verification = accept_drafts(run, level, logits, below.draft_logits, drafted, at)
    gained = jnp.minimum(verification.accepted + 1, due)
    text = put(below.text, at - run.start, gained, verification.tokens)
    draft_logits = draft.draft_logits
    if draft_logits.shape[2]:
        rows = jnp.arange(len(due))[:, None]
        index = jnp.where(places < gained[:, None], count[:, None] + places, draft_logits.shape[1])
        draft_logits = draft_logits.at[rows, index].set(logits, mode="drop")
    counts = count_round(below.counts, level + 1, due, verification.accepted, due > 0)
    caches = list(below.caches)
    caches[level] = cache
    # Rows that have their tokens are left as they are.
    length = jnp.where(due > 0, at + gained - 1, jnp.iinfo(jnp.int32).max)
    for number in range(level, len(caches)):
        caches[number] = truncate(caches[number], length)
    return count + gained, Draft(text, draft_logits, tuple(caches), counts)


def align_logits(earlier: Array, logits: Array, behind: Array, count: int) -> Array:
    """Returns the logits from which tokens of `count` places are chosen, [B, count, V].

    Args:
      earlier: [B, V], those after the newest token that was fed before.
      logits: [B, n, V], those after each token that was fed now.
      behind: [B] int32, the number of them before the first place.
      count: the number of places.
    """
    every = jnp.concatenate([earlier[:, None], logits], axis=1)
    index = jnp.minimum(behind[:, None] + jnp.arange(count, dtype=jnp.int32), every.shape[1] - 1)
    return jnp.take_along_axis(every, index[..., None], axis=1)


def accept_drafts(
    run: Run, level: int, logits: Array, draft_logits: Array, drafted: Array, known: Array
) -> Verification:
    """Accepts drafts of the next level by its rule, and chooses the token after them.

    Args:
      run: of the loop.
      level: the level that verifies; -1 = the target.
      logits: [B, γ + 1, V], those of the level that verifies.
      draft_logits: [B, γ, V], those that drafts were sampled from, or [B, γ, 0] where the rule does not read them.
      drafted: [B, γ] int32.
      known: [B] int32, the position of the first draft.
    """
    inner, places = run.plan.levels[level + 1], jnp.arange(logits.shape[1], dtype=jnp.int32)
    position = known[:, None] + places
    if inner.accept == "shared":
        # [B, γ + 1]
        choice = run.sample(level, logits, position)
        return Verification(choice, rules.accept_shared(drafted, choice)[0])
    p, q = sampling_probs(run.sampler(level), logits), sampling_probs(inner.sampler, draft_logits)
    u = jax.vmap(jax.vmap(jax.random.uniform))(fold_in_positions(run.keys.accept[level + 1], position[:, :-1]))
    outcome = rules.accept_ratio(p, q, drafted, u)
    keys = fold_in_positions(run.keys.rest[level + 1], (known + outcome.accepted)[:, None])[:, 0]
    token = jax.vmap(jax.random.categorical)(keys, jnp.log(outcome.probs)).astype(jnp.int32)
    tokens = jnp.where(places == outcome.accepted[:, None], token[:, None], jnp.pad(drafted, ((0, 0), (0, 1))))
    return Verification(tokens, outcome.accepted)


def sampling_probs(sampler: Sampler, logits: Array) -> Array:
    """Returns the probabilities by which a sampler chooses, [..., V] float32, from logits [..., V]."""
    rows = logits.reshape(-1, logits.shape[-1])
    if isinstance(sampler, Greedy):
        probs = jax.nn.one_hot(sampler(rows, None), rows.shape[1], dtype=jnp.float32)
    else:
        probs = jax.nn.softmax(sampler.filter(rows), axis=-1)
    return probs.reshape(logits.shape)
