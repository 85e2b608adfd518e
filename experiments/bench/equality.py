"""Whether rounds of drafts write what plain decoding writes, of all kinds and numbers of drafts, greedy and sampled.

A block of tokens and single tokens differ in rounding, so that tokens may differ where two of them are as good but for
rounding. At the first token of a row that differs, the logits of plain decoding are computed again, after the same
tokens, and both tokens are compared by what plain decoding chooses the largest of.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

import kvjax
from experiments.bench.contestants import lengths
from experiments.bench.speculate import drafter, model_of
from experiments.bench.speculate import prompts as prompts_of
from experiments.config import JOINED
from kvjax import contexts, policies
from kvjax.errors import ConfigError
from kvjax.generation.sampling import Greedy, Sample, Sampler
from kvjax.models.model import Model
from kvjax.speculation import level
from kvjax.speculation.drafts import Draft
from kvjax.typing import JsonObject

CONTEXT, ROWS, SHORTEST = 96, 64, 32  # of prompts, which are ragged
GAMMAS = tuple(range(1, 9))
SAMPLERS = (Greedy(), Sample(0.7, top_p=0.9))
NEAR = 1e-3  # of logits, with the noise of samples: the rounding of float32 is below it
BITS = re.compile(r"int(\d): (.+)")  # weights of another model, and what it drafts with
DRAFTS = (
    "retrieval(chunk=8, budget=32)",
    "quest(page=8, budget=32, first_layer=0)",
    "lserve(page=16, sub=4, budget=32, first_layer=0)",
    "seen(window(32))",
    "seen(h2o(32))",
    "own(streaming_llm(32))",
    "own(h2o(32))",
    "own(snapkv(32, window=16))",
    "int4: own(full)",
    "int4: own(window(32))",
    "retrieval(chunk=8, budget=32) + seen(h2o(16))",
    "int4: own(full) + int4: own(window(16))",
)


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for each draft, number of drafts and sampler; see `compare`.

    Raises:
      ConfigError: flags that are not valid.
    """
    sizes = lengths(values) or [CONTEXT]
    if len(sizes) > 1:
        raise ConfigError(f"bench equality takes one --context, the longest prompt; got {','.join(map(str, sizes))}.")
    (longest,) = sizes
    gammas = values.gammas if values["gammas"].present else GAMMAS
    model = model_of(values, longest + values.tokens + max(gammas) + 1)
    drafts = {text: draft_of(text, model, values.slots) for text in values.drafts or DRAFTS}
    tokens = prompts_of(values, model, longest, ROWS)
    # [B]: from the shortest to the longest
    ends = np.linspace(min(SHORTEST, longest), longest, len(tokens)).astype(int)
    ragged = [row[:end].tolist() for row, end in zip(tokens, ends, strict=True)]
    rows = list[JsonObject]()
    for name, draft in drafts.items():
        if rows:
            # Programs of a number of drafts take some 150 MB, and are not used again.
            jax.clear_caches()
        rows += compare(model, ragged, {name: draft}, gammas=gammas, samplers=SAMPLERS, new_tokens=values.tokens)
    return rows


def draft_of(text: str, model: Model, slots: int) -> Draft:
    """Returns the draft that a text describes: levels that are joined by `` + ``, the nearest to the model first.

    Args:
      text: of a level, what `experiments.bench.speculate.drafter` takes; after ``int4:``, the model with weights of 4
        bits drafts.
      model: the target.
      slots: see `drafter`.

    Raises:
      KvjaxError: an unknown name, or arguments that are not valid.
    """
    made: list[Any] = []
    for part in text.split(JOINED):
        if found := BITS.fullmatch(part.strip()):
            other = kvjax.quantize_weights(model, int(found[1]))
            made.append(level(drafter(found[2], slots), draft_model=other))
        else:
            made.append(drafter(part, slots))
    return made


def compare(
    model: Model,
    prompts: Sequence[Sequence[int]],
    drafts: Mapping[str, Draft],
    *,
    gammas: Sequence[int],
    samplers: Sequence[Sampler],
    new_tokens: int,
) -> Iterator[JsonObject]:
    """Generates in rounds under each draft, and yields a row on how the tokens differ from plain decoding's.

    A row of the batch that differs is a near-tie if plain decoding's choice is at most `NEAR` above the other token,
    in logits as the sampler leaves them, to which a sample adds its noise.

    Args:
      model: decodes, drafts and verifies.
      prompts: of the rows of the batch.
      drafts: name -> draft.
      gammas: numbers of drafts of a round.
      samplers: how tokens are chosen.
      new_tokens: of each row.
    """
    for sampler in samplers:
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "sampler": sampler, "key": jax.random.key(0)}
        plain = np.asarray(kvjax.generate(model, prompts, policies.full(), **options).tokens)
        for name, draft in drafts.items():
            for gamma in gammas:
                made = kvjax.speculate(model, prompts, draft=draft, gamma=gamma, **options)
                assert made.drafts is not None
                gaps = [each.gap for each in differences(model, prompts, plain, made.tokens, sampler)]
                yield {
                    "draft": name, "γ": gamma, "sampler": repr(sampler), "rows": len(prompts), "new tokens": new_tokens,
                    "rows that differ": len(gaps), "near-ties": sum(gap <= NEAR for gap in gaps),
                    "not near-ties": sum(not gap <= NEAR for gap in gaps), "largest gap": max(gaps, default=None),
                    "tokens/round": made.drafts.tokens_per_round, "acceptance": made.drafts.acceptance,
                }  # fmt: skip


class Difference(NamedTuple):
    """The first token of a row that differs.

    Attributes:
      row: of the batch.
      place: tokens of the row before it.
      gap: by how much plain decoding's choice is above the other token; infinite if the sampler excludes one of them.
    """

    row: int
    place: int
    gap: float


def differences(
    model: Model, prompts: Sequence[Sequence[int]], plain: np.ndarray, made: np.ndarray, sampler: Sampler
) -> list[Difference]:
    """Returns the first difference of each row that has one.

    Args:
      model: the target.
      prompts: of the rows.
      plain: [B, N] int32, the tokens of plain decoding.
      made: [B, N] int32, the others.
      sampler: that chose both, with ``jax.random.key(0)``.
    """
    found = []
    for row in map(int, np.flatnonzero((plain != made).any(axis=1))):
        place = int(np.argmax(plain[row] != made[row]))
        # [V]
        scores = scores_of(model, [*prompts[row], *map(int, plain[row, :place])], sampler, row)
        # If the sampler excludes both tokens, both scores are -inf, and the gap is NaN.
        with np.errstate(invalid="ignore"):
            gap = abs(float(scores[plain[row, place]] - scores[made[row, place]]))
        found.append(Difference(row, place, gap))
    return found


def scores_of(model: Model, tokens: Sequence[int], sampler: Sampler, request: int) -> np.ndarray:
    """Returns what a sampler chooses the largest of, [V] float64, after the tokens of a request.

    Args:
      model: the target.
      tokens: all tokens so far.
      sampler: with ``jax.random.key(0)``.
      request: the number of the row.
    """
    # [V]
    logits = contexts.prefill(model, [tokens], policies.full()).logits[0]
    if isinstance(sampler, Sample):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), request), len(tokens))
        logits = sampler.filter(logits[None])[0] + jax.random.gumbel(key, logits.shape, logits.dtype)
    return np.asarray(logits, np.float64)
