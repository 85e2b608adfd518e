"""One step of one layer and one row: append, attend, observe, evict, with explicit heads."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.reference.base import Array, Observed, Policy, Query, Ranking, View, lowest


def rotate(x: Array, position: Array, theta: float) -> Array:
    """RoPE in Hugging Face's half-split layout: x [n, ..., D] turned to `position` [n]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-np.arange(half) / half)  # [D/2]
    angle = position[:, None] * frequency  # [n, D/2]
    angle = angle.reshape(len(position), *[1] * (x.ndim - 2), half)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@dataclass
class Head:
    """The live slots of one KV head, in ascending order of position; nothing else is stored.

    `evict_gap` is the smallest relative gap of any choice made so far (of whom to evict, or of whom
    a scope protects), `above_gap` the smallest |m - uniform share| seen by the `above` statistic:
    below float32's rounding, a float32 implementation may fairly choose otherwise.
    """

    key: Array  # [S, D], rotated at the true position unless positions="cache"
    value: Array  # [S, D]
    position: Array  # [S]
    stats: dict[str, Array] = field(default_factory=dict)  # [S, ...]
    evict_gap: float = math.inf
    above_gap: float = math.inf
    queries: list[Query] = field(default_factory=list)
    rounds: dict[Any, Any] = field(default_factory=dict)
    hidden: dict[int, Array] = field(default_factory=dict)  # position -> [E]
    out: Array | None = None  # [G, D, E]
    stands_for: dict[int, list[tuple[Array, Array]]] = field(default_factory=dict)  # position -> keys and values


def empty_heads(count: int, head_dim: int, policy: Policy) -> list[Head]:
    """The cache of one layer and row before its first token."""
    return [
        Head(
            key=np.zeros((0, head_dim)),
            value=np.zeros((0, head_dim)),
            position=np.zeros(0, np.int64),
            stats={name: np.zeros((0, *s.width)) for name, s in policy.statistics.items()},
        )
        for _ in range(count)
    ]


def step(
    heads: list[Head],
    query: Array,
    key: Array,
    value: Array,
    position: Array,
    *,
    policy: Policy,
    budget: int | None,
    prompt_length: int,
    theta: float,
    layer: int = 0,
    hidden: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Steps n tokens through one layer's cache, in place.

    Args:
        heads: the K KV heads of this layer and row.
        query: [n, H, D]; key, value: [n, K, D]; all before RoPE.
        position: [n] true positions.
        budget: slots that may remain per head; None evicts nothing in this step.
        layer: its index.
        hidden: [n, E], the input of the projections, for policies that look at it.
        out: [H * D, E], the projection of the output, likewise.

    Returns:
        The attention output, [n, H, D].
    """
    if policy.positions == "original":
        query, key = rotate(query, position, theta), rotate(key, position, theta)
    group = query.shape[1] // len(heads)
    outputs = []
    for index, head in enumerate(heads):
        append(head, key[:, index], value[:, index], position)
        if hidden is not None:
            head.hidden |= dict(zip(position.tolist(), hidden, strict=True))
        if out is not None:
            head.out = out.reshape(len(heads), group, -1, out.shape[1])[index]
        own_queries = query[:, index * group : (index + 1) * group]  # [n, G, D]
        remember(head, own_queries, position, policy, theta)
        probabilities, sees = attend(head, own_queries, position, policy, theta)
        if policy.hides is not None:
            probabilities, sees = hide(head, own_queries, position, policy, theta, budget)
        outputs.append(np.einsum("gns,sd->ngd", probabilities, head.value))
        reduce = np.mean if policy.group_reduce == "mean" else np.max
        block = Observed(reduce(probabilities, axis=0), sees, position, prompt_length, head.position)
        observe(head, block, policy)
        if policy.hides == "masked":
            allow(head, policy, budget)
    if budget is not None:
        evict(heads, policy, budget, prompt_length, theta, layer)
    return np.concatenate(outputs, axis=1)


def append(head: Head, key: Array, value: Array, position: Array) -> None:
    """Adds n slots; their statistics start at 0."""
    head.key = np.concatenate([head.key, key])
    head.value = np.concatenate([head.value, value])
    head.position = np.concatenate([head.position, position])
    for name, old in head.stats.items():
        head.stats[name] = np.concatenate([old, np.zeros((len(position), *old.shape[1:]))])


def remember(head: Head, query: Array, position: Array, policy: Policy, theta: float | None) -> None:
    """Adds the queries [n, G, D] of a step, which are rotated unless positions="cache"."""
    turned = unturned = query
    if theta is not None and policy.positions == "original":
        unturned = rotate(query, -position, theta)
    elif theta is not None:
        turned = rotate(query, position, theta)
    head.queries += [Query(int(p), r, u) for p, r, u in zip(position, turned, unturned, strict=True)]


def recent_of(policy: Policy, budget: int) -> int:
    return budget // 2 if policy.hidden_recent is None else policy.hidden_recent


def hide(head: Head, query: Array, position: Array, policy: Policy, theta: float, budget: int) -> tuple[Array, Array]:
    """Returns the result of `attend` when some slots are hidden from the queries."""
    recent = recent_of(policy, budget)
    if policy.hides == "masked":
        seen = (head.stats["allowed"] > 0) | (head.position >= position[0])
        return attend(head, query, position, policy, theta, np.broadcast_to(seen, (len(position), len(seen))))
    # The whole text is here, and so what each of its queries pays each token under plain attention.
    reduce = np.mean if policy.group_reduce == "mean" else np.max
    paid = reduce(attend(head, query, position, policy, theta)[0], axis=0)  # [n, S]
    heavy = (heavy_of_all if policy.hides == "global" else heavy_so_far)(head, paid, budget - recent)
    band = head.position[None, :] > position[:, None] - recent
    return attend(head, query, position, policy, theta, band | heavy)


def heavy_of_all(head: Head, paid: Array, count: int) -> Array:
    """[S] bool: the largest column sums over all queries of the text."""
    light, gap = lowest(paid.sum(axis=0), head.position, max(paid.shape[1] - count, 0))
    head.evict_gap = min(head.evict_gap, gap)
    heavy = np.ones(paid.shape[1], bool)
    heavy[light] = False
    return heavy


def heavy_so_far(head: Head, paid: Array, count: int) -> Array:
    """[n, S] bool: for query t the count - 1 largest A among the earlier tokens, and its own; no other gets A again."""
    total = paid[:count].sum(axis=0)
    heavy = np.tril(np.ones(paid.shape, bool))  # the first queries see every token before them
    for t in range(count, len(paid)):
        light, gap = lowest(total[:t], head.position[:t], max(t - max(count - 1, 0), 0))
        head.evict_gap = min(head.evict_gap, gap)
        heavy[t, light] = False
        total = np.where(heavy[t], total + paid[t], 0.0)
    return heavy


def allow(head: Head, policy: Policy, budget: int) -> None:
    """Who is seen by the next step, and whose score is forgotten."""
    recent, newest = recent_of(policy, budget), head.position[-1]
    older = head.position <= newest - recent
    scores = head.stats["mass"]
    light, gap = lowest(scores[older], head.position[older], max(int(older.sum()) - (budget - recent), 0))
    head.evict_gap = min(head.evict_gap, gap)
    heavy = older.copy()
    heavy[np.flatnonzero(older)[light]] = False
    # Counting the token to come, one less of the present ones is among the newest.
    head.stats["allowed"] = (heavy | (head.position > newest + 1 - recent)).astype(float)
    head.stats["mass"] = np.where(heavy | ~older, scores, 0.0)


def attend(
    head: Head, query: Array, position: Array, policy: Policy, theta: float, shown: Array | None = None
) -> tuple[Array, Array]:
    """Softmax weights [G, n, S] of n queries over the slots they see, and `sees` [n, S]; `shown`: those alone."""
    keys = head.key
    if policy.positions == "cache":
        ranks = np.arange(len(head.position))  # slots are in ascending order of position
        keys = rotate(keys, ranks, theta)
        query = rotate(query, np.searchsorted(head.position, position), theta)
    sees = head.position[None, :] <= position[:, None]
    if shown is not None:
        sees = sees & shown
    scores = np.einsum("ngd,sd->gns", query, keys) / math.sqrt(keys.shape[-1])
    if "log_weight" in head.stats:
        scores = scores + head.stats["log_weight"]
    for standing, tokens in head.stands_for.items():
        scores = scores + np.where(head.position == standing, math.log(len(tokens)), 0.0)
    scores = np.where(sees, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True), sees


def observe(head: Head, block: Observed, policy: Policy) -> None:
    """Updates the statistics of every live slot with this block's columns."""
    for name, statistic in policy.statistics.items():
        head.stats[name] = statistic.update(head.stats[name], block)
        if statistic.threshold is not None:
            distance = np.abs(block.m - statistic.threshold)[block.sees]
            head.above_gap = min([head.above_gap, *distance.tolist()])
        if name == "above":
            seen = block.sees.sum(axis=1, keepdims=True)  # [n, 1]
            contested = block.sees & (seen > 1)  # a query alone has m = 1 exactly
            distance = np.abs(block.m - 1.0 / seen)[contested]
            head.above_gap = min([head.above_gap, *distance.tolist()])


def evict(
    heads: list[Head], policy: Policy, budget: int, prompt_length: int, theta: float | None = None, layer: int = 0,
    first: int = 0,
) -> None:  # fmt: skip
    """Removes the lowest priorities until `budget` slots are live in every head.

    All heads are ranked before any is changed: a policy may look at the whole layer.
    `theta`: the base of RoPE's frequencies; None: keys are not rotated.
    `layer`: its index; `first`: the index of the first of these heads.
    """
    if policy.by_head is not None:
        for index, (head, (own, slots)) in enumerate(zip(heads, budget, strict=True)):
            evict([head], own, slots, prompt_length, theta, layer, index)
        return
    if policy.rank is None:
        return
    layer_stats = [dict(head.stats) for head in heads]
    views = [
        _view(head, layer_stats, budget, prompt_length, policy, theta)._replace(layer=layer, head=first + index)
        for index, head in enumerate(heads)
    ]
    if policy.shares is not None and prompt_length > budget:
        choices = policy.shares(views)
    else:
        kept = _kept if policy.page == 1 else functools.partial(_kept_pages, page=policy.page)
        choices = []
        for view in views:
            limit = budget + (view.position < prompt_length).sum() if policy.beyond_prompt else budget
            # A head that is not due is not ranked and keeps all that it holds; pages have a rule of their own.
            if policy.bounded:
                limit = min(limit, int((policy.rank(view).priority > -np.inf).sum()))
            due = policy.page > 1 or len(view.position) >= limit + policy.every
            everything = (np.ones(len(view.position), bool), math.inf)
            choices.append(kept(policy.rank(view), view.position, limit) if due else everything)
    for head, view, (keep, gap) in zip(heads, views, choices, strict=True):
        if policy.fits is not None and not keep.all():
            head.value, head.stats["log_weight"] = policy.fits(view, keep)
        if policy.folds is not None and not keep.all():
            head.key, head.value, close = policy.folds(view, keep)
            head.evict_gap = min(head.evict_gap, close)
        if policy.compensates is not None and not keep.all():
            compensate(head, keep, policy.compensates)
        head.key, head.value = head.key[keep], head.value[keep]
        head.position = head.position[keep]
        head.stats = {name: stat[keep] for name, stat in head.stats.items()}
        head.evict_gap = min(head.evict_gap, gap)


def _view(
    head: Head,
    layer_stats: list[dict[str, Array]],
    budget: int,
    prompt_length: int,
    policy: Policy,
    theta: float | None,
) -> View:
    turned = unturned = head.key
    if theta is not None and policy.positions == "original":
        unturned = rotate(head.key, -head.position, theta)
    elif theta is not None:
        turned = rotate(head.key, head.position, theta)
    return View(
        head.position, head.key, head.value, head.stats, layer_stats, budget, prompt_length, unturned, turned,
        tuple(head.queries), theta, rounds=head.rounds, out=head.out,
        hidden=np.array([head.hidden[p] for p in head.position.tolist()]) if head.hidden else None,
    )  # fmt: skip


def compensate(head: Head, keep: Array, position: int) -> None:
    """The slot of `position` becomes the mean of its own pair and of all that was ever evicted."""
    (slot,) = np.flatnonzero(head.position == position)
    tokens = head.stands_for.setdefault(position, [(head.key[slot], head.value[slot])])
    tokens += [(head.key[gone], head.value[gone]) for gone in np.flatnonzero(~keep)]
    head.key, head.value = head.key.copy(), head.value.copy()
    head.key[slot], head.value[slot] = (np.mean(pairs, axis=0) for pairs in zip(*tokens, strict=True))


def _kept(ranking: Ranking, position: Array, budget: int) -> tuple[Array, float]:
    """[S] bool: all but the lowest priorities, and the narrowest decision on the way there."""
    keep = np.ones(len(position), bool)
    excess = len(position) - budget
    if excess <= 0:
        return keep, math.inf
    victims, gap = lowest(ranking.priority, position, excess)
    if np.isposinf(ranking.priority[victims]).any():
        raise ValueError(f"the policy protects more than its budget of {budget} slots")
    keep[victims] = False
    return keep, min(ranking.gap, gap, _rounding_gap(ranking, keep))


def _kept_pages(ranking: Ranking, position: Array, budget: int, page: int) -> tuple[Array, float]:
    """[S] bool: all but the pages of lowest worth.

    The i-th kept token is in page i // p, since none but the newest page is ever short. A page is worth its best slot.
    """
    limit, keep, gap = budget // page * page, np.ones(len(position), bool), ranking.gap
    worth = {u: ranking.priority[u * page : (u + 1) * page].max() for u in range((len(position) - 1) // page)}
    while keep.sum() > limit:
        order = sorted(worth, key=lambda u: (worth[u], u))
        lowest_page, gone = order[0], worth[order[0]]
        if len(order) > 1 and gone != worth[order[1]] and not np.isposinf(worth[order[1]]):
            gap = min(gap, (worth[order[1]] - gone) / max(abs(gone), abs(worth[order[1]])))
        keep[lowest_page * page : (lowest_page + 1) * page] = False
        del worth[lowest_page]
    return keep, float(min(gap, math.inf))


def _rounding_gap(ranking: Ranking, keep: Array) -> float:
    """The smallest distance of a priority from where it would be rounded otherwise and another slot be evicted."""
    if ranking.distance is None:
        return math.inf
    finite = np.where(np.isinf(ranking.priority), 0.0, ranking.priority)
    room = np.where(keep, -1, 1) * np.abs(finite) * ranking.unit
    lowest_kept, highest_evicted = ranking.priority[keep].min(initial=np.inf), ranking.priority[~keep].max()
    moved = ranking.priority + room
    return float(ranking.distance[np.where(keep, moved <= highest_evicted, moved >= lowest_kept)].min(initial=np.inf))
