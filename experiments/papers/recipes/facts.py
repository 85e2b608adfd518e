"""The attention that a fact in the prompt receives from the text after it, until it is asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from experiments.config import RecallConfig
from experiments.papers.parts import Lab, Part, Result
from experiments.papers.recipes.recall import DISTANCES, FULL_LENGTH, ROOM
from experiments.papers.settings import Settings
from experiments.tasks.score import make_prompts
from kvjax.analysis import retrieval_heads
from kvjax.analysis.rows import Rows
from kvjax.analysis.scan import over_tiles
from kvjax.errors import InputError
from kvjax.typing import PyTree

Array = jax.Array
ASKING = 32  # tokens of the question, at the most
QUIET, LOUD = 0.1, 0.1  # a quiet query pays a token under QUIET / visible, a loud one pays the fact over LOUD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact(Part):
    """Passkeys, with their answers: what each query after the fact pays the tokens of the passkey.

    The result has, for L layers, B prompts and H query heads, ``silent`` [L, B, H] float32, the share of the queries
    between fact and question that pay its tokens, on average, under 0.1 divided by the number of tokens that they see;
    ``quiet`` [L, B, H] int32, the most of these in a row, before a query that pays them over 0.1 together; ``paid``
    [L, B, H] float32, the most that a query of the answer pays; ``heads`` [L, K] bool, those that
    `kvjax.analysis.retrieval_heads` finds; and ``curve`` [T], what the queries of the first row pay in the head with
    the longest quiet stretch, NaN before the fact.

    Attributes:
      prompts: the number of prompts.
      length: tokens of each.
      nearest: the fewest tokens from the fact to the end of its prompt.
      farthest: the most.
    """

    prompts: int
    length: int
    nearest: int
    farthest: int

    def measure(self, lab: Lab) -> Result:
        model = lab.model(self.model)
        config = RecallConfig(
            tasks=("passkey",), prompts=self.prompts, length=self.length, nearest=self.nearest, farthest=self.farthest
        )
        asked = make_prompts(config, model, lab.settings.seed)["passkey"]
        shortest = min(prompt.answer.size for prompt in asked)
        # [B, T]
        tokens = np.stack([np.concatenate([each.tokens, each.answer[: shortest - 1]]) for each in asked])
        marks = np.stack([marked(each.tokens, each.answer[:-1], tokens.shape[1]) for each in asked])
        # The tiles may be wider than the text.
        padded = np.pad(marks, ((0, 0), (0, marks.shape[1])))
        run = over_tiles(model, tokens, None, _paid, lambda *_: (), jnp.asarray(padded))
        # [L, B, H, T]
        paid = np.asarray(run.queries)
        quiet, silent = np.zeros(paid.shape[:3], np.int32), np.zeros(paid.shape[:3], np.float32)
        for row, own in enumerate(marks):
            for layer, head in np.ndindex(paid.shape[0], paid.shape[2]):
                each = paid[layer, row, head]
                quiet[layer, row, head] = longest_quiet(each, own)
                silent[layer, row, head] = np.mean(is_quiet(each[: self.length - ASKING], own))
        layer, head = divmod(int(np.argmax(quiet.mean(axis=1))), paid.shape[2])
        last = int(np.flatnonzero(marks[0])[-1])
        curve = np.where(np.arange(paid.shape[3]) > last, paid[layer, 0, head], np.nan)
        return {
            "silent": silent, "quiet": quiet, "paid": paid[..., self.length - 1 :].max(axis=3), "curve": curve,
            "heads": retrieval_heads(model, draw_from=np.unique(tokens)),
        }  # fmt: skip


def fact(settings: Settings, *, prompts: int = 16) -> Fact:
    """A part of the scale's sizes; facts are far from the end."""
    length = settings.scale.recall
    nearest, farthest = (round(each * length / FULL_LENGTH) for each in DISTANCES["far"])
    if length < FULL_LENGTH:
        nearest, farthest = (min(each, length - ROOM) for each in (nearest, farthest))
    number = min(prompts, settings.scale.prompts)
    return Fact(prompts=number, length=length, nearest=nearest, farthest=farthest)


def marked(tokens: np.ndarray, answer: np.ndarray, width: int) -> np.ndarray:
    """Where the first occurrence of an answer's tokens in a prompt is, [width] bool.

    Raises:
      InputError: it is not there.
    """
    starts = range(tokens.size - answer.size + 1)
    start = next((i for i in starts if np.array_equal(tokens[i : i + answer.size], answer)), None)
    if start is None:
        raise InputError(f"the answer's tokens {answer.tolist()} are not in their prompt.")
    made = np.zeros(width, bool)
    made[start : start + answer.size] = True
    return made


def is_quiet(paid: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Whether each query after the marked tokens pays them, on average, under `QUIET` / visible, [n] bool.

    Args:
      paid: [t], what each query pays the marked tokens together.
      marks: [T] bool, T at least t.
    """
    first = int(np.flatnonzero(marks)[-1]) + 1
    return np.asarray(paid[first:] / marks.sum() < QUIET / np.arange(first + 1, paid.size + 1))


def longest_quiet(paid: np.ndarray, marks: np.ndarray) -> int:
    """The most consecutive quiet queries that a loud one follows, at once or later; 0 if there is no loud query.

    Args:
      paid: [T], what each query pays the marked tokens together.
      marks: [T] bool.
    """
    first = int(np.flatnonzero(marks)[-1]) + 1
    own = paid[first:]
    loud = own > LOUD
    longest = run = pending = 0
    for hushed, found in zip(is_quiet(paid, marks), loud, strict=True):
        if found:
            longest, pending, run = max(longest, pending), 0, 0
        run = run + 1 if hushed else 0
        pending = max(pending, run)
    return longest


def _paid(carry: PyTree, attention: tuple[Rows], marks: Array) -> tuple[PyTree, Array]:
    (rows,) = attention
    own = marks[:, : rows.probability.shape[-1]]
    # [B, K, G, n]
    return carry, jnp.sum(jnp.where(own[:, None, None, None], rows.probability, 0.0), axis=-1)
