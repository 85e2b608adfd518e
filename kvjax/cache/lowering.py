"""Lowering: from what a user says to what a program knows.

The only code that knows heads, phases, capacities and kernels. Everything that cannot work is refused here, on the
host, before anything is traced.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.attention import Implementation
from kvjax.cache.kernels import Chooser
from kvjax.cache.layout import CacheLayout, Group, stores_of
from kvjax.cache.limits import Sizes, slots_bucket
from kvjax.cache.spec import CacheSpec
from kvjax.errors import PolicyError
from kvjax.models.config import DecoderConfig
from kvjax.policies.base import Evict, Policy, keep, named
from kvjax.policies.budget import Budget, Fraction, PerLayer, Pyramid, Shared, batch_slots
from kvjax.policies.h2o_variants import Reads
from kvjax.policies.heads import Split
from kvjax.policies.phases import Phases
from kvjax.selection import everything
from kvjax.selection.base import Selection
from kvjax.storage import dense


class Branch(NamedTuple):
    """The policies of some KV heads, one for each phase.

    Attributes:
      heads: per layer, the model's KV heads; None = all of every layer.
      prompt: ranks while the prompt goes in.
      decode: ranks while decoding.
      single: whether decoding finds at most one slot of a head over its limit.
      selection: what these heads read.
    """

    heads: tuple[tuple[int, ...], ...] | None
    prompt: Evict
    decode: Evict
    single: bool
    selection: Selection


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

    Raises:
      PolicyError: a combination, a budget or a table of heads that cannot work.
      ConfigError: an implementation asked for by name whose attention cannot run.
    """
    name = spec.name
    if spec.storage.residual >= sizes.total:
        # No token becomes old enough to be coded.
        spec = dataclasses.replace(spec, storage=dense())
    branches = _branches(spec.policy, spec.selection, config)
    for branch in branches:
        _check(spec, branch, sizes)
    prompt_groups: list[tuple[Group, ...]] = []
    decode_groups: list[tuple[Group, ...]] = []
    prompt_budgets: list[tuple[np.ndarray | None, ...]] = []
    decode_budgets: list[tuple[np.ndarray | None, ...]] = []
    resolved = [_budgets(branch, lengths, config.num_layers) for branch in branches]
    # No row may have the length that arrays are sized for: its budgets need not be ones that work.
    nominal = [_budgets(branch, np.array([sizes.nominal]), config.num_layers, check=False) for branch in branches]
    kernels = Chooser(config, sizes, implementation, platform, dtype)
    for layer in range(config.num_layers):
        before: list[Group] = []
        after: list[Group] = []
        first: list[np.ndarray | None] = []
        then: list[np.ndarray | None] = []
        for branch, budgets, typical in zip(branches, resolved, nominal, strict=True):
            heads = None if branch.heads is None else branch.heads[layer]
            if heads == ():
                continue
            largest = [
                None if own is None or usual is None else max(int(own[layer].max()), int(usual[layer].max()))
                for own, usual in zip(budgets, typical, strict=True)
            ]
            early, late = _groups(spec, branch, layer, heads, largest, config, sizes, kernels)
            before.append(early)
            after.append(late)
            for rows, into in zip(budgets, (first, then), strict=True):
                into.append(None if rows is None else rows[layer])
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
        case Reads():
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
    if selection.whole_text:
        if sizes.following:
            raise PolicyError(
                f"policy {name}: it looks at all queries of a text, later ones too, and cannot go on after the "
                f"prompt ({sizes.following} tokens follow here); score whole texts, with prompt_length their length."
            )
        if sizes.block is not None:
            raise PolicyError(f"policy {name}: it looks at all of a text at once; leave out prefill_block.")
    summarizes = not selection.in_prompt and bool(selection.init((1, 1, 1), 1, jnp.float32))
    if summarizes and sizes.block is not None and not spec.storage.exact:
        raise PolicyError(
            f"policy {name}: selection={selection!r} summarises exact keys, which storage={spec.storage.name} no "
            "longer has after a block of the prompt; leave out prefill_block."
        )


def _budgets(
    branch: Branch, lengths: np.ndarray, layers: int, *, check: bool = True
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """[L, B] int32 slots of the prompt and of decoding; None where every token is kept."""

    def slots(policy: Evict) -> np.ndarray | None:
        hides = branch.selection.budget is not None
        budget = branch.selection.budget if hides else policy.budget
        if budget is None:
            return None
        refuse = branch.selection.check_slots if hides else policy.check_slots
        with named(policy.name):
            return batch_slots(budget, lengths, layers, refuse if check else lambda slots: None)

    first = slots(branch.prompt)
    return first, first if branch.decode is branch.prompt else slots(branch.decode)


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
    prompt, decode = _capacities(spec, branch, budgets, own_heads, sizes)
    dense = branch.selection.dense(layer, config.windows[layer])
    selection = everything() if dense else branch.selection.traced()
    # A prompt is read whole, except by selections that hide slots of it.
    early = selection if selection.in_prompt or selection.whole_text else everything()
    needs = branch.decode.needs
    common: dict[str, Any] = {"layer": layer, "heads": heads, "storage": spec.storage}
    after = Group(
        policy=branch.decode.traced(), selection=selection, needs=needs,
        slots=_stores(spec, branch, kernels.round_up(decode), sizes.following),
        decoding=True, single=branch.single, **common,
    )  # fmt: skip
    after = kernels.decode(after, own_heads)
    before = Group(
        policy=branch.prompt.traced(), selection=early, needs=needs | branch.prompt.needs,
        slots=() if sizes.block is None else _stores(spec, branch, kernels.round_up(prompt)),
        into=after if sizes.block is None else None, **common,
    )  # fmt: skip
    return kernels.prompt(before, own_heads), after


def _capacities(
    spec: CacheSpec, branch: Branch, budgets: list[int | None], kv_heads: int, sizes: Sizes
) -> tuple[int, int]:
    """Slots per head of the arrays: while the prompt goes in block by block, and while decoding.

    Where slots are held in a code, a step's own tokens are apart and take none.
    """
    whole, total = sizes.prompt, sizes.total
    first, then = budgets
    if branch.selection.budget is not None:  # hides slots and frees none
        first = then = None
    room = 1 if spec.storage.exact else 0  # for the step's own token

    def up(slots: int, policy: Evict) -> int:
        return slots_bucket(slots) if sizes.rounded and follows_prompt(policy.budget) else slots

    if branch.prompt.when == "step":
        if first is None:
            return total, total
        block = (sizes.block or 1) if spec.storage.exact else 0
        return min(up(first + block, branch.prompt), total), min(up(first + room, branch.prompt), total)
    assert first is not None and branch.prompt.budget is not None
    left = min(branch.prompt.budget.widest(branch.prompt, first, kv_heads), sizes.nominal)
    left = up(left, branch.prompt)
    if then is None:
        return whole, left + sizes.following
    return whole, max(left + room, min(up(then + room, branch.decode), total))


def _stores(spec: CacheSpec, branch: Branch, slots: int, following: int = 0) -> tuple[int, ...]:
    """Slots of each store: those in a code, and the newest, which are exact.

    Args:
      slots: the most that a head holds between steps.
      following: the most tokens that follow a prompt while these arrays are in use.
    """
    residual = spec.storage.residual
    if len(stores_of(spec.storage)) == 1:
        return (slots,)
    exact = min(residual, slots)
    if branch.decode.budget is not None:
        # The newest tokens may be evicted: coded slots may take all that stays.
        return slots, exact
    # A compressor may drop the newest tokens of the prompt; those that follow stay, and the newest of them are exact.
    return slots - (exact if branch.prompt.budget is None else min(exact, following)), exact


def follows_prompt(budget: Budget | None) -> bool:
    """Whether a budget's number of slots depends on the prompt's length."""
    match budget:
        case Fraction() | Pyramid():
            return True
        case PerLayer(layers):
            return any(isinstance(each, Fraction) for each in layers)
        case Shared(average):
            return follows_prompt(average)
    return False
