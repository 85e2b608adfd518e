"""Reads slots: asks the selection which, and attends to them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.cache import parallel_contexts, shared_prefix
from kvjax.cache.groups import Group
from kvjax.cache.shared_prefix import LayerPrefix
from kvjax.cache.slots import free_slots, write
from kvjax.cache.state import EMPTY, FAR, Block
from kvjax.cache.step.interface import LayerArgs, StepInputs
from kvjax.cache.step.operands import Part, by_kv_head, decoded, fetched, problems
from kvjax.cache.step.pool import Pool, joined
from kvjax.kernels.coded import as_array
from kvjax.numerics.statistics import by_name
from kvjax.parallel.host_memory import gather
from kvjax.selection.base import Selection, SelectView
from kvjax.selection.choose import compact
from kvjax.typing import PyTree

Array = jax.Array


class Reading(NamedTuple):
    """The slots that a step reads.

    Attributes:
      parts: the operands of attention, one part per piece of the pool.
      position: [B, K, S'] int32 of all slots; -1 for a slot that is empty or not read.
      slots: [B, K, W] int32, the slots of the first piece that the first part was gathered from; None for all.
      index: the selection's index, with the step's tokens.
      view: the arguments of the selection; None if everything is read.
      chosen: [B, K, S'] bool, whether the selection chose the slot; None if everything is read.
    """

    parts: tuple[Part, ...]
    position: Array
    slots: Array | None
    index: Any
    view: SelectView | None
    chosen: Array | None = None


def read(
    pool: Pool,
    query: Array,
    keys: tuple[PyTree, ...],
    values: tuple[PyTree, ...],
    block: Block,
    group: Group,
    inputs: StepInputs,
    budget: Array | None,
    args: LayerArgs,
) -> Reading:
    """Chooses the slots to read.

    Args:
      pool: the slots.
      query: [B, H, n, D], rotated.
      keys: [B, K, S_i, D] of each piece, arrays or `Coded`, rotated; None of a pool in host memory that is gathered.
      values: [B, K, S_i, D] of each piece, as `keys`.
      block: the tokens of the step.
      group: the selection.
      inputs: the step's own tokens.
      budget: [B] int32 slots per KV head, or None.
      args: of the layer.
    """
    selection, n = group.selection, query.shape[2]
    parts = tuple(map(Part, keys, values, pool.cut(pool.position)))
    index = pool.index
    if selection.reads_all:
        return Reading(parts, pool.position, None, index, None)
    slot = _slot(pool, block, group.policy.page)
    # Selections look at keys of all D features; of those that do not, XLA removes the decoding.
    looked = decoded(pool, group, whole=True)[0] if group.storage.shortened and pool.new_tokens is not None else keys
    given: dict[str, Any] = {"budget": budget, "skew": args.skew}
    view = SelectView(
        position=pool.position, key=None if looked[0] is None else joined(tuple(map(as_array, looked))),
        newest=block.newest, prompt=block.prompt, slot=slot, layer=block.layer, first=block.position[:, 0],
        scale=inputs.scale, soft_cap=args.soft_cap, window=args.window, **given,
    )  # fmt: skip
    if is_turn(group):
        vectors = (query, inputs.rotated_key) if selection.rotated else inputs.unrotated
        asked, new_keys = jax.lax.stop_gradient(vectors)
        index = selection.ask(index, by_kv_head(asked, pool.position), new_keys, block.position >= 0, view)
    elif not selection.in_prompt and not (group.decoding and n == 1):
        return Reading(parts, pool.position, None, index, view)
    elif n == 1:
        appended = pool.new_tokens is None
        newest = jnp.take_along_axis(keys[0], slot[:, :, None, None], axis=2) if appended else keys[-1]
        newest = newest if selection.rotated else inputs.unrotated[1]
        index = _written(index, newest, slot, pool, block, selection, view.skew)
        if selection.sees_values:
            index = selection.write_value(index, inputs.value, block.newest >= 0)
    # [B, K, G, D]: of the block's last query; selections of whole blocks look at no query
    by = query if selection.rotated else inputs.unrotated[0]
    by = by if inputs.guess is None or not selection.ahead else inputs.guess
    by = by_kv_head(by, pool.position)[:, :, :, -1]
    width, units = group.gathered, None
    if width is not None and selection.unit > 1 and width % selection.unit == 0:
        units, index = selection.choose_units(index, by, view)
        chosen = selection.slots_of(units, index, view)
    else:
        chosen, index = _chosen(index, by, view, pool, selection)
    mask = chosen | selection.always(index, view)
    position = jnp.where(mask, pool.position, EMPTY)
    parts = tuple(map(Part, keys, values, pool.cut(position)))
    size = pool.sizes[0]

    def restored(part: Part, chosen: Array) -> Part:
        """Replaces the keys of the chosen slots [B, K, W] if the selection restores keys."""
        key = selection.restore(index, part.position)
        if key is None:
            return part
        if args.rope is not None and inputs.frequencies is not None:
            key = args.rope.rotate(key, part.position, inputs.frequencies)
        return part._replace(key=jnp.where(chosen[..., None], key.astype(part.key.dtype), as_array(part.key)))

    first, chosen_first = parts[0], chosen[:, :, :size]
    if width is None:
        return Reading((restored(first, chosen_first), *parts[1:]), position, None, index, view, chosen)
    if units is not None:
        slots, valid = _compact_units(units, view, size, width, selection)
    else:
        slots, valid = compact(mask[:, :, :size], width)

    # What is read is decoded after it is gathered, of a pool in host memory by the host.
    own = Part(
        *fetched(pool, group, slots, (first.key, first.value)),
        # Not of `first.position`, whose marks of all slots nothing else needs if units are chosen.
        jnp.where(valid, gather(pool.position[:, :, :size], slots), EMPTY),
    )
    own = restored(own, gather(chosen_first, slots))
    return Reading((own, *parts[1:]), position, jnp.where(valid, slots, size), index, view, chosen)


def _compact_units(units: Array, view: SelectView, size: int, width: int, selection: Selection) -> tuple[Array, Array]:
    """Gathers slots as `compact` does, but looks at one mark of each unit instead of one of each slot.

    Args:
      units: [B, K, U] bool, the units that are chosen.
      view: the arguments of the selection.
      size: the number of slots of the first piece.
      width: W, a multiple of the unit.
      selection: the selection.

    Returns:
      slots: [B, K, W] int32, in bounds.
      valid: [B, K, W] bool, whether the slot is one that the query reads.
    """
    unit = selection.unit
    marked, valid = compact(units | selection.always_units(units.shape[2], view), width // unit)
    # [B, K, W / unit, unit]
    slots = marked[..., None] * unit + jnp.arange(unit, dtype=jnp.int32)
    inside = valid[..., None] & (slots < size)
    # [B, K, W]
    slots, inside = (x.reshape(*x.shape[:2], width) for x in (jnp.minimum(slots, size - 1), inside))
    return slots, inside & view._replace(position=gather(view.position, slots)).visible


def _chosen(index: PyTree, query: Array, view: SelectView, pool: Pool, selection: Selection) -> tuple[Array, PyTree]:
    """Calls `Selection.choose`, for a selection that looks ahead without the step's own tokens if they are apart.

    Its choice then depends on nothing of this layer's input, so that slots can be fetched while the layer before runs.
    """
    if not selection.ahead or pool.new_tokens is None:
        return selection.choose(index, query, view)
    size = pool.layer.position.shape[2]
    old = {name: x[:, :, :size] if name in selection.per_slot else x for name, x in index.items()}
    chosen, after = selection.choose(old, query, view._replace(position=pool.layer.position, key=None))
    own = {name: jnp.concatenate([after[name], index[name][:, :, size:]], axis=2) for name in selection.per_slot}
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, view.position.shape[2] - size))), after | own


def _written(
    index: PyTree, key: Array, slot: Array, pool: Pool, block: Block, selection: Selection, skew: Array | None
) -> PyTree:
    """Adds the step's token to the index. Entries of slots are there already if the token is apart from them."""
    index = selection.write(index, key, slot, block.newest >= 0)
    if pool.new_tokens is not None or not selection.per_slot or selection.in_prompt:
        return index
    # [B, K, 1]; out of bounds, where writes are dropped, for a row without a token
    target = jnp.where((block.newest >= 0)[:, None], slot, pool.position.shape[2])[:, :, None]
    entries = selection.entries(index, key, skew)
    return index | {name: write(index[name], target, own) for name, own in entries.items()}


def columns_of(chosen: Array | None, pool: Pool, block: Block, group: Group) -> dict[str, Array]:
    """Computes the columns of the statistics of what a selection chose, [B, K, S'] float32 each.

    Args:
      chosen: [B, K, S'] bool; None if everything is read.
      pool: the slots.
      block: the tokens of the step.
      group: the statistics.
    """
    # [B, K, S'] float32
    shape = pool.position[:, :, _unranked(pool, group) :].shape
    one = jnp.zeros(shape, jnp.float32) if chosen is None else chosen.astype(jnp.float32)
    at = (block.newest + 1).astype(jnp.float32)[:, None, None]
    return {s.name: one if s.transform == "chosen" else one * at for s in by_name(group.needs) if s.of_selection}


def attend(
    query: Array,
    reading: Reading,
    pool: Pool,
    group: Group,
    log_weight: Array | None,
    prefix: LayerPrefix | None = None,
    **options: Any,
) -> tuple[Array, dict[str, Array]]:
    """Attends to the slots that are read.

    Args:
      query: [B, H, n, D], rotated.
      reading: from `read`.
      pool: the slots.
      group: the kernels and the statistics.
      log_weight: [B, K, S'] float32 or None.
      prefix: of all rows; None = there is none.
      options: arguments of `kvjax.attention.problem`.

    Returns:
      The output [B, H, n, D], and the columns of each statistic for the slots that are ranked, [B, K, S', ...].
    """
    weights = [None] * len(reading.parts) if log_weight is None else pool.cut(log_weight)
    made, maps = problems(query, reading.parts, weights, pool, group, grows=not group.evicts, **options)
    if group.parallel is not None:
        (problem,) = made
        output, own = parallel_contexts.attend(problem, pool.layer, group.parallel)
        return attention.ungroup(output), own
    if prefix is not None:
        (problem,) = made
        return attention.ungroup(shared_prefix.attend(problem, prefix)), {}
    if unranked := group.unranked_stores if _unranked(pool, group) else 0:
        # What the policy has evicted has no statistics.
        made = [each.without_statistics() for each in made[:unranked]] + made[unranked:]
    output, columns = attention.attend_parts(made, group.attn_implementation, maps)
    columns = columns[unranked:]
    size = pool.sizes[0]
    if reading.slots is not None:
        columns = ({name: spread(x, reading.slots, size) for name, x in columns[0].items()}, *columns[1:])
    whole = {name: joined(tuple(each[name] for each in columns)) for name in columns[0]}
    return attention.ungroup(output), whole


def is_turn(group: Group) -> bool:
    """Returns whether a step is a further turn, which is fed as a block, of a selection that chooses for it."""
    # In the first prompt, a selection that chooses by turns adds up queries.
    return group.selection.by_turn and not group.decoding and group.prompt_index is None


def mixed(output: Array, reading: Reading, selection: Selection) -> Array:
    """Returns the output [B, H, n, D] of attention with what the selection adds to that of a decoding query."""
    if reading.chosen is None or reading.view is None or output.shape[2] > 1:
        return output
    # [B, K, G, 1, D]
    grouped = by_kv_head(output, reading.position)
    return selection.mix(reading.index, grouped[:, :, :, 0], reading.view).reshape(output.shape)


def _unranked(pool: Pool, group: Group) -> int:
    """Returns the number of slots without statistics, the first of all; none in a prompt's own pool."""
    return 0 if pool.new_tokens is None else group.unranked


def attend_text(
    query: Array, reading: Reading, pool: Pool, group: Group, **options: Any
) -> tuple[Array, dict[str, Array]]:
    """Attends by the selection's own `attend_text`, which takes a whole text at once and keeps no statistics."""
    (part,) = reading.parts
    problem = attention.problem(
        query, part.key, part.value, key_position=part.position, needs=group.reports, **options
    )  # fmt: skip
    assert reading.view is not None
    run = functools.partial(attention.attend_and_reduce, implementation="xla")
    output = group.selection.attend_text(run, problem, reading.view)
    return attention.ungroup(output), {
        s.name: jnp.zeros_like(pool.stats[s.name], jnp.float32) for s in by_name(group.needs)
    }


def spread(column: Array, slots: Array, size: int) -> Array:
    """Scatters columns [B, K, W, ...] of the slots [B, K, W] that were read to [B, K, size, ...], 0 elsewhere."""
    place = jax.vmap(jax.vmap(lambda into, at, new: into.at[at].set(new, mode="drop", unique_indices=True)))
    return place(jnp.zeros((*column.shape[:2], size, *column.shape[3:]), column.dtype), slots, column)


def _slot(pool: Pool, block: Block, page: int) -> Array:
    """Returns the slot that holds each row's newest token, or that it will be written to, [B, K] int32."""
    if pool.new_tokens is not None:
        return jnp.minimum(free_slots(pool.layer.position, 1, page), pool.sizes[0] - 1)[:, :, 0]
    slot = jnp.arange(pool.sizes[0], dtype=jnp.int32)
    here = pool.position == block.newest[:, None, None]
    return jnp.minimum(jnp.min(jnp.where(here, slot, FAR), axis=2), pool.sizes[0] - 1)
