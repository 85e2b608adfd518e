"""Attention of a prompt whose blocks of queries read pages of their own; see `kvjax.selection.QueryBlocks`.

The slots are in the order of the prompt's tokens: slot t holds token t. For each block the pages that it reads are
gathered, and attention runs over these alone. All blocks read equally many pages, so that shapes are static.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.cache.groups import Group
from kvjax.cache.state import EMPTY
from kvjax.cache.step.attend import Reading, spread
from kvjax.cache.step.pool import Pool
from kvjax.kernels.prefill.xla import join_queries, split_queries
from kvjax.numerics.mask_indices import compact
from kvjax.parallel.host_memory import gather
from kvjax.selection.base import Held, Index, SelectView
from kvjax.selection.page_summaries import Pages
from kvjax.typing import PyTree

Array = jax.Array
#: Scores of pages that are held at once, 256 MB in float32.
SCORES = 1 << 26


def attend(
    query: Array, reading: Reading, pool: Pool, group: Group, unrotate: Callable[[Array], Array], **options: Any
) -> tuple[Array, dict[str, Array]]:
    """Attends to the pages that each block of queries reads.

    Args:
      query: [B, H, n, D], rotated.
      reading: of everything, from `kvjax.cache.step.attend.read`.
      pool: the slots, among them the step's own tokens.
      group: the selection and the statistics.
      unrotate: [B, K, S, D] keys -> the same before rotation, float32.
      options: arguments of `kvjax.attention.problem`.

    Returns:
      The output [B, H, n, D], and the columns of each statistic, [B, K, S, ...]: 0 for what a block does not read.
    """
    selection, (part,), view = group.selection, reading.parts, reading.view
    assert isinstance(selection, Pages) and selection.prompt is not None and view is not None
    problem = attention.problem(query, part.key, part.value, key_position=part.position, needs=group.reports, **options)
    statistics = (*problem.statistics, *problem.counts)
    columns = {s.name: jnp.zeros((*part.position.shape, *s.reported), jnp.float32) for s in statistics}
    n, size, attended = query.shape[2], selection.prompt.size, []
    # The first blocks have no more pages before them than a block reads; of a prompt in one shot, they are known.
    dense = min(n, selection.prompt.dense(selection.page)) if problem.causal else 0
    if dense:
        first = problem.only_queries(0, dense).only_slots(dense).replace(causal=True)
        whole, own = attention.attend_and_reduce(first, "xla")
        attended.append(whole.output)
        columns = {name: x.at[:, :, :dense].set(own[name]) for name, x in columns.items()}
    if dense < n:
        key, value = problem.arrays()
        chooses = selection.prompt.pages > 0
        index = _index(selection, jax.lax.stop_gradient(key), part.position, view, unrotate) if chooses else {}
        rest, count = problem.only_queries(dense, n), -(-(n - dense) // size)
        more = count * size - (n - dense)
        inputs = (
            split_queries(rest.query, 3, size, more), split_queries(rest.query_position, 1, size, more, fill=EMPTY),
            tuple(split_queries(weight, 1, size, more) for weight in rest.weights),
        )  # fmt: skip
        units = -(-problem.slots // selection.page)
        # [B, K, U, page, ...]
        pages = [selection.by_page(x, units, fill) for x, fill in ((key, 0), (value, 0), (part.position, EMPTY))]
        # [blocks, B, K, P] each
        chosen, valid = _chosen(selection, index, *inputs[:2], units, view)

        def block(columns: dict[str, Array], inputs: PyTree) -> tuple[dict[str, Array], Array]:
            query, position, weights, chosen, valid = inputs
            read, slots = _gathered(pages, chosen, valid)
            one = rest.replace(query=query, query_position=position, weights=weights, grows=False, **read)
            found, own = attention.attend_and_reduce(one, "xla")
            added = {name: spread(x, slots, problem.slots) for name, x in own.items()}
            return {s.name: s.join(columns[s.name], added[s.name]) for s in statistics}, found.output

        columns, outputs = jax.lax.scan(block, columns, (*inputs, chosen, valid))
        attended.append(join_queries(outputs, n - dense))
    # [B, K, G, n, D]
    output = jnp.concatenate(attended, axis=3)
    return attention.ungroup(output.astype(problem.value.dtype)), columns


def _index(
    selection: Pages, key: Array, position: Array, view: SelectView, unrotate: Callable[[Array], Array]
) -> Index:
    """Returns the summary of the prompt's pages, as it will be when the prompt ends."""
    batch, kv_heads, slots, dim = key.shape
    index = selection.init((batch, kv_heads, slots), dim, key.dtype)
    return selection.build(index, {}, Held(position, key, view.prompt, view.skew, unrotate))


def _chosen(
    selection: Pages, index: Index, query: Array, at: Array, units: int, view: SelectView
) -> tuple[Array, Array]:
    """Chooses the pages that each block of queries reads, its own among them.

    Pages are scored block by block and ranked for as many blocks at once as `SCORES` allows: one call of the ranking
    for all blocks is quicker than one for each, and scores of all blocks would grow with the square of the prompt.

    Args:
      selection: the pages.
      index: of the prompt; {} if blocks choose no pages.
      query: [blocks, B, K, G, n, D] rotated.
      at: [blocks, B, n] int32, positions of the queries; -1 = padding.
      units: the number of pages U.
      view: the slots.

    Returns:
      [blocks, B, K, P] each: pages in bounds, int32, and whether they are read, bool.
    """
    count, batch, kv_heads, group = query.shape[:4]
    choose = functools.partial(_chosen_at_once, selection, index, units=units, view=view)
    query = jax.lax.stop_gradient(query)
    most_blocks = max(1, SCORES // (batch * kv_heads * group * units))
    if count <= most_blocks:
        return choose(query, at)
    parts = -(-count // most_blocks)
    padding = parts * most_blocks - count

    def split(x: Array, fill: int) -> Array:
        padded = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
        return padded.reshape(parts, most_blocks, *x.shape[1:])

    # [parts, most_blocks, B, K, P] each
    found = jax.lax.map(lambda inputs: choose(*inputs), (split(query, 0), split(at, EMPTY)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], found)


def _chosen_at_once(
    selection: Pages, index: Index, query: Array, at: Array, *, units: int, view: SelectView
) -> tuple[Array, Array]:
    """See `_chosen`."""
    blocks, (count, batch, kv_heads, group) = selection.prompt, query.shape[:4]
    assert blocks is not None
    shape, own, score = (batch * count, kv_heads, units), blocks.size // selection.page, None
    if blocks.pages:

        def of_block(inputs: tuple[Array, Array]) -> Array:
            query, at = inputs
            return selection.block_score(index, query, at >= 0, view.scale, view.soft_cap, blocks)

        # [blocks, B, K, G, U] -> [B * blocks, K, G, U]: the rows of a mesh stay where they are
        score = jax.lax.map(of_block, (query, at))
        score = jnp.swapaxes(score, 0, 1).reshape(*shape[:2], group, units)
    # [B * blocks]
    first = jnp.maximum(at[:, :, 0], 0).T.reshape(-1)
    marks = selection.read_in_prompt(score, first, shape, view)
    number, page = jnp.arange(units, dtype=jnp.int32), (first // selection.page)[:, None, None]
    found = compact(marks | ((number >= page) & (number < page + own)), blocks.before + own)
    chosen, valid = (jnp.swapaxes(x.reshape(batch, count, kv_heads, -1), 0, 1) for x in found)
    return chosen, valid


def _gathered(pages: Sequence[Array], chosen: Array, valid: Array) -> tuple[dict[str, Array], Array]:
    """Gathers the pages of a block of queries.

    Args:
      pages: keys and values [B, K, U, page, D], and positions [B, K, U, page].
      chosen: [B, K, P] int32, in bounds.
      valid: [B, K, P] bool, whether a page is read.

    Returns:
      Keys, values and positions by the names of `Problem`, [B, K, W, ...], and their slots, [B, K, W] int32: out of
      bounds for those that are not read.
    """
    units, page = pages[2].shape[2:]
    # [B, K, P * page, ...]
    key, value, position = (gather(x, chosen).reshape(*chosen.shape[:2], -1, *x.shape[4:]) for x in pages)
    valid = jnp.repeat(valid, page, axis=2)
    slots = (chosen[..., None] * page + jnp.arange(page, dtype=jnp.int32)).reshape(position.shape)
    read = {"key": key, "value": value, "key_position": jnp.where(valid, position, EMPTY)}
    return read, jnp.where(valid, slots, units * page)
