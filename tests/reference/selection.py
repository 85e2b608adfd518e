"""Selections in float64 NumPy: one row, token by token, written from the definitions.

A text of T tokens has query [T, G, D], key and value [T, D]. Its first `prompt` tokens go in at once; every later token
is a step, in which the query of the token reads some of the tokens that are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Text(NamedTuple):
    """The results of a text; `gap` is the smallest difference between two slots of which one was chosen.

    A difference of logits where these are ranked, relative where probabilities are.
    """

    output: Array  # [T, G, D]
    read: Array  # [T, T] bool, which tokens each query read
    chosen: Array  # [T, T] bool
    gap: float


class Choice(NamedTuple):
    chosen: Array  # positions
    always: Array  # positions, the new token's among them
    gap: float = math.inf


Choose = Callable[[Array, Array, Array], Choice]  # query [G, D], key [n, D], position [n]; the last is the new token


def attend(query: Array, key: Array, scale: float) -> Array:
    """Softmax [G, n] of query [G, D] over keys [n, D]."""
    logits = scale * query @ key.T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def top(worth: Array, age: Array, count: int, *, logits: bool = False) -> tuple[Array, float]:
    """Indices of the `count` largest, of equal ones the newer (larger `age`), and the gap to the next.

    An exact tie, settled by age, is not a close call.
    """
    order = np.lexsort((age, worth))[::-1]
    if not 0 < count < len(order):
        return order[: max(count, 0)], math.inf
    last, following = worth[order[count - 1]], worth[order[count]]
    if last == following:
        return order[:count], math.inf
    return order[:count], float((last - following) / (1 if logits else max(abs(last), abs(following))))


# --- selections of one head that remember nothing ---


def optimal(n: int, scale: float, window: int | None = None) -> Choose:
    """The n tokens of largest probability."""

    def choose(query: Array, key: Array, position: Array) -> Choice:
        new = position[-1]
        inside = np.ones(len(position), bool) if window is None else position > new - window
        probability = attend(query, key[inside], scale).mean(axis=0)
        candidates = position[inside][:-1]
        best, gap = top(probability[:-1], candidates, n)
        return Choice(candidates[best], position[-1:], gap)

    return choose


# --- selections that remember something, or look at all heads of a layer ---


class Look:
    """The reads of the decoding steps of one row of one layer; an object for each row.

    `held` are the positions that each KV head holds, ascending; the last of them is the new token's. `key` has theirs.
    """

    exact = True  # whether it ranks keys as they were before they were coded

    def begin(self, query: Array, key: Array, plain: Array) -> None:
        """The whole prompt: query [n, K, G, D], key [n, K, D], and the same before it was rotated."""

    def observe(self, head: int, probability: Array, held: Array, position: Array) -> None:
        """Probabilities [n, S] of queries at `position` [n] on the slots of a head, the means of its group."""

    def choose(self, query: Array, key: list[Array], held: list[Array]) -> list[Choice]:
        """One choice for each KV head, for query [K, G, D]."""
        raise NotImplementedError

    def restored(self, head: int, position: Array) -> Array | None:
        """Keys [n, D] of chosen positions that are computed instead of read; None: they are read."""
        return None

    def mixed(self, head: int, output: Array, value: Array) -> Array:
        """The output [G, D] of a head with what is added to attention, for the values [S, D] of all held tokens."""
        return output


class EachHead(Look):
    """A selection of one head, for each head."""

    def __init__(self, choose: Choose, exact: bool = False):
        self.one, self.exact = choose, exact

    def choose(self, query: Array, key: list[Array], held: list[Array]) -> list[Choice]:
        return [self.one(*each) for each in zip(query, key, held, strict=True)]


def split(held: Array, sinks: int, recent: int) -> tuple[Array, Array]:
    """Candidates and what is always read, of which the new token is the last; `recent` does not count it."""
    old = held[:-1]
    always = np.isin(old, np.concatenate([old[:sinks], old[max(len(old) - recent, 0) :]]))
    return old[~always], np.append(old[always], held[-1])


class InfiniGen(Look):
    """A guess of the query over some columns of the keys; `choose` is given the guess.

    Args:
        skew: [K, D, D]; None: the identity.
    """

    def __init__(self, scale, alpha, ratio=0.3, cap=0.2, columns="sum", sinks=0, recent=0, skew=None, window=None):
        self.scale, self.alpha, self.ratio, self.cap = scale, alpha, ratio, cap
        self.kind, self.sinks, self.recent, self.skew, self.window = columns, sinks, recent, skew, window
        self.columns: list[list[int]] = []
        self.counts: list[int] = []  # n of each step
        self.gap = math.inf

    def turned(self, x: Array, head: int) -> Array:
        return x if self.skew is None else x @ self.skew[head].astype(np.float64)

    def largest(self, sums: Array) -> list[int]:
        """The r largest columns, of equal ones the lower."""
        count = math.ceil(self.ratio * len(sums) - 1e-9)
        order = sorted(range(len(sums)), key=lambda d: (-sums[d], d))
        if count < len(order):
            last, following = sums[order[count - 1]], sums[order[count]]
            if last != following:
                self.gap = min(self.gap, (last - following) / last)
        return order[:count]

    def begin(self, query: Array, key: Array, plain: Array) -> None:
        for head in range(key.shape[1]):
            of_query = np.abs(self.turned(query[:, head], head)).sum(axis=0).mean(axis=0)
            of_key = np.abs(self.turned(key[:, head], head)).sum(axis=0)
            match self.kind:
                case "sum":
                    columns = set(self.largest(of_query + of_key))
                case "query":
                    columns = set(self.largest(of_query))
                case "union":
                    columns = {*self.largest(of_query), *self.largest(of_key)}
            self.columns.append(sorted(columns))

    def choose(self, query: Array, key: list[Array], held: list[Array]) -> list[Choice]:
        ranks, candidates, always, passed, gaps = [], [], [], 0, [self.gap]
        for head, own in enumerate(held):
            those, read = split(own, self.sinks, self.recent)
            if self.window is not None:
                those, read = (x[x > own[-1] - self.window] for x in (those, read))
            candidates.append(those)
            always.append(read)
            if not len(those):
                ranks.append(np.zeros(0))
                continue
            columns = self.columns[head]
            keys = self.turned(key[head][np.isin(own, those)], head)[:, columns]
            score = self.scale * self.turned(query[head], head)[:, columns] @ keys.T  # [G, n]
            rank = (score - score.max(axis=1, keepdims=True)).max(axis=0)
            ranks.append(rank)
            passed += int((rank > -self.alpha).sum())
            # A slot that is the favourite of a query head has rank 0 exactly; an exact tie is not a close call.
            distance = np.abs(rank + self.alpha)
            gaps.append(distance[(rank < 0) & (distance > 0)].min(initial=math.inf))
        found = []
        for rank, those, read in zip(ranks, candidates, always, strict=True):
            among = len(those)
            cap = self.cap if isinstance(self.cap, int) else math.floor(self.cap * among + 1e-9)
            count = min(max(1, min(passed // len(held), cap)), among)
            best, gap = top(rank, those, count, logits=True)
            self.counts.append(count)
            found.append(Choice(those[best], read, min([gap, *gaps])))
        return found


class Pages(Look):
    """Pages of p consecutive kept tokens, the newest always read.

    Args:
        score: (query [G, D], keys of a page [n, D]) -> [G].
        every: the number of steps that a choice stands.
        first: the oldest page is chosen without being ranked.
    """

    def __init__(self, page, budget, score, every=1, first=False, window=None):
        self.page, self.count, self.score = page, max(3, budget // page) - 1, score
        self.every, self.first, self.window = every, first, window
        self.steps = 0
        self.stands: list[set[int]] = []  # of each head, positions that may be read until the next choice

    def choose(self, query: Array, key: list[Array], held: list[Array]) -> list[Choice]:
        due = self.steps % self.every == 0
        self.steps += 1
        if due:
            self.stands = [set() for _ in held]
        return [self.of_head(head, due, *each) for head, each in enumerate(zip(query, key, held, strict=True))]

    def of_head(self, head: int, due: bool, query: Array, key: Array, held: Array) -> Choice:
        page, stands, gap = self.page, self.stands[head], math.inf
        seen = held > (-1 if self.window is None else held[-1] - self.window)
        last = (len(held) - 1) // page
        pages = [slice(u * page, (u + 1) * page) for u in range(last) if seen[u * page : (u + 1) * page].any()]
        always = held[last * page :][seen[last * page :]]
        if due and pages:
            chosen, count, ranked = set(), self.count, list(range(len(pages)))
            if self.first:
                chosen, count, ranked = {0}, count - 1, ranked[1:]
            if ranked:
                score = np.array([self.score(query, key[pages[u]]) for u in ranked])  # [pages, G]
                rank = (score - score.max(axis=0)).max(axis=1)
                best, gap = top(rank, np.array(ranked), count, logits=True)
                chosen |= {ranked[each] for each in best}
            stands |= {p for u in chosen for p in held[pages[u]].tolist()}
        # The newest page, and those that are opened until the next choice, stay read.
        stands |= set(held[last * page :].tolist())
        old = held[: last * page][seen[: last * page]]
        return Choice(old[[p in stands for p in old.tolist()]], always, gap)


def bound(scale: float, sub: int | None = None) -> Callable[[Array, Array], Array]:
    """Quest's upper bound of a page's logits, or the best of its sub-pages."""

    def of(query: Array, keys: Array) -> Array:
        size = sub or len(keys)
        parts = [keys[start : start + size] for start in range(0, len(keys), size)]
        bounds = [np.maximum(query * part.min(axis=0), query * part.max(axis=0)).sum(axis=1) for part in parts]
        return scale * np.max(bounds, axis=0)

    return of


def quest(page: int, budget: int, scale: float, window: int | None = None) -> Look:
    return Pages(page, budget, bound(scale), window=window)


def lserve(page: int, sub: int, every: int, budget: int, scale: float, window: int | None = None) -> Look:
    return Pages(page, budget, bound(scale, sub), every, window=window)


def retrieval(chunk: int, budget: int, scale: float, every: int = 1, window: int | None = None) -> Look:
    return Pages(chunk, budget, lambda query, keys: scale * query @ keys.mean(axis=0), every, first=True, window=window)


def read_in_prompt(
    query: Array, key: Array, page: int, size: int, sinks: int, recent: int, pages: int,
    score: Callable[[Array, Array], Array], over: str = "mean", window: int | None = None,
) -> tuple[Array, float]:  # fmt: skip
    """The tokens [T, T] bool that each query of a prompt of one KV head reads, and the smallest gap of a choice.

    Blocks of `size` queries [T, G, D] read the `sinks` oldest and the `recent` newest pages before them, and the
    `pages` pages of the others whose `score`, the mean or the maximum over the block's queries, is the largest.
    """
    length = len(query)
    read, gaps = np.zeros((length, length), bool), [math.inf]
    for start in range(0, length, size):
        last, queries = start // page, range(start, min(start + size, length))
        always = [u for u in range(last) if u < sinks or u >= last - recent]
        inside = [u for u in range(last) if window is None or (u + 1) * page - 1 > start - window]
        candidates = np.array([u for u in inside if u not in always], int)
        chosen = candidates[:0]
        if len(candidates) and pages:
            each = [[score(query[at], key[u * page : (u + 1) * page]) for u in candidates] for at in queries]
            scores = np.mean(each, axis=0) if over == "mean" else np.max(each, axis=0)  # [candidates, G]
            best, gap = top((scores - scores.max(axis=0)).max(axis=1), candidates, pages, logits=True)
            chosen = candidates[best]
            gaps.append(gap)
        old = np.isin(np.arange(length) // page, [*always, *chosen])
        for at in queries:
            seen = old | (np.arange(length) >= start)
            seen &= (np.arange(length) <= at) & (np.arange(length) > at - (window or length))
            read[at] = seen
    return read, min(gaps)


class TokenSelect(Look):
    """The query heads of a layer vote, and all heads read the same."""

    exact = False

    def __init__(self, scale, k, sinks, recent, reuse=None, scaled=True, window=None):
        self.scale = scale if scaled else 1.0
        self.k, self.sinks, self.recent, self.reuse, self.window = k, sinks, recent, reuse, window
        self.query: Array | None = None
        self.choice: Array = np.zeros(0, int)
        self.chose = 0  # how often

    def choose(self, query: Array, key: list[Array], held: list[Array]) -> list[Choice]:
        assert all((each == held[0]).all() for each in held), "all heads hold the same positions"
        those, always = split(held[0], self.sinks, self.recent - 1)
        if self.window is not None:
            those, always = (x[x > held[0][-1] - self.window] for x in (those, always))
        gap = math.inf
        if len(those) <= self.k:
            return [Choice(those, always)] * len(held)
        stands = False
        if self.query is not None and self.reuse is not None:
            cosine = (query * self.query).sum() / np.sqrt((query**2).sum() * (self.query**2).sum())
            stands, gap = cosine >= self.reuse, abs(cosine - self.reuse)
        if not stands:
            votes = [
                attend(own, keys[np.isin(positions, those)], self.scale).mean(axis=0)
                for own, keys, positions in zip(query, key, held, strict=True)
            ]
            best, close = top(np.mean(votes, axis=0), those, self.k)
            self.choice, self.query, gap = those[best], query, min(gap, close)
            self.chose += 1
        return [Choice(those[np.isin(those, self.choice)], always, gap)] * len(held)


class ShadowKV(Look):
    """Chunks of the prompt by their mean keys; keys of chosen chunks come from a low-rank product.

    Args:
        rotate: (keys [n, D], positions [n]) -> rotated keys.
    """

    def __init__(self, scale, rotate, rank, chunk, budget, local, outliers):
        self.scale, self.rotate, self.rank, self.chunk = scale, rotate, rank, chunk
        self.count, self.local, self.outliers = budget // chunk, local, outliers
        self.landmarks: list[dict[int, Array]] = []  # of each head, chunk -> mean key
        self.gap = math.inf

    def begin(self, query: Array, key: Array, plain: Array) -> None:
        n, heads, dim = plain.shape
        u, sigma, v = np.linalg.svd(plain.reshape(n, heads * dim), full_matrices=False)
        rank = min(self.rank, len(sigma))
        if rank < len(sigma):
            self.gap = (sigma[rank - 1] - sigma[rank]) / sigma[0]
        self.product = ((u[:, :rank] * sigma[:rank]) @ v[:rank]).reshape(n, heads, dim)
        chunks = range(max(0, n // self.chunk - self.local))
        for head in range(heads):
            members = {c: key[c * self.chunk : (c + 1) * self.chunk, head] for c in chunks}
            means = {c: own.mean(axis=0) for c, own in members.items()}
            least = np.array([
                min(k @ means[c] / np.linalg.norm(k) / np.linalg.norm(means[c]) for k in members[c]) for c in chunks
            ])  # fmt: skip
            out, gap = top(-least, np.array(chunks), self.outliers)
            self.gap = min(self.gap, gap)
            self.landmarks.append({c: means[c] for c in chunks if c not in out})

    def choose(self, query: Array, key: list[Array], held: list[Array]) -> list[Choice]:
        found = []
        for own, landmarks, positions in zip(query, self.landmarks, held, strict=True):
            chunks = np.array(list(landmarks), int)
            hidden = np.isin(positions // self.chunk, chunks)
            if not len(chunks):
                found.append(Choice(np.zeros(0, int), positions))
                continue
            rank = attend(own, np.stack(list(landmarks.values())), self.scale).max(axis=0)
            best, gap = top(rank, chunks, self.count)
            chosen = positions[hidden & np.isin(positions // self.chunk, chunks[best])]
            found.append(Choice(chosen, positions[~hidden], min(gap, self.gap)))
        return found

    def restored(self, head: int, position: Array) -> Array:
        return self.rotate(self.product[position, head], position)


class Alisa(Look):
    """Half of the slots are the newest, half those to which the last `queries` queries paid the most."""

    exact = False

    def __init__(self, slots, queries=4, window=None):
        self.slots, self.queries, self.window = slots, queries, window
        self.paid: dict[tuple[int, int], dict[int, float]] = {}  # head and slot -> position of a query -> probability

    def observe(self, head: int, probability: Array, held: Array, position: Array) -> None:
        for row, at in zip(probability, position, strict=True):
            for slot, each in zip(held.tolist(), row.tolist(), strict=True):
                self.paid.setdefault((head, slot), {})[int(at)] = each

    def choose(self, query: Array, key: list[Array], held: list[Array]) -> list[Choice]:
        found = []
        for head, own in enumerate(held):
            now = own[-1]
            those, always = split(own, 0, self.slots // 2 - 1)
            if self.window is not None:
                those, always = (x[x > now - self.window] for x in (those, always))
            last = range(now - self.queries, now)
            worth = np.array([sum(self.paid.get((head, p), {}).get(t, 0.0) for t in last) for p in those.tolist()])
            best, gap = top(worth, those, self.slots - self.slots // 2)
            found.append(Choice(those[best], always, gap))
        return found


class Codebook(Look):
    """Keys are replaced by the nearest entry of a codebook of the prompt's keys."""

    def __init__(self, scale, k, codes=64, rounds=4, sinks=0, recent=1, window=None):
        self.scale, self.k, self.codes, self.rounds = scale, k, codes, rounds
        self.sinks, self.recent, self.window = sinks, recent, window
        self.books: list[Array] = []
        self.code: list[dict[int, int]] = []
        self.gap = math.inf

    def begin(self, query: Array, key: Array, plain: Array) -> None:
        flat = np.moveaxis(query, 1, 0).reshape(query.shape[1], -1, query.shape[3])
        self.metric = [own.T @ own for own in flat.astype(np.float64)]

    def nearest(self, head: int, keys: Array, book: Array) -> Array:
        difference = keys[:, None] - book[None]
        distance = np.einsum("nmd,de,nme->nm", difference, self.metric[head], difference)
        size = np.einsum("nd,de,ne->n", keys, self.metric[head], keys)
        for row, scale in zip(distance, size, strict=True):
            nearest = np.sort(np.unique(row))
            # Entries that are the same are no close call.
            differ = nearest[nearest > nearest[0] + 1e-12 * scale]
            self.gap = min([self.gap, *((differ[:1] - nearest[0]) / max(scale, 1e-300))])
            row[row <= nearest[0] + 1e-12 * scale] = nearest[0]
        return distance.argmin(axis=1)

    def made(self, head: int, keys: Array) -> Array:
        book = keys[np.arange(self.codes) * len(keys) // self.codes].astype(np.float64)
        for _ in range(self.rounds):
            code = self.nearest(head, keys, book)
            book = np.stack([keys[code == m].mean(axis=0) if (code == m).any() else book[m] for m in range(self.codes)])
        return book

    def choose(self, query: Array, key: list[Array], held: list[Array]) -> list[Choice]:
        found = []
        for head, (keys, own) in enumerate(zip(key, held, strict=True)):
            if len(self.books) <= head:
                # Everything but the new token is what was left of the prompt.
                self.books.append(self.made(head, keys[:-1]))
                self.code.append({})
            codes = self.code[head]
            unknown = [i for i, p in enumerate(own.tolist()) if p not in codes]
            for i, code in zip(unknown, self.nearest(head, keys[unknown], self.books[head]), strict=True):
                codes[int(own[i])] = int(code)
            those, always = split(own, self.sinks, self.recent - 1)
            if self.window is not None:
                those, always = (x[x > own[-1] - self.window] for x in (those, always))
            if not len(those):
                found.append(Choice(those, always, self.gap))
                continue
            table = self.scale * query[head] @ self.books[head].T
            score = table[:, [codes[p] for p in those.tolist()]]
            rank = (score - score.max(axis=1, keepdims=True)).max(axis=0)
            best, gap = top(rank, those, self.k, logits=True)
            found.append(Choice(those[best], always, min(gap, self.gap)))
        return found


class SparF(Look):
    """Slots by probabilities under r channels, the new token's among them; the mean value stands for the others."""

    exact = False

    def __init__(self, scale, r, k):
        self.scale, self.r, self.k = scale, r, k
        self.shares: list[Array] = []  # of each head, [G]

    def choose(self, query: Array, key: list[Array], held: list[Array]) -> list[Choice]:
        found, self.shares = [], []
        for own, keys, positions in zip(query, key, held, strict=True):
            size = np.abs(own).sum(axis=0)
            columns, near = top(size, -np.arange(len(size)), self.r)
            ratio = np.abs(own[:, columns]).sum(axis=1) / np.abs(own).sum(axis=1)
            logits = self.scale * own[:, columns] @ keys[:, columns].T / np.sqrt(ratio)[:, None]
            probability = np.exp(logits - logits.max(axis=1, keepdims=True))
            probability /= probability.sum(axis=1, keepdims=True)
            best, gap = top(probability.sum(axis=0), positions, self.k)
            self.shares.append(probability[:, best].sum(axis=1))
            found.append(Choice(positions[best], np.zeros(0, int), min(gap, near)))
        return found

    def mixed(self, head: int, output: Array, value: Array) -> Array:
        share = self.shares[head][:, None]
        return share * output + (1 - share) * value.mean(axis=0)


class ReKV(Look):
    """Pages by the product of their mean key with the mean query of a question, all heads of a layer side by side.

    Args:
        plain: (x [n, ..., D], positions [n]) -> the same before it was rotated.
        sinks: oldest pages that are always read; `recent` newest ones, that of the new token among them.
        question: the number of last tokens of a prompt that are its question; None: all.
    """

    def __init__(self, plain, page, pages, sinks=0, recent=1, question=None, window=None):
        self.plain, self.page, self.count, self.sinks, self.recent = plain, page, pages, sinks, recent
        self.question, self.window, self.stands, self.gap = question, window, None, math.inf

    def begin(self, query: Array, key: Array, plain: Array) -> None:
        turned = self.plain(query, np.arange(len(query)))
        self.asked = turned[-(self.question or len(query)) :].mean(axis=0)  # [K, G, D]

    def decide(self, key: list[Array], held: list[Array], before: int, newest: int) -> None:
        """Chooses of the first `before` pages, the newest token being in page `newest`."""
        pages = np.arange(self.sinks, max(self.sinks, min(before, newest - self.recent + 1)))
        keys = [self.plain(own, at) for own, at in zip(key, held, strict=True)]
        score = [
            np.mean(
                [q @ k[u * self.page : (u + 1) * self.page].mean(axis=0) for q, k in zip(self.asked, keys, strict=True)]
            )
            for u in pages
        ]
        best, self.gap = top(np.array(score), pages, self.count, logits=True)
        self.stands = set(pages[best].tolist())

    def choose(self, query: Array, key: list[Array], held: list[Array]) -> list[Choice]:
        old = [own[:-1] for own in held]
        if self.stands is None:
            last = (len(old[0]) - 1) // self.page
            self.decide([own[:-1] for own in key], old, last, last)
        page = np.arange(len(held[0])) // self.page
        always = (page < self.sinks) | (page > page[-1] - self.recent)
        chosen = np.isin(page, [*self.stands]) & ~always
        inside = held[0] > (-1 if self.window is None else held[0][-1] - self.window)
        return [Choice(own[chosen & inside], own[always & inside], self.gap) for own in held]


class Layer(NamedTuple):
    """One row of a layer.

    Attributes:
        query: [T, K, G, D]
        key: [T, K, D] as attention takes them.
        value: [T, K, D]
        guess: [T, K, G, D] what a selection that looks ahead takes for the query.
        plain: [T, K, D] keys before they were rotated.
    """

    query: Array
    key: Array
    value: Array
    guess: Array
    plain: Array


def run_layer(layer: Layer, prompt: int, look: Look, scale: float, kept=None, window=None) -> list[Text]:
    """`run` for all heads of a layer; `kept` [K] are the positions of the prompt that each head keeps."""
    length, kv_heads, group, dim = layer.query.shape
    square = (length, length)
    texts = [
        Text(np.zeros((length, group, dim)), np.zeros(square, bool), np.zeros(square, bool), math.inf)
        for _ in range(kv_heads)
    ]
    held = [np.arange(prompt) if kept is None else np.sort(kept[head]) for head in range(kv_heads)]
    look.begin(layer.query[:prompt], layer.key[:prompt], layer.plain[:prompt])
    for at in range(length):
        if at < prompt:
            everything = np.arange(0 if window is None else max(0, at + 1 - window), at + 1)
            choices = [Choice(np.zeros(0, int), everything)] * kv_heads
        else:
            held = [np.append(own, at) for own in held]
            keys = [layer.key[own, head] for head, own in enumerate(held)]
            query = layer.guess if isinstance(look, InfiniGen) else layer.query
            choices = look.choose(query[at], keys, held)
        for head, (text, choice) in enumerate(zip(texts, choices, strict=True)):
            keys = layer.key[:, head].copy()
            restored = look.restored(head, choice.chosen) if len(choice.chosen) else None
            if restored is not None:
                keys[choice.chosen] = restored
            read = np.sort(np.concatenate([choice.chosen, choice.always]))
            text.chosen[at, choice.chosen] = True
            text.read[at, read] = True
            probability = attend(layer.query[at, head], keys[read], scale)
            look.observe(head, probability.mean(axis=0)[None], read, np.array([at]))
            text.output[at] = probability @ layer.value[read, head]
            if at >= prompt:
                text.output[at] = look.mixed(head, text.output[at], layer.value[held[head], head])
            texts[head] = text._replace(gap=min(text.gap, choice.gap))
    return texts


# --- what H2O's authors released as H2O ---


def masked(
    query: Array, key: Array, value: Array, prompt: int, budget: int, recent: int, scale: float,
    block: int | None = None,
) -> Text:  # fmt: skip
    """A query sees its own block and what was allowed after the step before."""
    length, group, dim = query.shape
    output, read = np.zeros((length, group, dim)), np.zeros((length, length), bool)
    starts = [*range(0, prompt, block or prompt), *range(prompt, length), length]
    score, allowed, gaps = np.zeros(0), np.zeros(0, bool), [math.inf]
    for start, stop in itertools.pairwise(starts):
        score = np.append(score, np.zeros(stop - start))
        allowed = np.append(allowed, np.ones(stop - start, bool))
        for at in range(start, stop):
            seen = np.flatnonzero(allowed[: at + 1])
            read[at, seen] = True
            probability = attend(query[at], key[seen], scale)
            output[at] = probability @ value[seen]
            score[seen] += probability.mean(axis=0)
        present = np.arange(stop)
        window = present >= stop - recent  # the newest among those that are present
        older = present[~window]
        best, gap = top(score[older], older, budget - recent)
        gaps.append(gap)
        heavy = np.isin(present, older[best])
        score = np.where(heavy | window, score, 0.0)
        allowed = heavy | (present >= stop + 1 - recent)  # counting the token to come
    return Text(output, read, np.zeros_like(read), min(gaps))


def in_hindsight(query: Array, key: Array, value: Array, budget: int, recent: int, scale: float) -> Text:
    """One heavy set from the column sums of the whole text, and a band."""
    length, group, dim = query.shape
    score = np.zeros(length)
    for at in range(length):
        score[: at + 1] += attend(query[at], key[: at + 1], scale).mean(axis=0)
    heavy, gap = top(score, np.arange(length), budget - recent)
    output, read = np.zeros((length, group, dim)), np.zeros((length, length), bool)
    for at in range(length):
        seen = np.array([j for j in range(at + 1) if j in heavy or at - j < recent], int)
        read[at, seen] = True
        output[at] = attend(query[at], key[seen], scale) @ value[seen]
    return Text(output, read, np.zeros_like(read), gap)


def local(query: Array, key: Array, value: Array, budget: int, recent: int, scale: float) -> Text:
    """A heavy set for each query, from the probabilities that the queries before it paid; and a band."""
    length, group, dim = query.shape
    heavy = budget - recent
    score, gaps = np.zeros(length), [math.inf]
    output, read = np.zeros((length, group, dim)), np.zeros((length, length), bool)
    for at in range(length):
        paid = attend(query[at], key[: at + 1], scale).mean(axis=0)
        if at < heavy:
            score[: at + 1] += paid
            seen = np.arange(at + 1)
        else:
            best, gap = top(score[:at], np.arange(at), heavy - 1)
            gaps.append(gap)
            mine = np.append(best, at)
            score[: at + 1] += paid
            score[[j for j in range(length) if j not in mine]] = 0.0
            seen = np.array([j for j in range(at + 1) if j in mine or at - j <= recent - 1], int)
        read[at, seen] = True
        output[at] = attend(query[at], key[seen], scale) @ value[seen]
    return Text(output, read, np.zeros_like(read), min(gaps))
