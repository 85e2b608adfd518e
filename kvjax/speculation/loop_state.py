"""The description of the loop of rounds, its carry, and the random keys of rows."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.groups import Phase
from kvjax.cache.state import KVState
from kvjax.generation.sampling import Sampler
from kvjax.models.config import DecoderConfig
from kvjax.parallel.sharding import Params
from kvjax.speculation.levels import LevelCache, LevelPlan

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static description of the loop.

    Attributes:
      config: of the target.
      decode: the target's groups of heads.
      step: the same as a single token is fed in plain generation.
      verify: the same for a block that is verified.
      sampler: of the target; not read where rows have their own, see `Run.row_sampler`.
      levels: the nearest to the target first.
      scan: whether the target feeds tokens one by one.
    """

    config: DecoderConfig
    decode: Phase
    step: Phase
    verify: Phase
    sampler: Sampler
    levels: tuple[LevelPlan, ...]
    scan: bool

    @property
    def observes(self) -> bool:
        """Whether the target keeps statistics of its own attention."""
        return any(group.needs for layer in self.decode for group in layer)

    @property
    def selecting(self) -> Phase | None:
        """The target's groups with the selection of a level; None if there is none."""
        return next((level.choosing for level in self.levels if level.selects), None)


class Keys(NamedTuple):
    """Random keys of each row, [B] each, to which positions are folded in.

    Attributes:
      plain: those of plain generation.
      draft: of drafts, per level.
      accept: of tests, per level.
      rest: of the token after the accepted ones, per level.
    """

    plain: Array
    draft: tuple[Array, ...]
    accept: tuple[Array, ...]
    rest: tuple[Array, ...]


class Counts(NamedTuple):
    """The counts of a level.

    Attributes:
      rounds: [B] int32.
      drafted: [B, γ] int32, drafts of each place.
      accepted: [B, γ] int32.
    """

    rounds: Array
    drafted: Array
    accepted: Array


class Carry(NamedTuple):
    """The carry of the loop. The first dimension of every leaf is the batch.

    Attributes:
      state: the target's cache.
      logits: [B, V] float32, after the newest token of each prompt; read only before a row's first token is fed.
      text: [B, N] int32, the tokens after the prompts; after the first `made` of a row they are drafts.
      logprobs: [B, N] float32.
      made: [B] int32, the number of tokens after the prompt.
      active: [B] bool, whether the row has not ended.
      start: [B] int32, the length of each prompt.
      keys: random keys.
      caches: the caches of levels and their logits; None for a level that copies slots.
      counts: of each level.
      by_round: [B, N] int32, the number of accepted drafts of each round of the target; -1 after the last.
    """

    state: KVState
    logits: Array
    text: Array
    logprobs: Array
    made: Array
    active: Array
    start: Array
    keys: Keys
    caches: tuple[tuple[KVState, Array] | None, ...]
    counts: tuple[Counts, ...]
    by_round: Array


class Draft(NamedTuple):
    """The drafts of a level, in a round.

    Attributes:
      text: see `Carry`.
      draft_logits: [B, γ, V] float32, the logits that each was sampled from; [B, γ, 0] where the rule does not read
        them.
      caches: the caches of all levels.
      counts: see `Carry`.
    """

    text: Array
    draft_logits: Array
    caches: tuple[LevelCache, ...]
    counts: tuple[Counts, ...]


class Verification(NamedTuple):
    """The outcome of a verification.

    Attributes:
      tokens: [B, γ + 1] int32, the accepted drafts and the token after them.
      accepted: [B] int32.
    """

    tokens: Array
    accepted: Array


class Run(NamedTuple):
    """The arguments of the functions of a round that do not change.

    Attributes:
      plan: the loop.
      params: of the models.
      start: see `Carry`.
      keys: see `Carry`.
      row_sampler: how tokens are chosen where rows differ, those of drafts too, all of which must be accepted by
        ``shared``: (logits [B * n, V], random keys [B * n]) -> [B * n] int32. None = as the plan says.
    """

    plan: Plan
    params: tuple[Params, ...]
    start: Array
    keys: Keys
    row_sampler: Callable[[Array, Array], Array] | None = None

    def sampling_keys(self, level: int) -> Array:
        """Returns the keys with which a level samples tokens, [B]; -1 = the target."""
        if level < 0:
            return self.keys.plain
        shared = self.plan.levels[level].accept == "shared"
        return self.sampling_keys(level - 1) if shared else self.keys.draft[level]

    def sampler(self, level: int) -> Sampler:
        """Returns how a level chooses; -1 = the target."""
        return self.plan.sampler if level < 0 else self.plan.levels[level].sampler

    def sample(self, level: int, logits: Array, position: Array) -> Array:
        """Samples tokens of positions [B, n] from logits [B, n, V]; [B, n] int32."""
        rows, count, vocabulary = logits.shape
        keys = fold_in_positions(self.sampling_keys(level), position)
        choose = self.sampler(level) if self.row_sampler is None else self.row_sampler
        made = choose(logits.reshape(rows * count, vocabulary), keys.reshape(rows * count))
        return made.reshape(rows, count)

    def tokens_at(self, text: Array, position: Array) -> Array:
        """Returns the tokens of a text at positions [B, n]; [B, n] int32."""
        index = jnp.clip(position - self.start[:, None], 0, text.shape[1] - 1)
        return jnp.maximum(jnp.take_along_axis(text, index, axis=1), 0)


def fold_in_positions(keys: Array, position: Array) -> Array:
    """Folds positions [B, n] into the keys [B] of rows; [B, n] random keys."""
    return jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))(keys, position)


def row_keys(key: Array, request: Array) -> Array:
    """Folds requests [B] into a key, [] or [B]; [B] random keys."""
    return jax.vmap(jax.random.fold_in, in_axes=(0 if key.ndim else None, 0))(key, request)


def make_keys(key: Array, request: Array, levels: int) -> Keys:
    """Makes the keys of rows; for `Keys.plain` as `kvjax.generation.decoding` does.

    Args:
      key: [] or [B] random key.
      request: [B] int32.
      levels: the number of levels.
    """
    each = jax.vmap if key.ndim else lambda function: function
    # [B, 3] or [3]
    split = each(lambda one: jax.random.split(one, 3))(key)

    def of_level(role: int, level: int) -> Array:
        return row_keys(each(lambda one: jax.random.fold_in(one, level))(split[..., role]), request)

    draft, accept, rest = (tuple(of_level(role, level) for level in range(levels)) for role in range(3))
    return Keys(row_keys(key, request), draft, accept, rest)


def put(into: Array, first: Array, count: Array, values: Array) -> Array:
    """Writes the first `count` of values [B, n] into rows [B, N] from index `first` on, [B] each."""
    places = jnp.arange(values.shape[1], dtype=jnp.int32)
    index = jnp.where(places < count[:, None], first[:, None] + places, into.shape[1])
    return into.at[jnp.arange(into.shape[0])[:, None], index].set(values, mode="drop")


def count_round(
    counts: tuple[Counts, ...], level: int, reached: Array, accepted: Array, active: Array
) -> tuple[Counts, ...]:
    """Counts a round of a level: drafts up to the `reached`-th token, [B], of which some were accepted, [B]."""
    before = counts[level]
    places = jnp.arange(before.drafted.shape[1], dtype=jnp.int32)
    drafted, verified = (
        (active[:, None] & (places < number[:, None])).astype(jnp.int32)
        for number in (reached, jnp.minimum(accepted, reached))
    )
    made = Counts(before.rounds + active.astype(jnp.int32), before.drafted + drafted, before.accepted + verified)
    return (*counts[:level], made, *counts[level + 1 :])


def empty_draft_logits(run: Run, level: int) -> Array:
    """Returns zeros for the logits of a level's drafts; see `Draft.draft_logits`."""
    plan = run.plan.levels[level]
    width = run.plan.config.vocab_size if plan.accept == "ratio" else 0
    return jnp.zeros((len(run.start), plan.gamma, width), jnp.float32)
