"""The drafts of a round: the last level chooses tokens, and every other one verifies those of the next."""

import jax
import jax.numpy as jnp

from kvjax.generation.sampling import Greedy, Sampler
from kvjax.speculation import rules
from kvjax.speculation.levels import Feed, fed, returned
from kvjax.speculation.loop_state import Draft, Run, Verdict, counted, folded, laws_of, put

Array = jax.Array


def propose(run: Run, level: int, draft: Draft, known: Array, want: Array) -> Draft:
    """Drafts `want` tokens, [B] int32, after the first `known` of each row, [B] int32, at a level."""
    feed = draft.feeds[level]
    # [B]: a level may have fed the first token already, which it chose from the target's logits
    count = jnp.minimum(jnp.maximum(feed.state.length - known, 0), want)
    laws = draft.laws
    if feed.early is not None and laws.shape[2]:
        laws = laws.at[:, 0].set(jnp.where((count > 0)[:, None], feed.early, 0.0))
    count, draft = _choose(run, level, draft._replace(laws=laws), known, count, want)
    further = _draft_one if level + 1 == len(run.plan.levels) else _draft_round

    def unfinished(loop: tuple[Array, Draft]) -> Array:
        return jnp.any(loop[0] < want)

    def body(loop: tuple[Array, Draft]) -> tuple[Array, Draft]:
        return further(run, level, loop[1], known, loop[0], want)

    return jax.lax.while_loop(unfinished, body, (count, draft))[1]


def _choose(run: Run, level: int, draft: Draft, known: Array, count: Array, want: Array) -> tuple[Array, Draft]:
    """Chooses the next token of rows whose logits after all of their tokens are there; returns the new counts too."""
    feed, rows = draft.feeds[level], jnp.arange(len(known))
    ready = (count < want) & (feed.state.length == known + count)
    token = run.choose(level, feed.logits[:, None], (known + count)[:, None])
    text = put(draft.text, known + count - run.start, ready.astype(jnp.int32), token)
    laws = draft.laws
    if laws.shape[2]:
        laws = laws.at[rows, jnp.where(ready, count, laws.shape[1])].set(feed.logits, mode="drop")
    return count + ready.astype(jnp.int32), draft._replace(text=text, laws=laws)


def _draft_one(run: Run, level: int, draft: Draft, known: Array, count: Array, want: Array) -> tuple[Array, Draft]:
    """Feeds a token, and chooses the next one; the level is the last one."""
    plan, feed = run.plan.levels[level], draft.feeds[level]
    # [B, 1]
    position = jnp.where(count < want, feed.state.length, -1)[:, None]
    _, feed = fed(plan, run.params[plan.model], feed, run.tokens(draft.text, position), position)
    return _choose(run, level, _with_feed(draft, level, feed), known, count, want)


def _with_feed(draft: Draft, level: int, feed: Feed) -> Draft:
    return draft._replace(feeds=(*draft.feeds[:level], feed, *draft.feeds[level + 1 :]))


def _draft_round(run: Run, level: int, draft: Draft, known: Array, count: Array, want: Array) -> tuple[Array, Draft]:
    """Runs a round in which the next level drafts, and this one verifies."""
    plan, inner = run.plan.levels[level], run.plan.levels[level + 1]
    # [B] each
    due, at = jnp.maximum(want - count, 0), known + count
    asked = jnp.minimum(due, inner.gamma)
    below = propose(run, level + 1, draft._replace(laws=laws_of(run, level + 1)), at, asked)
    feed = below.feeds[level]
    places = jnp.arange(inner.gamma + 1, dtype=jnp.int32)
    drafted = run.tokens(below.text, at[:, None] + places[:-1])
    # A level may be behind by two tokens: one that it drafted last, and one that was chosen after it.
    width = jnp.arange(inner.gamma + 2, dtype=jnp.int32)
    end = jnp.where(due > 0, at + jnp.minimum(asked, due - 1), 0)
    position = feed.state.length[:, None] + width
    position = jnp.where(position < end[:, None], position, -1)
    behind, earlier = at - feed.state.length, feed.logits
    logits, feed = fed(plan, run.params[plan.model], feed, run.tokens(below.text, position), position)
    # [B, γ + 1, V]
    logits = at_places(earlier, logits, behind, inner.gamma + 1)
    verdict = decide(run, level, logits, below.laws, drafted, at)
    gained = jnp.minimum(verdict.accepted + 1, due)
    text = put(below.text, at - run.start, gained, verdict.tokens)
    laws = draft.laws
    if laws.shape[2]:
        rows = jnp.arange(len(due))[:, None]
        index = jnp.where(places < gained[:, None], count[:, None] + places, laws.shape[1])
        laws = laws.at[rows, index].set(logits, mode="drop")
    counts = counted(below.counts, level + 1, due, verdict.accepted, due > 0)
    feeds = list(below.feeds)
    feeds[level] = feed
    # Rows that have their tokens are left as they are.
    length = jnp.where(due > 0, at + gained - 1, jnp.iinfo(jnp.int32).max)
    for number in range(level, len(feeds)):
        feeds[number] = returned(feeds[number], length)
    return count + gained, Draft(text, laws, tuple(feeds), counts)


def at_places(earlier: Array, logits: Array, behind: Array, count: int) -> Array:
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


def decide(run: Run, level: int, logits: Array, laws: Array, drafted: Array, known: Array) -> Verdict:
    """Decides which drafts of the next level a level accepts.

    Args:
      run: of the loop.
      level: the level that verifies; -1 = the target.
      logits: [B, γ + 1, V], the level's own.
      laws: [B, γ, V], those that drafts were drawn from, or [B, γ, 0].
      drafted: [B, γ] int32.
      known: [B] int32, the position of the first draft.
    """
    inner, places = run.plan.levels[level + 1], jnp.arange(logits.shape[1], dtype=jnp.int32)
    position = known[:, None] + places
    if inner.accept == "shared":
        # [B, γ + 1]
        choice = run.choose(level, logits, position)
        return Verdict(choice, rules.accept_shared(drafted, choice)[0])
    p, q = law_of(run.sampler(level), logits), law_of(inner.sampler, laws)
    u = jax.vmap(jax.vmap(jax.random.uniform))(folded(run.keys.accept[level + 1], position[:, :-1]))
    outcome = rules.accept_ratio(p, q, drafted, u)
    keys = folded(run.keys.rest[level + 1], (known + outcome.accepted)[:, None])[:, 0]
    token = jax.vmap(jax.random.categorical)(keys, jnp.log(outcome.law)).astype(jnp.int32)
    tokens = jnp.where(places == outcome.accepted[:, None], token[:, None], jnp.pad(drafted, ((0, 0), (0, 1))))
    return Verdict(tokens, outcome.accepted)


def law_of(sampler: Sampler, logits: Array) -> Array:
    """Returns the law of a sampler's choices, [..., V] float32, for logits [..., V]."""
    rows = logits.reshape(-1, logits.shape[-1])
    if isinstance(sampler, Greedy):
        law = jax.nn.one_hot(sampler(rows, None), rows.shape[1], dtype=jnp.float32)
    else:
        law = jax.nn.softmax(sampler.filter(rows), axis=-1)
    return law.reshape(logits.shape)
