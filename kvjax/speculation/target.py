"""The target's cache after the prompts, and the caches of the levels that draft for it."""

import dataclasses
from collections.abc import Sequence

import jax

from kvjax.cache.groups import Group, Phase
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState, Layer
from kvjax.errors import PolicyError
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import Prepared, prepare, run_prompts
from kvjax.inputs import Batch, check_batch
from kvjax.models.model import Model
from kvjax.policies import full
from kvjax.selection.base import Selection
from kvjax.selection.everything import everything
from kvjax.speculation import slot_copies
from kvjax.speculation.drafts import Level, Own, Seen
from kvjax.speculation.levels import LevelPlan
from kvjax.speculation.phases import (
    check_target,
    copying_level,
    map_groups,
    most_fed,
    ranking_budgets,
    ranking_phase,
    step_phase,
    target_spec,
    verify_phase,
)

Array = jax.Array


class Target:
    """The target's cache after the prompts, and the levels that it is drafted for by.

    Attributes:
      state: the cache.
      logits: [B, V].
      layout: of the cache, with the statistics and the index that levels need.
      step: the groups of each layer as plain generation feeds a token.
      verify: the same as a block is verified.
      budgets: slots that a policy ranks highest, [B] per layer and group of heads; None if no level does so.
    """

    def __init__(
        self, model: Model, levels: Sequence[Level], batch: Batch, max_new_tokens: int, options: CacheOptions
    ) -> None:
        self._model, self._batch, self._new, self._options = model, batch, max_new_tokens, options
        self._levels = levels
        self._spec = target_spec(levels, options.spec(full()))
        ranks = next((each.draft for each in levels if isinstance(each.draft, Seen)), None)
        with model.on_mesh():
            prepared = self._prepared(model, self._spec)
            check_target(prepared.layout)
            if not self._spec.selection.reads_all or ranks is not None:
                # The arrays of layers are looked at one by one.
                prepared = prepared._replace(layout=dataclasses.replace(prepared.layout, runs=()))
            self.logits, self.state = self._prefilled(model, prepared)
            self.layout = prepared.layout
            self.budgets: slot_copies.GroupBudgets | None = None
            self._ranking: Phase = ()
            if ranks is not None:
                self._ranking, self.budgets = self._ranked(ranks)
        self.verify, self.step = verify_phase(self.layout.decode), step_phase(self.layout.decode)

    @property
    def plain_layout(self) -> CacheLayout:
        """The layout without what is there for drafts."""

        def plain(group: Group) -> Group:
            decode = group.decode_group
            return dataclasses.replace(
                group, selection=everything(), needs=frozenset(), prompt_index=None, policy=full(),
                decode_group=None if decode is None else plain(decode),
            )  # fmt: skip

        prompt, decode = (map_groups(phase, plain) for phase in (self.layout.prompt, self.layout.decode))
        if self._spec.policy == full() and self._spec.selection.reads_all:
            return self.layout
        return dataclasses.replace(self.layout, prompt=prompt, decode=decode, name=full().name)

    def plain_state(self, state: KVState) -> KVState:
        """Returns the cache without what is there for drafts."""
        if self.plain_layout is self.layout:
            return state
        layers = tuple(Layer(group.replace(stats={}, index={}) for group in layer) for layer in state.layers)
        return state.replace(layers=layers)

    def level(self, number: int, level: Level) -> tuple[LevelPlan, tuple[KVState, Array] | None, Model]:
        """Returns the plan of a level, its cache with its logits, and its model."""
        assert level.gamma is not None and level.accept is not None and level.sampler is not None
        model = self._model if level.model is None else level.model
        most = most_fed(self._levels, number)
        base = LevelPlan(
            config=model.config, phase=(), gamma=level.gamma, accept=level.accept, sampler=level.sampler
        )  # fmt: skip
        if isinstance(level.draft, Own):
            return self._own(level.draft, model, base, most)
        budgets = None if isinstance(level.draft, Selection) else self.budgets
        return copying_level(base, self.layout.decode, self._ranking, budgets, most), None, model

    def _own(
        self, draft: Own, model: Model, base: LevelPlan, most: int
    ) -> tuple[LevelPlan, tuple[KVState, Array], Model]:
        """Returns the plan of a level with a cache of its own; for the rest see `level`."""
        options = dataclasses.replace(self._options, storage=None, selection=None)
        draft_model, spec = options.resolve(model, draft.spec)
        if spec.storage.on_host:
            raise PolicyError(
                f"own({spec.name}): a cache that drafts is copied after each token, and must be on the device; leave "
                "out memory='host'."
            )
        check_batch(draft_model.config, self._batch.tokens, self._batch.lengths, new_tokens=self._new)
        with draft_model.on_mesh():
            prepared = self._prepared(draft_model, spec)
            logits, state = self._prefilled(draft_model, prepared)
        layout = prepared.layout
        exact = layout.keeps_all and all(
            not (group.needs or group.memory or group.writes or group.storage.new_tokens_separate)
            and group.selection.reads_all and group.policy.positions == "original"
            for group in layout.groups
        )  # fmt: skip
        phase = map_groups(layout.decode, slot_copies.plain_group) if exact else layout.decode
        plan = dataclasses.replace(base, phase=phase, num_snapshots=None if exact else most + 1)
        return plan, (state, logits), draft_model

    def _ranked(self, draft: Seen) -> tuple[Phase, slot_copies.GroupBudgets]:
        """Returns the groups whose policy ranks slots, and the number of slots of each row."""
        prepared = self._prepared(self._model, CacheSpec(draft.policy))
        phase, slots = ranking_phase(prepared.layout, prepared.budgets), ranking_budgets(prepared.budgets)
        return phase, self._model.place(slots)

    def _prepared(self, model: Model, spec: CacheSpec) -> Prepared:
        total = self._batch.lengths + self._new - 1
        return prepare(
            model, spec, self._batch.lengths, total, width=self._batch.width, options=self._options, last_fed=False,
            pad_rows=True, following=self._new - 1,
        )  # fmt: skip

    def _prefilled(self, model: Model, prepared: Prepared) -> tuple[Array, KVState]:
        batch = self._batch
        total = batch.lengths + self._new - 1
        logits, _, state = run_prompts(model, batch.tokens, batch.lengths, total, prepared, score=False)
        return logits, state
