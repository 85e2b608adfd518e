"""`speculate`: generation in rounds of drafts, which the full cache verifies."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import choice_argument, plain_signature
from kvjax.cache import shared_prefix
from kvjax.cache.planning.limits import power_of_two
from kvjax.cache.state import KVState
from kvjax.errors import InputError
from kvjax.generation import compiling
from kvjax.generation.generate import Generation, check_requests
from kvjax.generation.options import CacheOptions, options_of
from kvjax.generation.sampling import Greedy, Sampler, check_sampling
from kvjax.inputs import Batch, check_batch, check_count, check_stop
from kvjax.models.model import Model, check_model
from kvjax.numerics.finite import PAD, check_finite
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.speculation.drafts import GAMMA, Draft, Level, resolve_levels
from kvjax.speculation.levels import LevelPlan
from kvjax.speculation.loop_state import Carry, Counts, Plan, make_keys
from kvjax.speculation.report import Drafts
from kvjax.speculation.rounds import run_rounds
from kvjax.speculation.target import Target

Array = jax.Array
CHUNK = 64  # rounds of a call of the program; between calls, a caller can interrupt
TEXT = 64  # tokens after a prompt that arrays have room for at the least
VERIFY = ("block", "scan")


@plain_signature
def speculate(
    model: Model,
    tokens: ArrayLike,
    *,
    max_new_tokens: int,
    draft: Draft | None = None,
    gamma: int = GAMMA,
    accept: str = "shared",
    draft_model: Model | None = None,
    draft_sampler: Sampler | None = None,
    verify: str = "block",
    lengths: ArrayLike | None = None,
    sampler: Sampler = Greedy(),
    key: Array | None = None,
    stop: Sequence[int] = (),
    requests: ArrayLike | None = None,
    options: CacheOptions | None = None,
) -> Generation:
    """Generates tokens after prompts with the full cache, several in one step of the model where drafts are right.

    A round drafts γ tokens from fewer slots of the cache, from a small separate cache, or with another model. The
    model then reads them as one block, accepts them up to the first that it would not have chosen, and adds one token
    of its choice (speculative decoding, arXiv:2211.17192; TriForce, arXiv:2404.11912). Rows accept different numbers
    and go on at their own lengths.

    Args:
      model: see `kvjax.generate`.
      tokens: see `kvjax.generate`.
      max_new_tokens: see `kvjax.generate`.
      draft: how tokens are drafted: a selection that reads the model's own cache, such as
        ``kvjax.selection.retrieval(budget=512)``; `seen`; `own`, or a policy, which means the same; a `level`; or a
        list of these, the nearest to the target first, of which each drafts for the one before. None with a
        `draft_model` that has a full cache.
      gamma: γ, the number of tokens that are drafted in a round.
      accept: ``shared``: a draft is accepted if it is what the model itself chooses with the random key of plain
        generation. The tokens are then those of `kvjax.generate`, greedy or sampled, except for near-ties that rounding
        decides. ``ratio``: a draft d is accepted with the chance min(1, p(d) / q(d)), and tokens have the distribution
        of those of `kvjax.generate`, but are others. Greedy, both are the same.
      draft_model: another model that drafts, of the same vocabulary; `draft` is then the policy of its cache.
      draft_sampler: how drafts are chosen; None = as the model chooses.
      verify: ``block``, or ``scan``: the model reads drafts one by one, which saves nothing and returns to the bit what
        `kvjax.generate` does.
      lengths: see `kvjax.generate`.
      sampler: see `kvjax.generate`; without a repetition penalty.
      key: see `kvjax.generate`.
      stop: see `kvjax.generate`.
      requests: see `kvjax.generate`.
      options: see `kvjax.CacheOptions`, for the cache of the model; its storage may be in host memory, not coded.
        Blocks of prompts, limits and implementation are those of drafts too.

    Returns:
      The new tokens. ``drafts`` has the counts of rounds, drafted and accepted tokens. ``state`` is a full cache.

    Raises:
      InputError: tokens or options that are not valid; see `kvjax.speculation.Level`.
      PolicyError: a policy or a selection that cannot draft, or a cache that cannot be verified in blocks.
      StorageError: a storage that encodes what it holds.
      NonFiniteError: see `kvjax.generate`.
    """
    check_model(model)
    check_count("max_new_tokens", max_new_tokens)
    choice_argument("verify", verify, VERIFY, error=InputError)
    base = Level(gamma=gamma, accept=accept, model=draft_model, sampler=draft_sampler)
    levels = resolve_levels(model, draft, base, sampler)
    batch = check_batch(model.config, tokens, lengths, new_tokens=max_new_tokens)
    loop = prepare_rounds(
        model, batch, levels, max_new_tokens=max_new_tokens, sampler=sampler, key=key, stop=stop, requests=requests,
        scan=verify == "scan", options=options,
    )  # fmt: skip
    carry, rows = loop.run(), len(batch.lengths)
    with model.on_mesh():
        all_ids, all_scores, counted, counts, by_round = distributed.to_host(
            (carry.text, carry.logprobs, carry.made, carry.counts, carry.by_round)
        )
    # [B]
    number = counted[:rows].astype(np.int32)
    # [B, max_new_tokens]
    made_now = np.arange(max_new_tokens) < number[:, None]
    new = np.where(made_now, all_ids[:rows, :max_new_tokens], PAD)
    scores = all_scores[:rows, :max_new_tokens]
    known = np.where(np.isfinite(scores) & made_now, scores, np.float32(0))
    report = Drafts.from_counts(counts, by_round, rows)
    target = loop.target
    result = Generation(new, number, known, target.plain_state(carry.state), None, target.plain_layout, None, report)
    check_finite(scores, result)
    return result


class Loop(NamedTuple):
    """The loop of rounds after the prompts, before the first round.

    Attributes:
      model: the target.
      target: the target's cache and layout.
      params: of the target, and of other models that draft.
      carry: of the loop; `run` consumes it.
      stop: [n] int32, token ids that end a row.
      most: the number of new tokens of a row.
      plan: the static description.
    """

    model: Model
    target: Target
    params: tuple[Params, ...]
    carry: Carry
    stop: np.ndarray
    most: int
    plan: Plan

    def run(self) -> Carry:
        """Runs rounds until every row has ended; the carry is donated."""
        carry, budgets = self.carry, self.target.budgets
        with self.model.on_mesh():
            while bool(distributed.to_host(carry.active).any()):
                with compiling.announced(compiling.tokens_of(self.plan.verify)):
                    carry = run_rounds(
                        self.params, carry, self.stop, np.int32(self.most), np.int32(CHUNK), budgets, plan=self.plan
                    )
        return carry


def prepare_rounds(
    model: Model,
    batch: Batch,
    levels: tuple[Level, ...],
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: Array | None = None,
    stop: Sequence[int] = (),
    requests: ArrayLike | None = None,
    scan: bool = False,
    options: CacheOptions | None = None,
) -> Loop:
    """Prefills the caches of the target and of levels that have their own.

    Args:
      model: the target.
      batch: from `kvjax.inputs.check_batch`.
      levels: from `resolve_levels`.
      max_new_tokens: see `speculate`.
      sampler: see `speculate`.
      key: see `speculate`.
      stop: see `speculate`.
      requests: see `speculate`.
      scan: whether the target reads drafts one by one.
      options: see `speculate`.

    Raises:
      InputError, PolicyError, StorageError: see `speculate`.
    """
    for decoder in (model, *(level.model for level in levels if level.model is not None)):
        shared_prefix.refuse(decoder.params, "kvjax.speculate")
    rows = len(batch.lengths)
    key = check_sampling(sampler, key, rows)
    key = jax.random.key(0) if key is None else key
    stop_ids = check_stop(stop)
    if key.ndim and requests is None:
        requests = np.zeros(rows, np.int32)
    request = check_requests(requests, rows)
    target = Target(model, levels, batch, max_new_tokens, options_of(options, {}, "speculate"))
    plans: list[LevelPlan] = []
    caches: list[tuple[KVState, Array] | None] = []
    models = [model]
    for number, each in enumerate(levels):
        level_plan, cache, drafting_model = target.level(number, each)
        if drafting_model is not model:
            models.append(drafting_model)
            level_plan = dataclasses.replace(level_plan, model=len(models) - 1)
        plans.append(level_plan)
        caches.append(cache)
    padded = target.logits.shape[0]
    request, real = np.pad(request, (0, padded - rows)), np.arange(padded) < rows
    if key.ndim:
        key = key[np.pad(np.arange(rows), (0, padded - rows))]
    width = power_of_two(max_new_tokens + sum(each.gamma for each in plans), TEXT)
    plan = Plan(
        config=model.config, decode=target.layout.decode, step=target.step, verify=target.verify, sampler=sampler,
        levels=tuple(plans), scan=scan,
    )  # fmt: skip
    with model.on_mesh():
        arrays = model.place((
            np.full((padded, width), PAD, np.int32), np.zeros((padded, width), np.float32),
            np.zeros(padded, np.int32), real, request, np.full((padded, width), -1, np.int32),
        ))  # fmt: skip
        text, logprobs, made, active, ids, by_round = arrays
        carry = Carry(
            target.state, target.logits, text, logprobs, made, active, jnp.copy(target.state.length),
            make_keys(key, ids, len(plans)), tuple(caches), tuple(_no_counts(each.gamma, padded) for each in plans),
            by_round,
        )  # fmt: skip
    return Loop(model, target, tuple(each.params for each in models), carry, stop_ids, max_new_tokens, plan)


def _no_counts(gamma: int, rows: int) -> Counts:
    return Counts(
        jnp.zeros(rows, jnp.int32), jnp.zeros((rows, gamma), jnp.int32), jnp.zeros((rows, gamma), jnp.int32)
    )  # fmt: skip
