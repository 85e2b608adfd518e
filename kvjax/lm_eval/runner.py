"""Runs many requests of any lengths through few programs: scores of continuations and windows, and generated tokens."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.attention import Implementation
from kvjax.cache.planning.limits import Limits, power_of_two
from kvjax.cache.spec import CacheSpec
from kvjax.contexts import extend
from kvjax.contexts.choices import ChoiceScore, score_choices, score_prefilled
from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.generation.generate import decode, generate
from kvjax.generation.likelihood import log_likelihood
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import prepare, run_prompts
from kvjax.generation.sampling import Greedy, Sampler, penalty_of
from kvjax.lm_eval.batches import Ended, batches, bucket, ends, padded, until
from kvjax.lm_eval.beginnings import Group, groups
from kvjax.models.model import Model
from kvjax.policies.traits import is_split

Ids = Sequence[int]
SMALLEST_CHOICE = 16  # tokens that shorter continuations have arrays for


class Pair(NamedTuple):
    """A continuation to score.

    Attributes:
      context: token ids, at least one.
      continuation: token ids, at least one.
    """

    context: Ids
    continuation: Ids


@dataclasses.dataclass(frozen=True)
class Runner:
    """A model, a cache and the sizes of batches.

    Attributes:
      model: from `kvjax.load`.
      spec: policy, storage and selection.
      rows: contexts that are processed at once, and continuations that are scored at once.
      max_length: the most tokens that are fed to the model for one request.
      rolling_prompt: the share of a window that is its prompt when texts are scored under a cache that changes while
        decoding, in (0, 1]; the tokens after it are fed one at a time.
      prefill_block: see `kvjax.CacheOptions`.
      implementation: see `kvjax.CacheOptions`.
    """

    model: Model
    spec: CacheSpec
    rows: int = 1
    max_length: int = 2048
    rolling_prompt: float = 0.5
    prefill_block: int | None = None
    implementation: Implementation = "auto"

    @property
    def changes(self) -> bool:
        """Whether a text's score depends on which of its tokens are its prompt."""
        spec = self.spec
        evicts = spec.policy.budget is not None or is_split(spec.policy)
        return evicts or spec.storage.new_tokens_separate or not spec.selection.reads_all

    @property
    def _shares(self) -> bool:
        """Whether what several contexts begin with may be processed once, as if each were in one piece.

        Under a cache that changes, what is kept of a context depends on where its prompt ends.
        """
        rope = self.model.config.rope
        by_length = rope is not None and rope.scaling in ("dynamic", "longrope")
        one_shot = self.prefill_block is None
        return one_shot and not self.changes and self.spec.policy.positions == "original" and not by_length

    @property
    def window_length(self) -> int:
        """The most tokens of a window, whose last token is only scored."""
        config = self.model.config
        # `log_likelihood` feeds that token too, and a learned position table may have no position for it.
        spare = self.changes and config.learned_positions and self.max_length >= config.max_positions
        return self.max_length - (1 if spare else 0)

    def scores(
        self, pairs: Sequence[Pair], done: Callable[[int, tuple[float, bool]], None] = lambda index, answer: None
    ) -> list[tuple[float, bool]]:
        """Scores continuations. Those of one context are scored from copies of one cache.

        Under a cache that does not change, `beginnings.MEMBERS` contexts or more that begin with the same
        `beginnings.MIN_LENGTH` tokens are copies of one cache too: their beginning is processed once. Not with a
        `prefill_block`, since what follows a beginning is fed in one block.

        Args:
          pairs: what to score; contexts are truncated at their beginning to `max_length`.
          done: called with the index of a pair and its answer.

        Returns:
          For each pair the log-probability of the continuation in nats, and whether each of its tokens is the most
          probable one.

        Raises:
          InputError: a pair without a context or continuation, or a continuation longer than `max_length`.
        """
        contexts: dict[tuple[int, ...], list[int]] = {}
        for index, pair in enumerate(pairs):
            contexts.setdefault(self._fitting(pair), []).append(index)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)

        items = list(contexts.items())
        for beginning, members in self._alike(list(contexts), self._shares):
            own = [(context[len(beginning) :], indices) for context, indices in (items[number] for number in members)]
            for indices, scores in self._scores_after(beginning, own, pairs):
                for index, score in zip(indices, scores, strict=True):
                    found[index] = (score.total, score.greedy)
                    done(index, found[index])
        return found

    def _scores_after(
        self, beginning: Ids, contexts: Sequence[tuple[Ids, list[int]]], pairs: Sequence[Pair]
    ) -> Iterator[tuple[list[int], list[ChoiceScore]]]:
        """Scores the continuations of contexts that share a beginning, which is processed once.

        Args:
          beginning: token ids, or none.
          contexts: what follows the beginning, and the numbers of the continuations, for each context.
          pairs: which have the continuations.

        Yields:
          The numbers of the continuations of a context, and their scores.
        """
        if not contexts:
            return
        longest_of = {
            number: max(len(pairs[index].continuation) for index in own) for number, (_, own) in enumerate(contexts)
        }
        # Padding is saved where it would be greatest.
        long_choices = sum(longest_of.values()) > sum(len(context) for context, _ in contexts)

        def sizes(number: int) -> tuple[int, int]:
            """Contexts of one bucket are together, and among these continuations of like lengths; or the reverse."""
            length, most = len(contexts[number][0]), longest_of[number]
            # The last token of a continuation is not fed.
            return (bucket(most - 1), length) if long_choices else (bucket(length), most)

        begun = self._beginning(beginning, [len(context) for context, _ in contexts], max(longest_of.values()))
        for batch in batches(list(range(len(contexts))), self.rows, sizes):
            tokens, lengths, limit = padded(self.model, self.rows, [contexts[number][0] for number in batch])
            asked = [[pairs[index].continuation for index in contexts[number][1]] for number in batch]
            asked += [[]] * (len(tokens) - len(batch))
            if begun is not None:
                copies = extend(self.model, begun, tokens, lengths=lengths, rows=[0] * len(tokens), block=1)
                made = score_prefilled(self.model, copies, asked)
            else:
                longest = max(longest_of[number] for number in batch)
                made = score_choices(
                    self.model, tokens, asked, self.spec, lengths=lengths, options=self._options,
                    limits=Limits(prompt=limit, new_tokens=power_of_two(longest, SMALLEST_CHOICE)),
                )  # fmt: skip
            for number, scores in zip(batch, made, strict=False):
                yield contexts[number][1], scores

    def windows(self, windows: Sequence[Pair], done: Callable[[int], None] = lambda index: None) -> list[float]:
        """Scores windows of texts: the log-probability of each continuation in nats.

        If the cache changes while decoding, the first `rolling_prompt` of a window is its prompt, and the rest is fed
        one token at a time, as generated text is. Otherwise the result does not depend on it, and a window is fed in
        one block.

        Args:
          windows: the pieces of texts, each with the context that it is scored in.
          done: called with the index of a window.
        """
        if not self.changes:
            return [score for score, _ in self.scores(windows, lambda index, _: done(index))]
        found = [0.0] * len(windows)
        texts = [(index, [*self._fitting(pair), *pair.continuation]) for index, pair in enumerate(windows)]
        for batch in batches(texts, self.rows, lambda item: len(item[1])):
            tokens, lengths, _ = padded(self.model, self.rows, [text for _, text in batch])
            prompt = np.maximum(1, np.floor(lengths * self.rolling_prompt).astype(np.int32))
            longest, most = (bucket(int(each.max())) for each in (prompt, lengths - prompt))
            scored = log_likelihood(
                self.model, tokens, self.spec, prompt_length=prompt, lengths=lengths,
                limits=Limits(prompt=longest, new_tokens=most), options=self._options,
            )  # fmt: skip
            logprobs = np.asarray(scored.logprobs, np.float64)
            for (index, text), row in zip(batch, logprobs, strict=False):
                # Entry t scores token t + 1.
                found[index] = float(row[: len(text) - 1][-len(windows[index].continuation) :].sum())
                done(index)
        return found

    def texts(
        self,
        contexts: Sequence[Ids],
        *,
        new_tokens: int,
        stop: Sequence[int] = (),
        ended: Ended | Sequence[str] = (),
        sampler: Sampler = Greedy(),
        key: object = None,
        done: Callable[[int, np.ndarray], None] = lambda index, tokens: None,
    ) -> list[np.ndarray]:
        """Generates after each context.

        Args:
          contexts: token ids; truncated at their beginning so that the new tokens fit `max_length`.
          new_tokens: the most new tokens.
          stop: token ids that end a text.
          ended: texts that end a text, which may be or hold special tokens; or whether new tokens [n] contain its end.
          sampler: see `kvjax.generate`.
          key: see `kvjax.generate`.
          done: called with the index of a context and its new tokens.

        Returns:
          The new tokens of each context, [n] int32, of which some may be beyond the end that `ended` finds.

        Raises:
          InputError: an empty context, or no room for one before the new tokens.
        """
        room = self.max_length - new_tokens
        if room < 1:
            raise InputError(
                f"{new_tokens} tokens are to be generated, but max_length is {self.max_length}; lower max_gen_toks."
            )
        if any(not len(context) for context in contexts):
            raise InputError("a context has no token; give a text, or a tokenizer that begins texts with BOS.")
        found: list[np.ndarray] = [np.zeros(0, np.int32)] * len(contexts)
        cut = [tuple(context)[-room:] for context in contexts]
        # A penalty counts the tokens of whole contexts.
        shares = self._shares and penalty_of(sampler) is None
        for beginning, members in self._alike(cut, shares):
            own = [(index, cut[index][len(beginning) :]) for index in members]
            begun = self._beginning(beginning, [len(context) for _, context in own], new_tokens)
            for batch in batches(own, self.rows, lambda item: len(item[1])):
                tokens, lengths, limit = padded(self.model, self.rows, [context for _, context in batch])
                spare = len(tokens) - len(batch)
                options: dict[str, Any] = {
                    "max_new_tokens": new_tokens, "stop": stop, "sampler": sampler, "key": key,
                    "until": until(self._ended(ended, [cut[i] for i, _ in batch]), len(batch), spare),
                    "requests": [*(index for index, _ in batch), *[0] * spare],
                }  # fmt: skip
                if begun is not None:
                    copies = extend(self.model, begun, tokens, lengths=lengths, rows=[0] * len(tokens), block=1)
                    made = decode(self.model, copies, **options)
                else:
                    made = generate(
                        self.model, tokens, self.spec, lengths=lengths,
                        limits=Limits(prompt=limit, new_tokens=new_tokens), **options, options=self._options,
                    )  # fmt: skip
                for (index, _), row, length in zip(batch, made.tokens, made.lengths, strict=False):
                    found[index] = row[:length]
                    done(index, found[index])
        return found

    def answers(
        self,
        contexts: Sequence[Ids],
        questions: Sequence[Sequence[Ids]],
        *,
        new_tokens: int,
        stop: Sequence[int] = (),
        ended: Ended | Sequence[str] = (),
        done: Callable[[int, int, np.ndarray], None] = lambda context, question, tokens: None,
    ) -> list[list[np.ndarray]]:
        """Answers questions about contexts greedily. A context is processed once, before its questions are known.

        Args:
          contexts: token ids; truncated at their beginning so that question and answer fit `max_length`.
          questions: for each context its questions, token ids, each at least one.
          new_tokens: the most new tokens of an answer.
          stop: see `texts`.
          ended: see `texts`.
          done: called with the index of a context, that of a question about it, and the answer's tokens.

        Returns:
          For each context the answers to its questions, [n] int32, as `texts`.

        Raises:
          InputError: an empty context or question, or no room for a context before a question and its answer.
        """
        if any(not len(context) for context in contexts) or any(not len(each) for own in questions for each in own):
            raise InputError("a context or a question has no token; give at least one of each.")
        found: list[list[np.ndarray]] = [[np.zeros(0, np.int32)] * len(own) for own in questions]
        cut = []
        for index, (context, own) in enumerate(zip(contexts, questions, strict=True)):
            longest = max((len(each) for each in own), default=0)
            if (room := self.max_length - new_tokens - longest) < 1:
                raise InputError(
                    f"a question has {longest} tokens and {new_tokens} are to be generated, but max_length is "
                    f"{self.max_length}; shorten them."
                )
            if own:
                cut.append((index, list(context)[-room:], longest))
        for batch in batches(cut, self.rows, lambda item: (bucket(len(item[1])), item[2])):
            tokens, lengths, limit = padded(self.model, self.rows, [context for _, context, _ in batch])
            begun = self._begun(tokens, lengths, [longest for *_, longest in batch], new_tokens, limit)
            asked = [
                (row, index, number) for row, (index, *_) in enumerate(batch) for number in range(len(questions[index]))
            ]
            # Questions of like lengths are answered together.
            asked.sort(key=lambda each: -len(questions[each[1]][each[2]]))
            for start in range(0, len(asked), self.rows):
                part = asked[start : start + self.rows]
                ids, sizes, _ = padded(self.model, self.rows, [questions[index][number] for _, index, number in part])
                spare = len(ids) - len(part)
                copies = extend(
                    self.model, begun, ids, lengths=sizes, rows=[*(row for row, *_ in part), *[part[0][0]] * spare],
                    block=1,
                )  # fmt: skip
                before = [questions[index][number] for _, index, number in part]
                made = decode(
                    self.model, copies, max_new_tokens=new_tokens, stop=stop,
                    until=until(self._ended(ended, before), len(part), spare),
                )  # fmt: skip
                for (_, index, number), row, length in zip(part, made.tokens, made.lengths, strict=False):
                    found[index][number] = row[:length]
                    done(index, number, found[index][number])
        return found

    def _ended(self, ended: Ended | Sequence[str], prompts: Sequence[Ids]) -> list[Ended] | None:
        """For each row of a batch, whether its new tokens contain the end of its text; None if none ends so."""
        if callable(ended):
            return [ended] * len(prompts)
        if not ended:
            return None
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise InputError("the model has no tokenizer, which stop strings need; give token ids as stop.")
        return [ends(tokenizer, ended, prompt) for prompt in prompts]

    @staticmethod
    def _alike(contexts: Sequence[tuple[int, ...]], shares: bool) -> list[Group]:
        """Groups contexts by what they begin with, if it may be shared."""
        return groups(contexts) if shares else [Group((), list(range(len(contexts))))]

    def _beginning(self, beginning: Ids, following: Sequence[int], new_tokens: int) -> Context | None:
        """Processes what contexts begin with, if they do, with room for what follows it in each, and new tokens."""
        if not len(beginning):
            return None
        tokens, lengths, limit = padded(self.model, self.rows, [beginning])
        return self._begun(tokens, lengths, [max(following)], new_tokens, limit)

    def _begun(
        self, tokens: np.ndarray, lengths: np.ndarray, questions: Sequence[int], new_tokens: int, limit: int
    ) -> Context:
        """Processes contexts, with room for the longest question about each, in tokens, and for an answer."""
        following = np.ones(len(lengths), np.int32)
        following[: len(questions)] = questions
        following += new_tokens
        limits = Limits(prompt=limit, new_tokens=power_of_two(max(questions), SMALLEST_CHOICE) + new_tokens)
        # [B]: the last new token is not fed
        total = lengths + following - 1
        with self.model.on_mesh():
            prepared = prepare(
                self.model, self.spec, lengths, total, width=tokens.shape[1],
                options=dataclasses.replace(self._options, limits=limits), last_fed=False,
            )  # fmt: skip
            logits, _, state = run_prompts(self.model, tokens, lengths, total, prepared, score=False)
        return Context(logits, state, prepared.layout)

    @property
    def _options(self) -> CacheOptions:
        return CacheOptions(prefill_block=self.prefill_block, implementation=self.implementation)

    def _fitting(self, pair: Pair) -> tuple[int, ...]:
        """The end of a context that is fed with its continuation, whose last token is not fed."""
        if not len(pair.context) or not 0 < len(pair.continuation) <= self.max_length:
            raise InputError(
                f"a request has {len(pair.context)} tokens of context and {len(pair.continuation)} to score; give "
                f"at least one of each, and at most max_length={self.max_length} to score."
            )
        return tuple(pair.context)[-(self.max_length + 1 - len(pair.continuation)) :]
