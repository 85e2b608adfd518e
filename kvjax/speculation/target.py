"""The target's cache after the prompts, and the caches of the levels that draft for it."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from kvjax.cache.groups import Group, Phase
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import slots_bucket
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState, Layer
from kvjax.errors import PolicyError
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import Prepared, prepare, run_prompts
from kvjax.inputs import Batch, check_batch
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.policies import full
from kvjax.policies.base import Policy
from kvjax.policies.traits import observing, ranks_by_content
from kvjax.selection.base import Selection
from kvjax.selection.everything import everything
from kvjax.speculation import slot_copies
from kvjax.speculation.drafts import Level, Own, Seen
from kvjax.speculation.levels import LevelPlan

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
        selection = next((each.draft for each in levels if isinstance(each.draft, Selection)), everything())
        ranks = next((each.draft for each in levels if isinstance(each.draft, Seen)), None)
        policy: Policy = full() if ranks is None else observing(ranks.policy)  # type: ignore[arg-type]  # checked
        plain = options.spec(full())
        if not plain.selection.reads_all:
            raise PolicyError(
                f"selection={plain.selection!r} reads blocks whole and single tokens not, so that drafts cannot be "
                "verified in blocks; leave it out, or give it as draft."
            )
        if ranks is not None and plain.storage.on_host and ranks_by_content(ranks.policy):
            raise PolicyError(
                f"seen({ranks.policy.name}) ranks slots by keys or by statistics of attention, and the cache is in "
                "host memory; use a policy of positions such as window, a selection, or a cache on the device."
            )
        self._spec = CacheSpec(policy, plain.storage, selection)
        with model.on_mesh():
            prepared = self._prepared(model, self._spec)
            _check_target(prepared.layout)
            if selection != everything() or ranks is not None:
                # The arrays of layers are looked at one by one.
                prepared = prepared._replace(layout=dataclasses.replace(prepared.layout, runs=()))
            self.logits, self.state = self._prefilled(model, prepared)
            self.layout = prepared.layout
            self.budgets: slot_copies.GroupBudgets | None = None
            self._ranking: Phase = ()
            if ranks is not None:
                self._ranking, self.budgets = self._ranked(ranks)
        self.verify = _map_groups(self.layout.decode, slot_copies.plain_group)
        self.step = _map_groups(self.layout.decode, lambda group: dataclasses.replace(group, selection=everything()))

    @property
    def plain_layout(self) -> CacheLayout:
        """The layout without what is there for drafts."""

        def plain(group: Group) -> Group:
            decode = group.decode_group
            return dataclasses.replace(
                group, selection=everything(), needs=frozenset(), prompt_index=None, policy=full(),
                decode_group=None if decode is None else plain(decode),
            )  # fmt: skip

        prompt, decode = (_map_groups(phase, plain) for phase in (self.layout.prompt, self.layout.decode))
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
        # A level is fed the drafts of all levels up to the next one, and what was chosen after them.
        most = sum(each.gamma or 0 for each in self._levels[: number + 2]) + 2
        base = LevelPlan(
            config=model.config, phase=(), gamma=level.gamma, accept=level.accept, sampler=level.sampler
        )  # fmt: skip
        if isinstance(level.draft, Own):
            return self._own(level.draft, model, base, most)
        selects = isinstance(level.draft, Selection)
        if selects:
            choosing = _map_groups(
                self.layout.decode, lambda group: dataclasses.replace(
                    group, needs=frozenset(), step_implementation=None, attn_implementation="xla"
                ),
            )  # fmt: skip
        else:
            choosing = self._ranking
        widths = [[self._width(selects, *each) for each in enumerate(layer)] for layer in self._by_layer()]
        copies = tuple(
            tuple(slot_copies.copy_group(group, width, most) for group, width in zip(*each, strict=True))
            for each in zip(self.layout.decode, widths, strict=True)
        )
        return dataclasses.replace(base, phase=copies, choosing=choosing, selects=selects, tail=most), None, model

    def _by_layer(self) -> list[list[tuple[Group, Array | None]]]:
        """Returns the groups of each layer, with the slots that a policy chooses."""
        budgets = self.budgets or tuple((None,) * len(layer) for layer in self.layout.decode)
        return [list(zip(*each, strict=True)) for each in zip(self.layout.decode, budgets, strict=True)]

    def _width(self, selects: bool, number: int, pair: tuple[Group, Array | None]) -> int:
        """Returns the number of slots of a copy of a group."""
        group, slots = pair
        if selects:
            width = group.selection.width(group.capacity)
            return group.capacity if width is None else width
        return group.capacity if slots is None else slots_bucket(int(np.max(distributed.to_host(slots))))

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
        phase = _map_groups(layout.decode, slot_copies.plain_group) if exact else layout.decode
        plan = dataclasses.replace(base, phase=phase, num_snapshots=None if exact else most + 1)
        return plan, (state, logits), draft_model

    def _ranked(self, draft: Seen) -> tuple[Phase, slot_copies.GroupBudgets]:
        """Returns the groups whose policy ranks slots, and the number of slots of each row."""
        prepared = self._prepared(self._model, CacheSpec(draft.policy))
        budgets = prepared.budgets
        # A compressor has its budget at the end of the prompt.
        compresses = not any(each is not None for layer in budgets.decode for each in layer)
        phase, slots = (
            (prepared.layout.prompt, budgets.prompt) if compresses else (prepared.layout.decode, budgets.decode)
        )
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


def _map_groups(phase: Phase, change: Callable[[Group], Group]) -> Phase:
    """Returns a phase with other groups."""
    return tuple(tuple(change(group) for group in layer) for layer in phase)


def _check_target(layout: CacheLayout) -> None:
    """Checks that a block of tokens equals single steps.

    Raises:
      PolicyError: it does not.
    """
    for group in layout.groups:
        reason = None
        if group.evicts:
            reason = "layers with a sliding window evict what has left it"
        elif group.arrangement.sized_by_extent or group.storage.divided or not group.storage.exact:
            reason = f"storage {group.storage.label} encodes tokens"
        elif group.slot_axes:
            reason = "slots are divided over devices"
        if reason is not None:
            raise PolicyError(
                f"drafts are verified in blocks, which equal single steps only in a full cache: {reason}; use "
                "kvjax.generate without speculation."
            )
