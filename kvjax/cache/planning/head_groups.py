"""Which heads of a model have which policy in which phase."""

import dataclasses
import functools
from typing import NamedTuple

from kvjax.errors import PolicyError, StorageError
from kvjax.models.config import DecoderConfig
from kvjax.policies.base import Evict, Policy, keep
from kvjax.policies.budget import Budget, Fraction, Slots
from kvjax.policies.components import Merge
from kvjax.policies.h2o_variants import WithSelection
from kvjax.policies.heads import Split
from kvjax.policies.layers import SplitLayers
from kvjax.policies.phases import Phases
from kvjax.policies.pools import protecting
from kvjax.policies.reach import in_window, slots_in_window
from kvjax.selection.base import Selection
from kvjax.selection.everything import everything
from kvjax.storage.base import Storage


class Branch(NamedTuple):
    """The policies of some KV heads, one for each phase.

    Attributes:
      heads: per layer, the model's KV heads, where None = all and () = none; None = all of every layer.
      prompt: ranks while the prompt goes in.
      decode: ranks while decoding.
      evicts_one: whether a decoding step evicts at most one slot per head.
      selection: what these heads read.
    """

    heads: tuple[tuple[int, ...] | None, ...] | None
    prompt: Evict
    decode: Evict
    evicts_one: bool
    selection: Selection

    @property
    def divides_heads(self) -> bool:
        """Whether the branch has only some of the heads of a layer."""
        return self.heads is not None and any(self.heads)

    def in_layer(self, layer: int, window: int | None) -> "Branch":
        """Returns the branch with the policies of one layer.

        They keep everything in layers before those that a budget is for. In a layer with a sliding window, tokens that
        the window has left are evicted first.

        Args:
          layer: index of the layer.
          window: the number of newest positions that a query sees, its own included; None = all.
        """

        def own(policy: Evict) -> Evict:
            if policy.budget is None or layer >= policy.budget.first_layer:
                return policy if window is None else in_window(policy, window)
            return Evict(
                importance=keep, budget=None, positions=policy.positions, group_reduce=policy.group_reduce,
                name=policy.name,
            )  # fmt: skip

        prompt = own(self.prompt)
        if self.decode is self.prompt:
            return self._replace(prompt=prompt, decode=prompt)
        # One policy may keep its budget while the other is limited to the window's slots (see `slots_in`), or may keep
        # tokens of the prompt that leave the window during decoding: a step then evicts several slots.
        one = self.evicts_one and (window is None or self.decode.budget is None)
        return self._replace(prompt=prompt, decode=own(self.decode), evicts_one=one)

    def slots_in(self, policy: Evict, slots: int, window: int | None) -> int:
        """Returns the slots that a layer needs of a budget; see `in_layer`."""
        return slots if window is None else slots_in_window(slots, window, functools.partial(self.check_slots, policy))

    def protecting(self) -> "Branch":
        """Returns the branch with policies that do not evict what the selection always reads, for want of a choice."""
        sinks, recent = self.selection.ends
        prompt = protecting(self.prompt, sinks, recent)
        decode = prompt if self.decode is self.prompt else protecting(self.decode, sinks, recent)
        return self._replace(prompt=prompt, decode=decode)

    def check_slots(self, policy: Evict, slots: int) -> None:
        """Checks a budget of `slots`.

        Raises:
          PolicyError: the policy protects more, or the selection always reads as many.
        """
        policy.check_slots(slots)
        always = sum(self.selection.ends)
        if always >= slots:
            raise PolicyError(
                f"the selection {self.selection.name} always reads {always} slots, and the budget has {slots}; raise "
                f"the budget to at least {always + 1}."
            )


def branches_of(policy: Policy, selection: Selection, config: DecoderConfig) -> list[Branch]:
    """Resolves a policy into branches, each for some heads.

    Args:
      policy: as a user gives it.
      selection: applies to the heads that keep every token.
      config: of the decoder.

    Raises:
      PolicyError: a table of heads or policies of layers that are not for this model, or a selection that
        applies to no head.
    """
    match policy:
        case Evict(when="step"):
            early = policy.budget is not None and policy.budget.evicts_early
            return [Branch(None, policy, policy, policy.every == 1 and not early, selection)]
        case Evict():
            append = Evict(
                importance=keep, budget=None, positions=policy.positions, merge=_after(policy), name="append"
            )
            return [Branch(None, policy, append, True, selection)]
        case Phases():
            # If the two policies reduce differently, one of them needs no attention.
            reduce = policy.group_reduce
            first = dataclasses.replace(policy.prompt, group_reduce=reduce)
            merge = _after(policy.prompt) or policy.decode.merge
            decode = dataclasses.replace(policy.decode, group_reduce=reduce, merge=merge)
            # The ranks of slots follow from a policy that evicts one slot in each step if no other chose the slots.
            early = decode.budget is not None and decode.budget.evicts_early
            one = policy.positions == "original" and decode.every == 1 and not early
            one &= _has_room(first.budget, decode.budget)
            return [Branch(None, first, decode, one, selection)]
        case WithSelection():
            return [Branch(None, policy.keep, policy.keep, True, selection)]
        case Split():
            return _split(policy, selection, config)
        case SplitLayers():
            return _split_layers(policy, selection, config)
    raise PolicyError(f"{policy!r} is not a policy; make one with kvjax.policies, such as h2o(budget=256).")


def _after(compressor: Evict) -> Merge | None:
    """Returns the merge of the policy that decodes after a compressor."""
    return None if compressor.merge is None else compressor.merge.afterwards()


def _has_room(before: Budget | None, after: Budget | None) -> bool:
    """Returns whether a budget is known to be no smaller than the one before it, for a prompt of any length."""
    if after is not None and after.beyond_prompt:
        return True
    match before, after:
        case Slots(), Slots():
            return after.count >= before.count
        case Fraction(), Fraction():
            return after.fraction >= before.fraction and after.min_slots >= before.min_slots
    return False


def _split(policy: Split, selection: Selection, config: DecoderConfig) -> list[Branch]:
    table = policy.heads
    if (len(table), len(table[0])) != (config.num_layers, config.num_kv_heads):
        raise PolicyError(
            f"policy {policy.name}: its table has {len(table)} layers of {len(table[0])} KV heads; this model has "
            f"{config.num_layers} layers of {config.num_kv_heads}."
        )
    branches = []
    for mark, own in ((True, policy.chosen), (False, policy.others)):
        heads = policy.members(mark)
        # Heads that evict read all that they hold; a selection is for those that keep everything.
        reads = selection if own.budget is None else everything()
        branches += [branch._replace(heads=heads) for branch in branches_of(own, reads, config)]
    _check_selected(policy, "heads", selection, branches)
    return branches


def _split_layers(policy: SplitLayers, selection: Selection, config: DecoderConfig) -> list[Branch]:
    branches, layers = [], policy.of_layers(config.num_layers)
    for own in dict.fromkeys(layers):
        heads = tuple(None if each == own else () for each in layers)
        # As with `Split`, a selection applies only to layers that keep every token.
        reads = selection if own.budget is None else everything()
        branches += [branch._replace(heads=heads) for branch in branches_of(own, reads, config)]
    _check_selected(policy, "layers", selection, branches)
    return branches


def _check_selected(policy: Policy, parts: str, selection: Selection, branches: list[Branch]) -> None:
    """Checks that a selection applies to some of the heads or layers of a policy.

    Raises:
      PolicyError: it applies to none.
    """
    if not selection.reads_all and all(branch.selection.reads_all for branch in branches):
        raise PolicyError(
            f"policy {policy.name}: none of its {parts} keeps every token, so that selection={selection!r} has "
            "nothing to choose from; leave it out."
        )


@functools.lru_cache(maxsize=64)
def by_head(storage: Storage, layers: int, kv_heads: int) -> tuple[tuple[Storage, ...], ...]:
    """Returns how each KV head of each layer is held.

    Args:
      storage: of all.
      layers: the number of layers.
      kv_heads: KV heads of a layer.

    Raises:
      StorageError: a storage for another number of layers or heads.
    """
    of_layers = [storage.of_layer(layer, layers) for layer in range(layers)]
    return tuple(tuple(own.of_head(head, kv_heads) for head in range(kv_heads)) for own in of_layers)


def group_by_storage(branches: list[Branch], storage: Storage, config: DecoderConfig) -> list[Branch]:
    """Divides branches whose heads a storage holds in different ways, so that those of each are held alike.

    Args:
      branches: from `branches_of`.
      storage: of all layers and heads.
      config: of the decoder.

    Raises:
      StorageError: a policy or a selection that ranks the heads of a layer together.
    """
    held = by_head(storage, config.num_layers, config.num_kv_heads)
    made = []
    for branch in branches:
        # Per layer, the heads that are held alike, in the order of the first of each.
        kinds: list[list[tuple[int, ...]]] = []
        for layer, own in enumerate(held):
            found: dict[Storage, list[int]] = {}
            heads = None if branch.heads is None else branch.heads[layer]
            for head in range(len(own)) if heads is None else heads:
                found.setdefault(own[head], []).append(head)
            kinds.append([tuple(heads) for heads in found.values()])
        count = max(map(len, kinds))
        if count <= 1:
            made.append(branch)
            continue
        _check_separate_heads(branch, storage)
        for number in range(count):
            some = tuple(each[number] if number < len(each) else () for each in kinds)
            made.append(branch._replace(heads=some))
    return made


def _check_separate_heads(branch: Branch, storage: Storage) -> None:
    """Checks that the heads of a layer can be in several groups.

    Raises:
      StorageError: they cannot.
    """
    for policy in (branch.prompt, branch.decode):
        if policy.importance.shared_by_heads or (policy.budget is not None and policy.budget.shared):
            raise StorageError(
                f"storage {storage.name} with policy {policy.name}: it holds the KV heads of a layer in different "
                "ways, and the policy ranks them together; use the same rank for all heads of a layer, or a policy "
                "that ranks each head by itself, such as h2o or tova(share_heads=False)."
            )
    if not branch.selection.reads_all:
        raise StorageError(
            f"storage {storage.name} with selection={branch.selection!r}: it holds the KV heads of a layer in "
            "different ways, and a selection chooses for all of them; use the same rank for all heads of a layer, or "
            "leave it out."
        )
