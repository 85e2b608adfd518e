"""`Rounds`: rows that decode in rounds of drafts, several tokens in one step of the model where drafts are right."""

import jax
import numpy as np

from kvjax.cache.groups import Phase
from kvjax.cache.planning.lowering import budgets_of, lower
from kvjax.cache.spec import CacheSpec
from kvjax.errors import InputError, shown
from kvjax.generation import compiling
from kvjax.generation.sampling import Greedy, Sampler, penalty_of
from kvjax.models.model import Model
from kvjax.serve import draft_rows
from kvjax.serve.chunked_prefill import Prompt
from kvjax.serve.decode_loop import Chunk, Entry
from kvjax.serve.draft_rows import DraftRows
from kvjax.serve.intake import Ready
from kvjax.serve.prompts import Prompts
from kvjax.serve.request import Checked
from kvjax.serve.row_loop import TOKENS_PER_READ
from kvjax.serve.swap import committed
from kvjax.speculation.drafts import GAMMA, Draft, Level, Own, Seen, resolve_levels
from kvjax.speculation.levels import LevelPlan
from kvjax.speculation.loop_state import Plan
from kvjax.speculation.phases import (
    HostBudgets,
    check_full,
    check_target,
    copying_level,
    most_fed,
    ranking_budgets,
    ranking_phase,
    step_phase,
    target_spec,
    verify_phase,
)


def check_draft(model: Model, draft: Draft, sampler: Sampler) -> Level:
    """Returns the level that drafts for the rows of a runner, with nothing left to default.

    Args:
      model: the target.
      draft: as in `kvjax.generate`.
      sampler: of requests that have none of their own.

    Raises:
      InputError: a draft that is not valid, or that rows cannot have.
      PolicyError: a policy or a selection that cannot draft.
    """
    (level, *others) = resolve_levels(model, draft, Level(gamma=GAMMA, accept="shared"), sampler)
    if others:
        raise InputError(
            f"speculate has {1 + len(others)} levels, and the rows of a Runner have one; give the nearest to the "
            "model, or use kvjax.generate."
        )
    if isinstance(level.draft, Own):
        raise InputError(
            f"speculate={shown(draft)} drafts with a cache of its own, and the rows of a Runner have the model's cache "
            "alone; give a selection such as kvjax.selection.retrieval(budget=512) or kvjax.speculation.seen(policy), "
            "which read it, or use kvjax.generate."
        )
    given = draft[0] if isinstance(draft, list | tuple) else draft
    if isinstance(given, Level) and given.accept not in (None, "shared"):
        raise InputError(
            f"accept={given.accept!r} changes the tokens of a request, and those of a Runner are those of "
            "kvjax.generate; leave it out, or use kvjax.speculate."
        )
    if isinstance(given, Level) and given.sampler is not None:
        raise InputError(
            f"the drafts of a Runner are chosen by the sampler of each request; leave out sampler={given.sampler!r}."
        )
    return level


def drafted_spec(level: Level, spec: CacheSpec) -> CacheSpec:
    """Returns the spec of a runner whose rows are drafted for.

    Args:
      level: from `check_draft`.
      spec: of the runner.

    Raises:
      PolicyError: it is not a full cache that can be verified in blocks.
    """
    check_full(spec.policy, "seen")
    return target_spec((level,), spec)


class Rounds:
    """Rows that decode in rounds of drafts.

    Attributes:
      plan: the loop of rounds.
    """

    def __init__(self, prompts: Prompts, level: Level, rows: int):
        """Prepares the loop.

        Args:
          prompts: runs prompts under the spec of `drafted_spec`.
          level: from `check_draft`.
          rows: the number of rows.

        Raises:
          PolicyError: blocks do not equal single steps, or the budget of a policy cannot work.
        """
        assert level.gamma is not None and level.accept is not None and level.sampler is not None
        check_target(prompts.layout)
        self._prompts, self._count, self._gamma = prompts, rows, level.gamma
        self._name = f"seen({level.draft.policy.name})" if isinstance(level.draft, Seen) else repr(level.draft)
        model, limits, decode = prompts.model, prompts.limits, prompts.layout.decode
        # Each row has its own sampler.
        base = LevelPlan(
            config=model.config, phase=(), gamma=level.gamma, accept=level.accept, sampler=Greedy()
        )  # fmt: skip
        self._ranks = CacheSpec(level.draft.policy) if isinstance(level.draft, Seen) else None
        self._budgets: HostBudgets | None = None
        ranking: Phase = ()
        if self._ranks is not None:
            assert prompts.made.sizes is not None
            with model.on_mesh():
                lowered = lower(
                    self._ranks, model.config, prompts.made.sizes, np.array([limits.prompt], np.int32),
                    implementation=prompts.implementation, platform=model.platform, dtype=model.dtype,
                )  # fmt: skip
            ranking, self._budgets = ranking_phase(*lowered), ranking_budgets(lowered.budgets)
        plan = copying_level(base, decode, ranking, self._budgets, most_fed((level,), 0))
        self.plan = Plan(
            config=model.config, decode=decode, step=step_phase(decode), verify=verify_phase(decode), sampler=Greedy(),
            levels=(plan,), scan=False,
        )  # fmt: skip

    def check(self, request: Checked, prompt: Prompt) -> None:
        """Checks a request; see `kvjax.serve.row_loop.RowLoop.check`.

        Raises:
          InputError: its sampler has a repetition penalty.
          PolicyError: the budget of the policy that drafts cannot work for the length of its prompt.
        """
        if penalty_of(request.sampler) is not None:
            raise InputError(
                "a repetition penalty depends on the tokens that are accepted, and drafts are verified together; use a "
                "sampler without one, or a runner without speculate."
            )
        self._budgets_of(prompt)

    def check_prefix(self) -> None:
        """Refuses prefixes.

        Raises:
          InputError: always.
        """
        raise InputError(
            "a runner with speculate cannot continue a prefix: what follows would be fed without the index and the "
            "statistics that drafts read. Submit whole prompts; with a prefix_store, those that were run are found."
        )

    def explain(self) -> str:
        """See `kvjax.serve.row_loop.RowLoop.explain`."""
        return f"\nspeculation: {self._gamma} drafts in a round by {self._name}"

    def filled(self, rows: DraftRows | None, row: int, ready: Ready, entry: Entry) -> DraftRows:
        """See `kvjax.serve.row_loop.RowLoop.filled`."""
        started, prompt = ready.started, ready.job.prompt
        assert prompt is not None
        budgets = self._budgets_of(prompt)
        if rows is None:
            width = self._prompts.limits.new_tokens + self._gamma
            empty = draft_rows.empty_rows(
                started.state, started.logits, entry, budgets, rows=self._count, width=width, gamma=self._gamma
            )
            rows = committed(empty)
        return draft_rows.admit(
            rows, started.state, started.logits, np.int32(ready.source), np.int32(row), entry, budgets
        )

    def run(self, rows: DraftRows, going_on: np.ndarray, steps: int, idle: int) -> tuple[DraftRows, Chunk]:
        """See `kvjax.serve.row_loop.RowLoop.run`; a step is a round."""
        with compiling.announced(compiling.tokens_of(self.plan.verify)):
            return draft_rows.decode_chunk(
                self._prompts.model.params, rows, going_on, np.int32(steps), np.int32(idle), plan=self.plan,
                min_row_steps=TOKENS_PER_READ,
            )  # fmt: skip

    def _budgets_of(self, prompt: Prompt) -> HostBudgets | None:
        """Returns the slots of a request that the policy ranks highest, [1] per layer and group of heads."""
        if self._ranks is None:
            return None
        length, total = (np.array([each], np.int32) for each in (len(prompt.tokens), prompt.total))
        own = ranking_budgets(budgets_of(self._ranks, self._prompts.model.config, length, total))
        # Copies have room for the slots of the longest prompt.
        room: HostBudgets = jax.tree.map(np.minimum, own, self._budgets)
        return room
