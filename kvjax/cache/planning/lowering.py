"""Lowering: turns a `CacheSpec` into a `CacheLayout` and a batch's budgets.

This is the only code that decides on groups of heads, phases, capacities and kernels. It runs on the host before
anything is traced, and refuses every combination that cannot work.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.attention import Implementation
from kvjax.cache.arrangements import arrangement_of
from kvjax.cache.groups import Group
from kvjax.cache.planning.capacities import capacities, extent_of, most_left, newest_stay, shares, split_stores
from kvjax.cache.planning.compatibility import check
from kvjax.cache.planning.declared import check_names, check_policy, check_selection, check_storage
from kvjax.cache.planning.head_groups import Branch, branches_of, by_head, group_by_storage
from kvjax.cache.planning.kernel_choice import Chooser
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.planning.prompt_replay import replay_of
from kvjax.cache.spec import CacheSpec
from kvjax.models.config import DecoderConfig, model_sizes
from kvjax.policies.base import Evict, named
from kvjax.policies.budget import batch_slots
from kvjax.selection.everything import everything
from kvjax.storage import dense
from kvjax.storage.base import Storage


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
    name, windows = spec.name, _windows(spec, config)
    spec = dataclasses.replace(spec, storage=spec.storage.bound(config.num_kv_heads))
    branches = _branches(spec, config)
    for held in dict.fromkeys(itertools.chain.from_iterable(_held(spec, config))):
        queries = config.num_heads // config.num_kv_heads
        check_storage(held, config.num_kv_heads, queries, config.head_dim, jnp.dtype(dtype).name)
        # Raises where a codec cannot hold such a head.
        held.bytes_per_slot(config.head_dim, dtype)
    if any(branch.decode.budget is not None for branch in branches):
        # Blocks of which single tokens are evicted are never full.
        spec = dataclasses.replace(spec, storage=spec.storage.by_age() or spec.storage)
    if spec.storage.codes_nothing(sizes.total):
        # No token becomes old enough to be coded, and no block is filled.
        spec = dataclasses.replace(spec, storage=dense())
    for branch in branches:
        _check_declared(branch, config, sizes, jnp.dtype(dtype).name)
        check(spec, branch, sizes, config.num_kv_heads, config.num_layers)
    replay = replay_of(branches, config, sizes, lengths)
    prompt_groups: list[tuple[Group, ...]] = []
    decode_groups: list[tuple[Group, ...]] = []
    totals = lengths + sizes.following if totals is None else totals
    budgets = _all_budgets(branches, lengths, totals, windows)
    sized = [_largest(branch, sizes, windows) for branch in branches]
    kernels = Chooser(config, sizes, implementation, platform, dtype)
    for layer in range(config.num_layers):
        before: list[Group] = []
        after: list[Group] = []
        for branch, largest_budget in zip(branches, sized, strict=True):
            heads = None if branch.heads is None else branch.heads[layer]
            if heads == ():
                continue
            own = branch.in_layer(layer, windows[layer])
            limited = _limited(own)
            largest = [
                each[layer] if each and limits else None for each, limits in zip(largest_budget, limited, strict=True)
            ]
            early, late = _groups(spec, own, layer, heads, largest, config, sizes, kernels)
            if replay is not None:
                # Slots are moved after the replay.
                early = dataclasses.replace(early, decode_group=None, replay=replay)
            before.append(early)
            after.append(late)
        prompt_groups.append(tuple(before))
        decode_groups.append(tuple(after))
    layout = CacheLayout(
        prompt=tuple(prompt_groups), decode=tuple(decode_groups), block=sizes.block, name=name,
        kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=str(jnp.dtype(dtype)), platform=platform,
        sizes=model_sizes(config),
    )  # fmt: skip
    return Lowered(layout, budgets)


def budgets_of(spec: CacheSpec, config: DecoderConfig, lengths: np.ndarray, totals: np.ndarray) -> Budgets:
    """Returns the budgets of rows without lowering: those that `lower` returns with the layout.

    Args:
      spec: policy, storage and selection, which have been lowered for rows of these lengths.
      config: of the decoder.
      lengths: see `lower`.
      totals: see `lower`.

    Raises:
      PolicyError: a budget that cannot work for one of the lengths.
    """
    return _all_budgets(_branches(spec, config), lengths, totals, _windows(spec, config))


def _check_declared(branch: Branch, config: DecoderConfig, sizes: Sizes, dtype: str) -> None:
    """Checks what the policies and the selection of a branch compute.

    Raises:
      PolicyError: it is not what they declare.
    """
    kv_heads, dim = config.num_kv_heads, config.head_dim
    for policy, decoding in ((branch.prompt, False), (branch.decode, True)):
        if policy.budget is not None:
            check_policy(policy.traced(), decoding, kv_heads, sizes.total, dim, dtype, config.num_layers)
    queries = config.num_heads // kv_heads
    selection = branch.selection.traced().bound(queries, sizes.following)
    check_selection(selection, kv_heads, queries, sizes.total, dim, dtype)


def _branches(spec: CacheSpec, config: DecoderConfig) -> list[Branch]:
    """Returns the policies of heads that are held alike."""
    branches = [branch.protecting() for branch in branches_of(spec.policy, spec.selection, config)]
    return group_by_storage(branches, spec.storage, config)


def _held(spec: CacheSpec, config: DecoderConfig) -> tuple[tuple[Storage, ...], ...]:
    """Returns how each KV head of each layer is held."""
    return by_head(spec.storage, config.num_layers, config.num_kv_heads)


def _windows(spec: CacheSpec, config: DecoderConfig) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer that budgets and evictions follow."""
    # What a tier or a pair of layers holds is of one order of tokens for all; there, windows only hide tokens.
    return config.windows if arrangement_of(spec.storage).follows_windows else (None,) * config.num_layers


def _all_budgets(
    branches: list[Branch], lengths: np.ndarray, totals: np.ndarray, windows: tuple[int | None, ...]
) -> Budgets:
    """Returns the budgets of every layer and branch that has heads in it."""
    resolved = [_budgets(branch, lengths, totals, windows) for branch in branches]
    prompt: list[tuple[np.ndarray | None, ...]] = []
    decode: list[tuple[np.ndarray | None, ...]] = []
    for layer, window in enumerate(windows):
        here = [
            (rows, _limited(branch.in_layer(layer, window)))
            for branch, rows in zip(branches, resolved, strict=True)
            if branch.heads is None or branch.heads[layer] != ()
        ]
        for number, into in enumerate((prompt, decode)):
            own = [(rows[number], limited[number]) for rows, limited in here]
            into.append(tuple(rows[layer] if rows is not None and limited else None for rows, limited in own))
    return Budgets(tuple(prompt), tuple(decode))


def _limited(branch: Branch) -> tuple[bool, bool]:
    """Returns whether the heads of a layer have a number of slots, in the prompt and while decoding."""
    first, then = (
        branch.selection.budget is not None or each.budget is not None for each in (branch.prompt, branch.decode)
    )
    return first, then


def max_positions(lowered: Lowered, lengths: np.ndarray, totals: np.ndarray, block: int | None) -> int:
    """Returns the number of positions that RoPE has to tell apart: tokens, or ranks in the cache.

    Args:
      lowered: from `lower`.
      lengths: [B] tokens of each row's prompt.
      totals: [B] tokens that each row will hold in all.
      block: tokens of a block of the prompt; None = all of it in one shot.
    """
    layout, budgets = lowered.layout, lowered.budgets
    longest = int(lengths.max())
    replayed = 0 if layout.replay is None else longest + layout.replay.width(longest)
    if all(group.policy.positions == "original" for group in layout.groups):
        return max(int(totals.max()), replayed)
    # A prompt in one shot is attended to before anything is evicted.
    seen = [lengths] if block is None else []
    for befores, afters, firsts, thens in zip(layout.prompt, layout.decode, *budgets, strict=True):
        for before, after, first, then in zip(befores, afters, firsts, thens, strict=True):
            # What evicts at the end of a prompt has held all of it, and appends afterwards.
            slots = first if before.evicts else None
            step = before.policy.when == "step"
            seen.append(
                lengths
                if slots is None or not step
                else np.minimum(lengths, slots + before.policy.every - 1 + (block or 0))
            )
            whole_prompt = after.policy.budget is not None and after.policy.budget.beyond_prompt
            if then is not None and after.evicts and after.policy.when == "step" and not whole_prompt:
                seen.append(np.minimum(totals, then + after.policy.every))
            else:
                seen.append(totals if slots is None else np.minimum(totals, slots + totals - lengths))
    return max(replayed, *(int(each.max()) for each in seen))


def _budgets(
    branch: Branch, lengths: np.ndarray, totals: np.ndarray, windows: tuple[int | None, ...]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns the slots of the prompt and of decoding, [L, B] int32 each; None where every token is kept."""
    layers = len(windows)

    def slots(policy: Evict) -> np.ndarray | None:
        if branch.selection.budget is not None:
            return batch_slots(branch.selection.budget, lengths, layers, branch.selection.check_slots)
        if policy.budget is None:
            return None
        with named(policy.name):
            counted = totals if policy.budget.of_text else lengths
            rows = batch_slots(policy.budget, counted, layers, functools.partial(branch.check_slots, policy))
        own = [
            [branch.slots_in(policy, int(each), window) for each in row]
            for row, window in zip(rows, windows, strict=True)
        ]
        return np.array(own, np.int32).reshape(rows.shape)

    first = slots(branch.prompt)
    return first, first if branch.decode is branch.prompt else slots(branch.decode)


def _largest(
    branch: Branch, sizes: Sizes, windows: tuple[int | None, ...]
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Returns the slots of each layer that arrays are sized for, of the prompt and of decoding."""
    layers = len(windows)

    def slots(policy: Evict) -> tuple[int, ...] | None:
        if policy.budget is None or branch.selection.budget is not None:  # hides slots and frees none
            return None
        if policy.budget.of_text:
            largest_budget = policy.budget.slots(sizes.total, layers)
        else:
            largest_budget = policy.budget.largest(sizes.prompts, layers)
        return tuple(
            branch.slots_in(policy, each, window) for each, window in zip(largest_budget, windows, strict=True)
        )

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
    spec = dataclasses.replace(spec, storage=_held(spec, config)[layer][0 if heads is None else heads[0]])
    most = max(b or 0 for b in budgets) + branch.decode.every - 1
    if newest_stay(spec, branch, budgets) and most <= spec.storage.residual:
        # All that stays is among the newest, which are exact.
        spec = dataclasses.replace(spec, storage=dense())
    storage = arrangement_of(spec.storage).of_layer(spec.storage, branch, layer, config.num_layers, sizes)
    spec = dataclasses.replace(spec, storage=storage)
    prompt, decode = capacities(spec, branch, budgets, own_heads, sizes)
    whole = branch.selection.dense(layer, config.windows[layer])
    queries = config.num_heads // config.num_kv_heads
    selection = everything() if whole else branch.selection.traced().bound(queries, sizes.following)
    # A prompt is read whole, except by selections that hide slots of it.
    sparse = selection.prompt is not None and sizes.prompt > selection.prompt.dense(selection.unit)
    hides = selection.in_prompt or selection.whole_text or sparse
    early = selection if hides else everything()
    prompt_index = selection if selection.watches else None
    needs = branch.decode.needs | spec.storage.needs
    check_names(branch.decode.name, needs | branch.prompt.needs | branch.selection.needs)
    memory = tuple(each.bound(sizes.prompt, queries) for each in branch.decode.memory if not each.per_slot)
    early_memory = (each.bound(sizes.prompt, queries) for each in branch.prompt.memory if not each.per_slot)
    both = tuple(dict.fromkeys((*memory, *early_memory)))
    writes = branch.decode.writes
    both_write = tuple(dict.fromkeys((*writes, *branch.prompt.writes)))
    array_sizes = extent_of(spec, branch, sizes)
    stores = split_stores(spec, branch, kernels.round_up(decode), budgets, sizes.following, array_sizes)
    arrangement = arrangement_of(storage)
    spec = dataclasses.replace(spec, storage=arrangement.sized(storage, stores))
    after = Group(
        heads=heads, storage=spec.storage, policy=branch.decode.traced(), selection=selection, needs=needs,
        memory=memory, queries=queries if memory else 1, writes=writes,
        slots=stores, array_sizes=array_sizes, decoding=True, evicts_one=branch.evicts_one,
        shares=shares(branch, budgets[0], own_heads, sizes), num_layers=config.num_layers,
    )  # fmt: skip
    after = kernels.decode(after, own_heads)
    own = arrangement.prompt_storage(
        spec.storage, compressed=branch.prompt.budget is not None, in_blocks=sizes.block is not None
    )
    spec, array_sizes = dataclasses.replace(spec, storage=own), array_sizes if own == spec.storage else None
    before = Group(
        heads=heads, storage=spec.storage, policy=branch.prompt.traced(), selection=early,
        needs=needs | branch.prompt.needs, array_sizes=array_sizes, memory=both, queries=queries if both else 1,
        writes=both_write,
        slots=() if sizes.block is None else split_stores(spec, branch, kernels.round_up(prompt), budgets),
        most_left=most_left(branch, budgets[0], own_heads, sizes),
        prompt_index=prompt_index, decode_group=arrangement.prompt_end(after) if sizes.block is None else None,
        num_layers=config.num_layers,
    )  # fmt: skip
    return kernels.prompt(before, own_heads), after
