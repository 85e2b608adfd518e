"""Describes a layout in words."""

import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax

from kvjax import products
from kvjax.cache.empty import empty
from kvjax.cache.groups import Group
from kvjax.kernels.decode import coded
from kvjax.parallel.host_memory import HOST
from kvjax.products.used_slots import reads_used_slots
from kvjax.storage.base import UNROTATED, Codec, Exact, Storage
from kvjax.storage.dims import Chain
from kvjax.units import size

if TYPE_CHECKING:
    from kvjax.cache.planning.layout import CacheLayout


def explain(layout: "CacheLayout") -> str:
    """Describes the slots, bytes and kernels of a layout, with a line for each set of layers that are alike.

    A line below gives the reason why a faster kernel does not run. On a CPU the forms of products come last.
    """
    lines = [f"{layout.name}: {size(layout.bytes())} of keys and values per row in {layout.dtype}, {_prompt(layout)}"]
    # Groups that are alike are described once, in the order of their first layers.
    alike: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for layer, groups in enumerate(layout.decode):
        for group in groups:
            own = (*_shares(group, layout), *_policy(group, layout))
            about = (*own, *(f"not {reason}" for reason in group.reasons))
            alike.setdefault((_describe(group, layout), about), []).append(layer)
    for (text, about), layers in alike.items():
        lines.append(f"  layers {_ranges(layers)}: {text}")
        lines += [f"    {line}" for line in about]
    if shared := layout.calibration_bytes():
        lines.append(f"  calibration: {size(shared)} that rows have in common")
    for line, layers in _query_blocks(layout).items():
        lines.append(f"  prompts: layers {_ranges(layers)} {line}")
    prompts = {(group.attn_implementation, group.reasons) for layer in layout.prompt for group in layer}
    for attend, reasons in sorted(prompts):
        lines.append(f"  prompts: attention by {attend}")
        lines += [f"    not {reason}" for reason in reasons]
    if (replay := layout.replay) is not None:
        lines.append(
            f"  prompts: held whole and replayed in chunks of {replay.chunk} tokens before slots are evicted, which "
            f"takes one more {'prefill' if replay.by == 'attention' else 'forward and one backward pass'}"
        )
    for run in layout.runs:
        lines.append(f"  layers {_ranges(run.layers)} run as one loop, which is compiled once for all of them")
    if layout.calls_layers:
        lines.append("  prompts: layers that are alike share a program, which is called for one after the other")
    if not layout.runs and len(layout.decode) > 1 and layout.platform != "cpu":
        whose = "new tokens: " if layout.calls_layers else ""
        steps = [group for layer in layout.decode for group in layer]
        # Kernels of attention alone, and slots elsewhere, are unrolled with weights in stacks too.
        by_slices = all(group.step_implementation or group.attn_implementation == "xla" for group in steps)
        advice = "; KVJAX_LAYER_LOOPS=stacked may compile one for all" if by_slices else ""
        lines.append(f"  {whose}each layer is compiled by itself{advice}")
    if layout.platform == "cpu":
        lines += [f"  {line}" for line in products.explain().splitlines()]
    return "\n".join(lines)


def _query_blocks(layout: "CacheLayout") -> dict[str, list[int]]:
    """Describes what blocks of queries of a prompt read, and the layers where they do."""
    found: dict[str, list[int]] = {}
    for layer, groups in enumerate(layout.prompt):
        for group in groups:
            if (blocks := group.sparse_prompt) is not None:
                page = group.selection.unit
                numbers = (each * page for each in (blocks.before, blocks.sinks, blocks.recent, blocks.pages))
                before, sinks, recent, chosen = numbers
                found.setdefault(
                    f"read pages by {group.selection.name}: each block of {blocks.size} queries its own tokens and at "
                    f"most {before} before it ({sinks} oldest, {recent} newest, {chosen} chosen)",
                    [],
                ).append(layer)
    return found


def _prompt(layout: "CacheLayout") -> str:
    return "the prompt in one shot" if layout.block is None else f"the prompt in blocks of {layout.block}"


def _describe(group: Group, layout: "CacheLayout") -> str:
    heads = layout.kv_heads if group.heads is None else len(group.heads)
    made = jax.eval_shape(functools.partial(empty, group, 1, layout.kv_heads, layout.head_dim, layout.dtype))
    total, index = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(each))
        for each in ((made.stores, made.sides), made.index)
    )
    slots = " + ".join(
        f"{count} {storage.label if storage.new_tokens_separate else 'exact'}"
        for count, storage in zip(group.slots, group.stores, strict=True)
    )
    reads = "" if group.selection.reads_all else f", reads {group.selection.name}"
    width = group.selection.width(group.capacity)
    reads += "" if width is None else f" (at most {width} slots)"
    reads += f" by an index of {size(index)}" if index else ""
    runs = (
        f"a whole step by {group.step_implementation}"
        if group.step_implementation
        else f"attention by {group.attn_implementation}{_used(group, layout)}"
    )
    runs += f", slots over {'+'.join(group.slot_axes)}" if group.slot_axes else ""
    return (
        f"{heads} KV heads of {slots} slots, {size(total)}, {group.policy.name}{reads}; {runs}{_codes(group, layout)}"
    )


def _shares(group: Group, layout: "CacheLayout") -> tuple[str, ...]:
    """Says what heads that share their slots hold on average, and why each has room for more; nothing for others."""
    if group.shares is None:
        return ()
    heads = layout.kv_heads if group.heads is None else len(group.heads)
    average, max_share = group.shares
    whose = "heads"
    if layout.shares_layers:
        whose, heads = "heads of all layers", heads * len(layout.decode)
    return (
        f"{whose} share {heads} x {average} slots when the longest prompt ends, of which one may get {max_share}: "
        f"which one is known after arrays are allocated, so that each has room for {max_share / average:.2f} times the "
        "average; adakv(..., max_share=) limits it",
    )


def _policy(group: Group, layout: "CacheLayout") -> tuple[str, ...]:
    """Describes a policy that does not evict one slot in each step, or that holds more than slots."""
    policy, found = group.policy, []
    if policy.every > 1:
        found.append(f"evicts {policy.every} slots at once, when a head holds {policy.every} more than its budget")
    if policy.budget is not None and policy.budget.beyond_prompt:
        found.append("the slots of the prompt stay, and do not count against the budget")
    if policy.budget is not None and policy.budget.evicts_early:
        found.append("slots below a threshold are evicted early; arrays have room for the whole budget")
    if group.memory:
        made = jax.eval_shape(functools.partial(empty, group, 1, layout.kv_heads, layout.head_dim, layout.dtype))
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.memory))
        found.append(f"a memory of {size(held)} per row, in addition to slots")
    if names := [each.name for each in policy.params]:
        found.append(f"reads parameters {', '.join(names)}, which all rows share")
    return tuple(found)


def _used(group: Group, layout: "CacheLayout") -> str:
    """Says whether attention leaves out what a row has not used of its slots; see `kvjax.products.used_slots`."""
    grows = group.storage.exact and not group.evicts
    if not grows or layout.platform != "cpu" or group.attn_implementation != "xla":
        return ""
    query, cache = (jax.ShapeDtypeStruct((1, n, layout.head_dim), layout.dtype) for n in (1, group.capacity))
    return " over the slots in use" if reads_used_slots(query, cache) else ""


def _codes(group: Group, layout: "CacheLayout") -> str:
    """Says how a decoding step reads coded slots; nothing if there are none."""
    if any(group.codecs) and group.attn_implementation != "xla":
        return "; codes decoded in the kernel"
    found: dict[str, list[str]] = {"key": [], "value": []}
    for number, (storage, count) in enumerate(zip(group.stores, group.slots, strict=True)):
        count = group.gathered if number == 0 and group.gathered is not None else count
        for side, ways in found.items():
            if not isinstance(storage.codecs[side], Exact):
                ways.append(_way(storage, side, count, group, layout))
    # A store's codec may be exact on one side.
    keys, values = (" or ".join(dict.fromkeys(ways)) or "read as they are" for ways in found.values())
    if not any(found.values()):
        return ""
    coded_by = [codec for codec in group.storage.codecs.values() if not isinstance(codec, Exact)]
    floats = all(
        isinstance(codec, Codec) and coded.holds_floats(codec, layout.head_dim, layout.dtype) for codec in coded_by
    )
    texts = [f"{'numbers' if floats else 'codes'} {keys}"] if keys == values else [f"keys {keys}", f"values {values}"]
    ranked = " and ".join(f"{side}s" for side in sorted(group.policy.reads))
    if ranked:
        texts.append(f"{ranked} decoded at once for the policy")
    return "".join(f"; {text}" for text in texts)


def _way(storage: Storage, side: str, count: int, group: Group, layout: "CacheLayout") -> str:
    """Says how a step reads the codes of keys or values of one store."""
    codec = storage.codecs[side]
    if storage.resolved_layout.of_blocks or not isinstance(codec, Codec):
        return "in blocks, decoded at once"
    if storage.memories[side] == HOST:
        return "decoded at once on the device"
    if side == "key" and (storage.frame == UNROTATED or group.policy.positions == "cache"):
        return "decoded at once, to be rotated"
    dim = layout.head_dim
    if isinstance(codec, Chain):
        codec, dim = codec.codec, codec.dims.dim(dim)
    if isinstance(codec, Exact):
        return "shorter, read as they are"
    return coded.way(codec, dim, layout.dtype, count, layout.platform, grows=not group.evicts)


def _ranges(layers: Iterable[int]) -> str:
    """Layers as text: ``0-3, 5``."""
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0]):
        numbers = [layer for _, layer in run]
        runs.append(f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(runs)
