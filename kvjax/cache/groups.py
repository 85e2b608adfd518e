"""Groups of heads: the policy, storage, selection and kernels of some KV heads of one layer."""

import dataclasses
import functools

from kvjax.attention import Implementation
from kvjax.cache.arrangements import Arrangement, arrangement_of
from kvjax.cache.parallel_contexts import ParallelContexts
from kvjax.numerics.statistics import Statistic
from kvjax.policies.base import Evict
from kvjax.policies.components import Unprotected
from kvjax.policies.prompt_replay import Replay
from kvjax.policies.row_memory import RowMemory
from kvjax.policies.window import First, full
from kvjax.policies.written import Written
from kvjax.selection.base import Selection
from kvjax.selection.everything import everything
from kvjax.selection.query_blocks import QueryBlocks
from kvjax.storage import dense
from kvjax.storage.base import UNROTATED, Codec, Exact, Storage

#: The statistic that holds the ranks of slots, [B, K, S] float32, where devices have some of them.
RANK = "rank of a slot"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySizes:
    """Sizes of arrays besides the number of slots, for storages whose layout depends on them.

    Attributes:
      shortest: the least tokens that are held when a prompt ends.
      following: the most tokens that follow a prompt.
      compressed: whether a prompt may lose tokens when it ends.
    """

    shortest: int
    following: int
    compressed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Some KV heads of one layer, which share a policy, a storage, a selection and arrays of one capacity.

    Layers that are alike have equal groups, so that they are traced once.

    Attributes:
      heads: the model's KV heads that these are; None = all.
      policy: ranks the slots; without the numbers of its budget.
      storage: how slots are held.
      selection: which slots a query reads.
      needs: the statistics that are kept, for this policy and for the one that decodes.
      memory: the memories of queries and of evictions, for both policies; those with a number per slot are statistics.
      queries: query heads of each KV head, if any are remembered; otherwise 1.
      writes: the written scores, for this policy and for the one that decodes.
      slots: the number of slots of each store; () = as many as the prompt has tokens (one-shot prefill).
      array_sizes: what else arrays are sized for, if the storage's layout is not of single slots.
      decoding: whether the prompt is over.
      evicts_one: whether a step of one token evicts at most one slot per head.
      attn_implementation: the implementation of attention.
      step_implementation: the implementation of a whole decoding step; None = step by step.
      slot_axes: the mesh axes that slots are divided over; () = each device has all slots of its heads.
      slot_parts: the number of devices that slots are divided over.
      by_xla: whether XLA divides the step of slots on several devices; False = `kvjax.cache.context_parallel` does.
      reasons: why no faster kernel runs, and why slots are not divided.
      shares: where heads share their layer's slots, the slots of the average head when the longest prompt ends, and the
        most that a head can get of them; None = each head has a number of slots of its own.
      most_left: while the prompt is read, the largest number of slots per head that a compressor with a merge keeps;
        otherwise None.
      prompt_index: of a prompt, the selection of the decoding phase, if it adds up the prompt's queries and keys.
      decode_group: of a one-shot prompt, the group of the decoding phase, into whose arrays each layer moves its slots;
        None if the prompt is replayed first.
      replay: how the prompt is replayed when it ends, before anything is evicted; None = no replay.
      replaying: whether a step takes tokens of the replay, which are not kept.
      num_layers: the number of layers of the model.
      parallel: how contexts that share positions are attended to; None = there are none.
    """

    heads: tuple[int, ...] | None = None
    policy: Evict = dataclasses.field(default_factory=full)
    storage: Storage = dataclasses.field(default_factory=dense)
    selection: Selection = dataclasses.field(default_factory=everything)
    needs: frozenset[Statistic] = frozenset()
    memory: tuple[RowMemory, ...] = ()
    queries: int = 1
    writes: tuple[Written, ...] = ()
    slots: tuple[int, ...] = ()
    array_sizes: ArraySizes | None = None
    decoding: bool = False
    evicts_one: bool = True
    attn_implementation: Implementation = "xla"
    step_implementation: Implementation | None = None
    slot_axes: tuple[str, ...] = ()
    slot_parts: int = 1
    by_xla: bool = False
    reasons: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    shares: tuple[int, int] | None = dataclasses.field(default=None, compare=False)
    most_left: int | None = None
    prompt_index: Selection | None = None
    decode_group: "Group | None" = None
    replay: Replay | None = None
    replaying: bool = False
    num_layers: int = 1
    parallel: ParallelContexts | None = None

    @property
    def in_pages(self) -> bool:
        """Whether neighbouring tokens share pages, so that they must lie in neighbouring slots."""
        return self.policy.page > 1 or type(self.selection).write is not Selection.write

    @property
    def sparse_prompt(self) -> QueryBlocks | None:
        """How the queries of a prompt read pages; None if they read everything, and while decoding."""
        return None if self.decoding else self.selection.prompt

    @property
    def per_head(self) -> frozenset[str]:
        """The names of arrays of the index that a head has once; see `Selection.per_head`."""
        return (self.prompt_index or self.selection).per_head

    @property
    def stores(self) -> tuple[Storage, ...]:
        """How the slots of each store are held."""
        return self.arrangement.stores(self.storage)

    @property
    def arrangement(self) -> Arrangement:
        """How the slots lie in arrays."""
        return arrangement_of(self.storage)

    @property
    def codecs(self) -> tuple[Codec | None, Codec | None]:
        """The codecs of keys and values that attention reads as they are held; None = it reads them decoded.

        Keys that are rotated in each step, and slots that are gathered, are decoded; see
        `kvjax.cache.step.operands.pieces`.
        """
        storage = self.storage
        late = self.policy.positions == "cache" or storage.frame == UNROTATED or storage.shortened
        if (
            not self.arrangement.codes_readable
            or late
            or storage.on_host
            or not (self.slots and self.selection.reads_all)
        ):
            return None, None
        key, value = (codec if isinstance(codec, Codec) else None for codec in (storage.key, storage.value))
        return (None if isinstance(key, Exact) else key), (None if isinstance(value, Exact) else value)

    @property
    def reports(self) -> frozenset[Statistic]:
        """The statistics that attention reports: those that are kept, and what the selection looks at."""
        return frozenset(s for s in self.needs | self.selection.needs if not s.of_selection)

    @property
    def remembers(self) -> tuple[str, ...]:
        """The names of statistics that attention does not report, [B, K, S] float32."""
        own = (*self.policy.remembers, *(score.name for score in self.writes))
        return (*dict.fromkeys(own), *((RANK,) if self.holds_ranks else ()))

    @property
    def holds_ranks(self) -> bool:
        """Whether the slots of each device hold their ranks; see `kvjax.cache.context_parallel.position_ranks`."""
        return bool(self.slot_axes) and not self.by_xla and self.policy.positions == "cache" and not self.known_ranks

    @property
    def known_ranks(self) -> bool:
        """Whether positions alone say what is held, and so the rank of each slot: the first and the newest."""
        policy = self.policy
        first = isinstance(policy.scope, First | Unprotected) and policy.page == 1
        return first and policy.importance.by_age and self.evicts_one and policy.when == "step"

    @property
    def evicts(self) -> bool:
        """Whether slots are ever freed."""
        return self.policy.budget is not None

    @property
    def has_budget(self) -> bool:
        """Whether rows have a number of slots that is data in the state."""
        return self.evicts or self.selection.budget is not None

    @property
    def parts(self) -> int:
        """See `LayerKV.parts`."""
        return self.slot_parts if len(self.slots) > 1 and not self.by_xla else 1

    @property
    def capacity(self) -> int:
        """Slots of all stores."""
        return sum(self.slots)

    @property
    def unranked(self) -> int:
        """The number of slots, the first of all, that the policy does not rank; they have no statistics."""
        return sum(self.slots[: self.unranked_stores])

    @property
    def unranked_stores(self) -> int:
        """The number of stores, the first of all, whose slots have no statistics."""
        return self.arrangement.unranked_stores(self.selection) if self.slots else 0

    @property
    def gathered(self) -> int | None:
        """The number of slots that a decoding step gathers from the first store; None = it takes the whole store."""
        width = self.selection.width(self.capacity) if self.decoding else None
        # A token that is apart from the slots is not gathered.
        width = width if width is None or not self.storage.new_tokens_separate else width - 1
        return None if width is None or width >= self.slots[0] else width

    @property
    def moved(self) -> int:
        """The number of slots per head that a decoding step moves from host memory; 0 if the slots are not there."""
        if not self.storage.on_host:
            return 0
        return self.slots[0] if self.gathered is None else self.gathered


#: Per layer, its groups of heads.
Phase = tuple[tuple[Group, ...], ...]


@functools.cache
def keep_everything(num_layers: int) -> Phase:
    """Returns the groups of a prompt in one shot whose tokens are all kept, for a decoder without a layout."""
    return ((Group(),),) * num_layers
