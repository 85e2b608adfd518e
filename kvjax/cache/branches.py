"""Which heads of a model have which policy in which phase."""

import dataclasses
from functools import partial
from typing import NamedTuple

from kvjax.errors import PolicyError
from kvjax.models.config import DecoderConfig
from kvjax.policies.base import Evict, Policy, keep
from kvjax.policies.h2o_variants import WithSelection
from kvjax.policies.heads import Split
from kvjax.policies.phases import Phases
from kvjax.policies.pools import protecting
from kvjax.policies.reach import in_window, slots_in_window
from kvjax.selection.base import Selection
from kvjax.selection.everything import everything


class Branch(NamedTuple):
    """The policies of some KV heads, one for each phase.

    Attributes:
      heads: per layer, the model's KV heads; None = all of every layer.
      prompt: ranks while the prompt goes in.
      decode: ranks while decoding.
      evicts_one: whether a decoding step evicts at most one slot per head.
      selection: what these heads read.
    """

    heads: tuple[tuple[int, ...], ...] | None
    prompt: Evict
    decode: Evict
    evicts_one: bool
    selection: Selection

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
        return self._replace(prompt=prompt, decode=prompt if self.decode is self.prompt else own(self.decode))

    def slots_in(self, policy: Evict, slots: int, window: int | None) -> int:
        """Returns the slots that a layer needs of a budget; see `in_layer`."""
        return slots if window is None else slots_in_window(slots, window, partial(self.check_slots, policy))

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
      PolicyError: a table of heads that is not of this model's shape, or a selection that applies to no head.
    """
    match policy:
        case Evict(when="step"):
            return [Branch(None, policy, policy, True, selection)]
        case Evict():
            append = Evict(importance=keep, budget=None, positions=policy.positions, name="append")
            return [Branch(None, policy, append, True, selection)]
        case Phases():
            # If the two policies reduce differently, one of them needs no attention.
            reduce = policy.group_reduce
            first = dataclasses.replace(policy.prompt, group_reduce=reduce)
            # The budget of the policy that decodes may be smaller than what the prompt leaves.
            return [Branch(None, first, dataclasses.replace(policy.decode, group_reduce=reduce), False, selection)]
        case WithSelection():
            return [Branch(None, policy.keep, policy.keep, True, selection)]
        case Split():
            return _split(policy, selection, config)
    raise PolicyError(f"{policy!r} is not a policy; make one with kvjax.policies, such as h2o(budget=256).")


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
    if not selection.reads_all and all(branch.selection.reads_all for branch in branches):
        raise PolicyError(
            f"policy {policy.name}: none of its heads keeps every token, so that selection={selection!r} has "
            "nothing to choose from; leave it out."
        )
    return branches
