"""Lowering: turns a `CacheSpec` into a `CacheLayout` and a batch's budgets.

This is the only code that decides on groups of heads, phases, capacities and kernels. It runs on the host before
anything is traced, and refuses every combination that cannot work.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.attention import Implementation
from kvjax.cache.kernels import Chooser
from kvjax.cache.layout import CacheLayout, Group, stores_of
from kvjax.cache.limits import Sizes, slots_bucket
from kvjax.cache.spec import CacheSpec
from kvjax.errors import PolicyError
from kvjax.memory import HOST
from kvjax.models.config import DecoderConfig
from kvjax.policies.base import Evict, Policy, keep, named
from kvjax.policies.budget import Budget, Fraction, FromLayer, PerLayer, Pyramid, Shared, batch_slots
from kvjax.policies.h2o_variants import WithSelection
from kvjax.policies.heads import Split
from kvjax.policies.phases import Phases
from kvjax.policies.pools import protecting
from kvjax.selection import everything
from kvjax.selection.base import Selection
from kvjax.storage import dense


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

    def in_layer(self, layer: int) -> "Branch":
        """Returns the branch with policies that keep everything in layers before those that a budget is for."""

        def own(policy: Evict) -> Evict:
            if policy.budget is None or layer >= policy.budget.first_layer:
                return policy
            return Evict(
                importance=keep, budget=None, positions=policy.positions, group_reduce=policy.group_reduce,
                name=policy.name,
            )  # fmt: skip

        prompt = own(self.prompt)
        return self._replace(prompt=prompt, decode=prompt if self.decode is self.prompt else own(self.decode))

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


class Budgets(NamedTuple):
    """Per layer and group, [B] int32 slots per KV head, or None where every token is kept."""

    prompt: tuple[tuple[np.ndarray | None, ...], ...]
    decode: tuple[tuple[np.ndarray | None, ...], ...]


class Lowered(NamedTuple):
    """A layout, which is static, and a batch's budgets, which are data."""

    layout: CacheLayout
    budgets: Budgets


def lower(
    spec: CacheSpec,
    config: DecoderConfig,
    sizes: Sizes,
    lengths: np.ndarray,
    *,
    implementation: Implementation = "auto",
    platform: str = "cpu",
    dtype: DTypeLike = "float32",
    totals: np.ndarray | None = None,
) -> Lowered:
    """Resolves heads, phases, capacities, storages and kernels, for the mesh in force (`jax.set_mesh`).

    Args:
      spec: policy, storage and selection.
      config: of the decoder.
      sizes: what is allocated for.
      lengths: [B] tokens of each row's prompt.
      implementation: of attention and of whole steps; ``auto`` may fall back, a name raises where it cannot run.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      dtype: of keys and values.
      totals: [B] tokens that each row will hold in all; None = as many as there is room for.

    Raises:
      PolicyError: a combination, a budget or a table of heads that cannot work.
      ConfigError: an implementation asked for by name whose attention cannot run.
    """
    name = spec.name
    if spec.storage.residual >= sizes.total:
        # No token becomes old enough to be coded.
        spec = dataclasses.replace(spec, storage=dense())
    branches = [branch.protecting() for branch in _branches(spec.policy, spec.selection, config)]
    for branch in branches:
        _check(spec, branch, sizes)
    prompt_groups: list[tuple[Group, ...]] = []
    decode_groups: list[tuple[Group, ...]] = []
    prompt_budgets: list[tuple[np.ndarray | None, ...]] = []
    decode_budgets: list[tuple[np.ndarray | None, ...]] = []
    totals = lengths + sizes.following if totals is None else totals
    resolved = [_budgets(branch, lengths, totals, config.num_layers) for branch in branches]
    sized = [_largest(branch, config.num_layers, sizes) for branch in branches]
    kernels = Chooser(config, sizes, implementation, platform, dtype)
    for layer in range(config.num_layers):
        before: list[Group] = []
        after: list[Group] = []
        first: list[np.ndarray | None] = []
        then: list[np.ndarray | None] = []
        for branch, budgets, most in zip(branches, resolved, sized, strict=True):
            heads = None if branch.heads is None else branch.heads[layer]
            if heads == ():
                continue
            own = branch.in_layer(layer)
            limited = [own.selection.budget is not None or each.budget is not None for each in (own.prompt, own.decode)]
            largest = [each[layer] if each and limits else None for each, limits in zip(most, limited, strict=True)]
            early, late = _groups(spec, own, layer, heads, largest, config, sizes, kernels)
            before.append(early)
            after.append(late)
            for rows, limits, into in zip(budgets, limited, (first, then), strict=True):
                into.append(rows[layer] if rows is not None and limits else None)
        prompt_groups.append(tuple(before))
        decode_groups.append(tuple(after))
        prompt_budgets.append(tuple(first))
        decode_budgets.append(tuple(then))
    layout = CacheLayout(
        prompt=tuple(prompt_groups), decode=tuple(decode_groups), block=sizes.block, name=name,
        kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=str(jnp.dtype(dtype)),
    )  # fmt: skip
    return Lowered(layout, Budgets(tuple(prompt_budgets), tuple(decode_budgets)))


def _branches(policy: Policy, selection: Selection, config: DecoderConfig) -> list[Branch]:
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
        branches += [branch._replace(heads=heads) for branch in _branches(own, reads, config)]
    if not selection.reads_all and all(branch.selection.reads_all for branch in branches):
        raise PolicyError(
            f"policy {policy.name}: none of its heads keeps every token, so that selection={selection!r} has "
            "nothing to choose from; leave it out."
        )
    return branches


def _check(spec: CacheSpec, branch: Branch, sizes: Sizes) -> None:
    selection, name = branch.selection, spec.policy.name
    if reason := selection.refuses(spec.policy, spec.storage, positions=branch.decode.positions):
        raise PolicyError(f"policy {name} with selection={selection!r}: {reason}")
    if spec.storage.apart and spec.storage.residual and max(branch.prompt.page, branch.decode.page) > 1:
        raise PolicyError(
            f"policy {name} with storage={spec.storage!r}: a page is consecutive slots of one store, and a residual "
            "holds the newest tokens in another; use residual=0."
        )
    if spec.storage.on_host and (reason := _refuses_host(spec, branch, sizes)):
        raise PolicyError(f"policy {name} with storage={spec.storage!r}: {reason}")
    if selection.whole_text:
        if sizes.following:
            raise PolicyError(
                f"policy {name}: it looks at all queries of a text, later ones too, so that no token can follow the "
                "prompt; score whole texts, with prompt_length their length."
            )
        if sizes.block is not None:
            raise PolicyError(f"policy {name}: it looks at all of a text at once; leave out prefill_block.")
    summarizes = not selection.in_prompt and bool(jax.eval_shape(lambda: selection.init((1, 1, 1), 1, jnp.float32)))
    if summarizes and sizes.block is not None and not spec.storage.exact:
        raise PolicyError(
            f"policy {name}: selection={selection!r} summarises exact keys, which storage={spec.storage.name} no "
            "longer has after a block of the prompt; leave out prefill_block."
        )


def _refuses_host(spec: CacheSpec, branch: Branch, sizes: Sizes) -> str | None:
    """Returns why a pool cannot be in host memory, as a sentence; None if it can."""
    # A prompt in one shot is on the device.
    policies = (branch.decode,) if sizes.block is None else (branch.prompt, branch.decode)
    if any(policy.merge is not None for policy in policies):
        return "a merge changes slots anywhere in a pool, which must be on the device; use memory='device'."
    if branch.selection.reads_all:
        # Every slot moves to the device in each step, where a policy may look at it too.
        return None
    if branch.decode.positions == "cache" and spec.storage.memories["key"] == HOST:
        return (
            "positions='cache' rotates every key in each step, so that all of them would move; keep keys on the device."
        )
    looked = set(branch.decode.reads)
    if branch.selection.ranks_by_keys:
        looked.add("key")
    moved = sorted(side for side in looked if spec.storage.memories[side] == HOST)
    if moved:
        return (
            f"slots are ranked by every {' and '.join(moved)}, so that reading few of them would still move all of "
            "them in each step; keep these on the device, such as memory=('device', 'host') for keys."
        )
    return None


def _budgets(
    branch: Branch, lengths: np.ndarray, totals: np.ndarray, layers: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns the slots of the prompt and of decoding, [L, B] int32 each; None where every token is kept."""

    def slots(policy: Evict) -> np.ndarray | None:
        if branch.selection.budget is not None:
            return batch_slots(branch.selection.budget, lengths, layers, branch.selection.check_slots)
        if policy.budget is None:
            return None
        with named(policy.name):
            counted = totals if policy.budget.of_text else lengths
            return batch_slots(policy.budget, counted, layers, functools.partial(branch.check_slots, policy))

    first = slots(branch.prompt)
    return first, first if branch.decode is branch.prompt else slots(branch.decode)


def _largest(branch: Branch, layers: int, sizes: Sizes) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Returns the slots of each layer that arrays are sized for, of the prompt and of decoding."""

    def slots(policy: Evict) -> tuple[int, ...] | None:
        if policy.budget is None or branch.selection.budget is not None:  # hides slots and frees none
            return None
        if policy.budget.of_text:
            return policy.budget.slots(sizes.total, layers)
        return policy.budget.largest(sizes.prompts, layers)

    return slots(branch.prompt), slots(branch.decode)


def _groups(
    spec: CacheSpec,
    branch: Branch,
    layer: int,
    heads: tuple[int, ...] | None,
    budgets: list[int | None],
    config: DecoderConfig,
    sizes: Sizes,
    kernels: Chooser,
) -> tuple[Group, Group]:
    """A group for the prompt and one for decoding; budgets: the largest of the batch, for each phase."""
    own_heads = config.num_kv_heads if heads is None else len(heads)
    if _newest_stay(spec, branch, budgets) and max(b or 0 for b in budgets) <= spec.storage.residual:
        # All that stays is among the newest, which are exact.
        spec = dataclasses.replace(spec, storage=dense())
    prompt, decode = _capacities(spec, branch, budgets, own_heads, sizes)
    whole = branch.selection.dense(layer, config.windows[layer])
    queries = config.num_heads // config.num_kv_heads
    selection = everything() if whole else branch.selection.traced().bound(queries, sizes.following)
    # A prompt is read whole, except by selections that hide slots of it.
    early = selection if selection.in_prompt or selection.whole_text else everything()
    watch = selection if selection.watches else None
    needs = branch.decode.needs
    common: dict[str, Any] = {"heads": heads, "storage": spec.storage}
    after = Group(
        policy=branch.decode.traced(), selection=selection, needs=needs,
        slots=_stores(spec, branch, kernels.round_up(decode), budgets, sizes.following),
        decoding=True, evicts_one=branch.evicts_one, **common,
    )  # fmt: skip
    after = kernels.decode(after, own_heads)
    before = Group(
        policy=branch.prompt.traced(), selection=early, needs=needs | branch.prompt.needs,
        slots=() if sizes.block is None else _stores(spec, branch, kernels.round_up(prompt), budgets),
        watch=watch, decode_group=after if sizes.block is None else None, **common,
    )  # fmt: skip
    return kernels.prompt(before, own_heads), after


def _capacities(
    spec: CacheSpec, branch: Branch, budgets: list[int | None], kv_heads: int, sizes: Sizes
) -> tuple[int, int]:
    """Slots per head of the arrays: while the prompt goes in block by block, and while decoding.

    Where a step's own tokens are apart (`Storage.apart`), they take none.
    """
    whole, total = sizes.prompt, sizes.total
    first, then = budgets
    room = 0 if spec.storage.apart else 1  # for the step's own token

    def up(slots: int, policy: Evict) -> int:
        return slots_bucket(slots) if sizes.rounded and follows_prompt(policy.budget) else slots

    if branch.prompt.when == "step":
        if first is None:
            return total, total
        if branch.prompt.page > 1:
            # Also where the step's own tokens are apart: which slots they will have is known before any is freed.
            page = branch.prompt.page
            return _in_pages(first, sizes.block or 1, page, total), _in_pages(first, 1, page, total)
        block = 0 if spec.storage.apart else (sizes.block or 1)
        return min(up(first + block, branch.prompt), total), min(up(first + room, branch.prompt), total)
    assert first is not None and branch.prompt.budget is not None
    left = min(branch.prompt.budget.widest(branch.prompt, first, kv_heads), sizes.budget_prompt)
    left = up(left, branch.prompt)
    if then is None:
        return whole, left + sizes.following
    if branch.decode.page > 1:
        return whole, max(left + room, _in_pages(then, 1, branch.decode.page, total))
    return whole, max(left + room, min(up(then + room, branch.decode), total))


def _in_pages(slots: int, new: int, page: int, total: int) -> int:
    """Returns the slots of arrays whose pages are evicted as a whole, for `new` tokens of a step."""
    return -(-min(slots // page * page + -(-new // page) * page, total) // page) * page


def _newest_stay(spec: CacheSpec, branch: Branch, budgets: list[int | None]) -> bool:
    """Returns whether the tokens that a residual keeps exact are never evicted while decoding."""
    if branch.decode.budget is None or branch.prompt.when != "step":
        return False
    return all(
        each is not None and policy.keeps_newest(each) >= min(spec.storage.residual, each)
        for policy, each in zip((branch.prompt, branch.decode), budgets, strict=True)
    )


def _stores(
    spec: CacheSpec, branch: Branch, slots: int, budgets: list[int | None], following: int = 0
) -> tuple[int, ...]:
    """Returns the slots of each store: the encoded ones, and those of the newest tokens, which are exact.

    Args:
      spec: which has the storage.
      branch: the policies.
      slots: the most slots that a head holds between steps.
      budgets: the largest of the batch, for each phase.
      following: the most tokens that follow a prompt while these arrays are in use.
    """
    residual = spec.storage.residual
    if len(stores_of(spec.storage)) == 1:
        return (slots,)
    exact = min(residual, slots)
    if branch.decode.budget is not None:
        # Where the newest tokens may be evicted, all that stays may be encoded.
        return (slots - exact if _newest_stay(spec, branch, budgets) else slots), exact
    # A compressor may drop the newest tokens of the prompt. Those that follow stay, and the newest of them are exact.
    return slots - (exact if branch.prompt.budget is None else min(exact, following)), exact


def follows_prompt(budget: Budget | None) -> bool:
    """Whether a budget's number of slots depends on the prompt's length."""
    match budget:
        case Fraction() | Pyramid():
            return True
        case FromLayer(inner, _):
            return follows_prompt(inner)
        case PerLayer(layers):
            return any(isinstance(each, Fraction) for each in layers)
        case Shared(average):
            return follows_prompt(average)
    return False
