"""The states of prompts in a `kvjax.PrefixStore`: where a prompt begins, and what is kept of it.

Prompts are run in blocks. The cache after some blocks is the same whatever follows them, if nothing that it holds looks
at the end of the prompt; then a prompt that begins like an earlier one begins after the blocks that both have. It runs
the programs that it would run otherwise, on the numbers that it would have otherwise, so that its tokens are equal to
the bit, whatever is in the store.

- A full cache is stored at the end of a prompt, in arrays of its length, and serves every beginning of it. It is stored
  if it continues a stored one, which it replaces, or if a good part of it is new: of prompts that differ in their last
  words only, the first one is enough.
- A cache that evicts, after each block or when the prompt ends, is kept in two forms: after the prompt, for the same
  prompt, and after the blocks that two prompts have in common, once the second one has come. (The trie finds the point,
  as in SGLang's radix tree, arXiv:2312.07104.) Both prompts need equal budgets if blocks evict.
- A cache that depends on the length of the prompt before its end, or remembers more of it than statistics of slots, is
  kept for the same prompt alone, and so is one of prompts in one shot.
"""

import dataclasses
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.groups import Group, Phase
from kvjax.cache.layer_stack import LayerRuns, arranged_state
from kvjax.cache.planning.declared import reads_prompt_length
from kvjax.cache.planning.limits import half_steps
from kvjax.cache.resize import holds_single_slots
from kvjax.cache.state import EMPTY, KVState, LayerKV
from kvjax.contexts.feed import resized_state
from kvjax.contexts.prefix_store import PrefixStore, rotated_by_length
from kvjax.contexts.rewinding import reason_against
from kvjax.contexts.state_trie import Key, State, StateTrie
from kvjax.generation.prefill import GroupBudgets
from kvjax.generation.program import program
from kvjax.models.digest import ParameterKey
from kvjax.parallel import host_memory
from kvjax.policies.traits import compresses_prompts
from kvjax.serve.chunked_prefill import InBlocks, Prompt, Started
from kvjax.serve.prompts import Prompts

Array = jax.Array
NEW_SHARE = 4  # a full cache is stored if at least a 4th of its tokens are not in the store
WHOLE, PART = "whole", "part"  # after a prompt, and after some of its blocks


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """A state of one row in a store.

    Attributes:
      state: the cache.
      logits: [1, V] float32 after the prompt; None for the cache after some of its blocks.
      phase: the groups of heads whose arrays `state` has.
    """

    state: KVState
    logits: Array | None
    phase: Phase


class StoredPrompt:
    """A prompt that is run block by block, after those that were found.

    Attributes:
      step: tokens of a block.
      found: the number of tokens that were found.
    """

    def __init__(self, states: "PromptStates", key: Key, prompt: Prompt, blocks: InBlocks, snapshot: int | None):
        self.step, self.found = blocks.step, blocks.done * blocks.step
        self._states, self._key, self._prompt, self._blocks, self._snapshot = states, key, prompt, blocks, snapshot

    @property
    def state(self) -> KVState:
        """The cache after the last block that was dispatched, in the arrays of the prompt phase."""
        return self._blocks.state

    def advance(self) -> Started | None:
        """Dispatches the next block; returns the prompt's state after the last one, which is then stored."""
        started = self._blocks.advance()
        if started is not None:
            self._states.put_whole(self._key, self._prompt, started, 0)
        elif self._blocks.done == self._snapshot:
            self._states.put_part(self._key, self._prompt, self._blocks)
        return started


class PromptStates:
    """The states of the prompts of a runner."""

    def __init__(self, store: PrefixStore, prompts: Prompts):
        """Says which states can be stored.

        Args:
          store: where they are.
          prompts: runs prompts.
        """
        self._trie: StateTrie = store.trie
        self._prompts = prompts
        layout, model = prompts.lowered_blocks, prompts.model
        self.reason = None
        if scaling := rotated_by_length(model):
            self.reason = f"under {scaling} RoPE, the keys of a prefix depend on the length of the whole text"
        groups = [] if layout is None else [group for layer in layout.prompt for group in layer]
        self._rewinds = layout is not None and reason_against(layout) is None
        # The tokens at the end of a prompt that statistics are of.
        self._tail = max((each.tail or 0 for group in groups for each in group.needs), default=0)
        self._parts = not self._rewinds and layout is not None and all(map(self._same_whatever_follows, groups))
        self._evicts = any(group.evicts and not compresses_prompts(group.policy) for group in groups)
        # Programs, and so the last bits of a state, differ by implementation and sizes, which the layout has, by the
        # number of prompts that run at once, and by the devices that they run on.
        at_once = None if layout is not None else prompts.at_once(1)
        self._kind = (
            ParameterKey(model.params), model.config, prompts.spec, layout or prompts.layout, at_once, model.mesh,
        )  # fmt: skip

    def _same_whatever_follows(self, group: Group) -> bool:
        """Whether what a group holds of a prompt's first blocks does not depend on the rest, its last tokens aside."""
        if not holds_single_slots(group) or group.memory or group.writes or group.prompt_index:
            return False
        if not group.evicts or compresses_prompts(group.policy):
            return True
        config, heads = self._prompts.model.config, group.heads
        return not reads_prompt_length(
            group.policy, config.num_kv_heads if heads is None else len(heads), max(group.slots), config.head_dim,
            self._prompts.layout.dtype,
        )  # fmt: skip

    @property
    def active(self) -> bool:
        """Whether prompts are stored."""
        return self.reason is None

    def explain(self) -> str:
        """Says which prompts find what."""
        if self.reason is not None:
            return f"not used: {self.reason}"
        step = self._prompts.block
        if self._rewinds:
            return f"every beginning of an earlier prompt, in blocks of {step} tokens"
        if self._parts:
            rest = f", at least {self._tail} tokens before the end" if self._tail else ""
            return f"equal prompts, and what two have had in common, in blocks of {step} tokens{rest}"
        return "equal prompts"

    def whole(self, prompt: Prompt, namespace: Hashable) -> Started | None:
        """Returns the state of an equal prompt, or None."""
        key = Key(namespace, self._kind)
        state = self._equal(key, prompt)
        if state is None:
            return None
        self._trie.use(state, len(prompt.tokens))
        stored: Stored = state.value
        assert stored.logits is not None
        return Started(stored.logits, self._resumed(stored, prompt, self._prompts.layout.decode, len(prompt.tokens)))

    def begin(self, prompt: Prompt, namespace: Hashable) -> StoredPrompt:
        """Begins a prompt that is run block by block, after the blocks that are there; see `whole`."""
        key, step, length = Key(namespace, self._kind), self._prompts.block, len(prompt.tokens)
        layout = self._prompts.lowered_blocks
        assert step is not None and layout is not None
        nearest, common = self._trie.nearest(key, prompt.tokens)
        # A token is left to be run. Statistics of the last tokens have not begun.
        common = min(common, length - max(self._tail, 1)) // step * step
        found, done, snapshot = None, 0, None
        if self._rewinds and common > 0:
            found, done = nearest, common
        elif self._parts:
            parts = [each for each in self._trie.along(key, prompt.tokens)
                     if each.label == self._label(prompt, PART) and len(each.tokens) <= common]  # fmt: skip
            found = parts[0] if parts else None
            done = len(found.tokens) if found is not None else 0
            snapshot = common // step if common > done else None
        if found is None:
            self._trie.miss(namespace)
            return StoredPrompt(self, key, prompt, self._prompts.begin(prompt), snapshot)
        self._trie.use(found, done)
        state = self._resumed(found.value, prompt, layout.prompt, done)
        blocks = InBlocks(self._prompts.model, layout, prompt, state=state, done=done // step)
        return StoredPrompt(self, key, prompt, blocks, snapshot)

    def put_one_shot(self, prompt: Prompt, namespace: Hashable, started: Started, source: int) -> None:
        """Stores a prompt that was run in one shot; see `put_whole`."""
        self._trie.miss(namespace)
        self.put_whole(Key(namespace, self._kind), prompt, started, source)

    def put_whole(self, key: Key, prompt: Prompt, started: Started, source: int) -> None:
        """Stores the state of a prompt, if it is worth its bytes.

        Args:
          key: of the store.
          prompt: the prompt.
          started: the states of some prompts.
          source: the row of the prompt.
        """
        phase, replaced = self._prompts.layout.decode, None
        if self._rewinds:
            nearest, common = self._trie.nearest(key, prompt.tokens)
            if nearest is not None and len(nearest.tokens) == common < len(prompt.tokens):
                replaced = nearest
            elif NEW_SHARE * (len(prompt.tokens) - common) < len(prompt.tokens):
                return
        added = self._put(key, prompt, len(prompt.tokens), started.state, started.logits, source, phase)
        if added and replaced is not None:
            self._trie.remove(replaced)

    def put_part(self, key: Key, prompt: Prompt, blocks: InBlocks) -> None:
        """Stores the cache after the blocks of a prompt that were run."""
        layout = self._prompts.lowered_blocks
        assert layout is not None
        self._put(key, prompt, blocks.done * blocks.step, blocks.state, None, 0, layout.prompt)

    def _put(
        self, key: Key, prompt: Prompt, length: int, state: KVState, logits: Array | None, source: int, phase: Phase
    ) -> bool:
        """Copies a row of caches after the first `length` tokens of a prompt into the store, if it has that much room.

        Returns:
          Whether the store has the state.
        """
        after = self._smaller(phase, length)
        # A copy, since a part of the array would keep the rest.
        tokens, row = prompt.tokens[:length].copy(), np.int32(source)
        made = jax.tree.leaves(_copied.eval_shape(state, logits, row, before=phase, after=after))
        nbytes = tokens.nbytes + sum(leaf.size * leaf.dtype.itemsize for leaf in made)
        if nbytes > self._trie.max_bytes:
            return False
        state, logits = _copied(state, logits, row, before=phase, after=after)
        label = self._label(prompt, PART if logits is None else WHOLE)
        return self._trie.add(key, tokens, Stored(state, logits, after), nbytes, label=label)

    def _equal(self, key: Key, prompt: Prompt) -> State | None:
        found = self._trie.along(key, prompt.tokens)
        if not found or len(found[0].tokens) < len(prompt.tokens):
            return None
        label = self._label(prompt, WHOLE)
        return next((each for each in found if len(each.tokens) == len(prompt.tokens) and each.label == label), None)

    def _label(self, prompt: Prompt, of: str) -> Hashable:
        """Returns the budgets that a state depends on; they may count the tokens that will follow the prompt."""
        budgets = prompt.budgets if of == WHOLE else prompt.budgets.prompt if self._evicts else ()
        return of, *(int(each[0]) for each in jax.tree.leaves(budgets))

    def _smaller(self, phase: Phase, length: int) -> Phase:
        """Returns groups with slots for `length` tokens, where they hold all that a prompt leaves and what follows."""
        slots, following = half_steps(length, self._prompts.block or length), self._prompts.limits.new_tokens - 1

        def of_group(group: Group) -> Group:
            before, *others = group.slots
            fixed = others or (group.evicts and not compresses_prompts(group.policy))
            if fixed or not (self._rewinds or (holds_single_slots(group) and not group.slot_axes)):
                return group
            # Nothing follows yet; after a compressor, there are few slots without that.
            fewer = min(slots, before - following if group.decoding else before)
            return group if before <= fewer else dataclasses.replace(group, slots=(fewer,))

        return tuple(tuple(map(of_group, groups)) for groups in phase)

    def _resumed(self, stored: Stored, prompt: Prompt, phase: Phase, length: int) -> KVState:
        """Returns a copy of the first `length` tokens of a state, in the arrays of other groups of heads."""
        model = self._prompts.model
        in_prompt = phase is not self._prompts.layout.decode
        budgets = prompt.budgets.prompt if in_prompt else prompt.budgets.decode
        numbers = [np.array([each], np.int32) for each in (length, len(prompt.tokens), prompt.total)]
        layout = self._prompts.lowered_blocks or self._prompts.layout
        return _resumed(
            stored.state, *model.place((*numbers, budgets)), before=stored.phase, after=phase, runs=layout.runs
        )


@program(static_argnames=("before", "after", "runs"))
def _resumed(
    state: KVState,
    length: Array,
    prompt: Array,
    total: Array,
    budget: GroupBudgets,
    *,
    before: Phase,
    after: Phase,
    runs: LayerRuns,
) -> KVState:
    """Copies the slots of positions before `length`, [1] int32, into the arrays of other groups of heads.

    The layers of `runs` are then in stacks.
    """
    copy: KVState = jax.tree.map(lambda leaf: host_memory.take_rows(leaf, jnp.zeros(1, jnp.int32)), state)
    copy = arranged_state(copy, ())

    def cut(layer: LayerKV) -> LayerKV:
        return layer.replace(position=jnp.where(layer.position < length[:, None, None], layer.position, EMPTY))

    layers = jax.tree.map(cut, copy.layers, is_leaf=lambda each: isinstance(each, LayerKV))
    copy = copy.replace(layers=layers, length=length, prompt=prompt, total=total, budget=budget)
    return arranged_state(resized_state(copy, before, after), runs)


@program(static_argnames=("before", "after"))
def _copied(
    state: KVState, logits: Array | None, row: Array, *, before: Phase, after: Phase
) -> tuple[KVState, Array | None]:
    """Copies a row of prompts' caches, into the arrays of other groups of heads, and of their logits [P, V]."""
    own, after_prompt = jax.tree.map(lambda leaf: host_memory.take_rows(leaf, row[None]), (state, logits))
    return resized_state(own, before, after), after_prompt
