"""The FLOPs of attention over prompts, as XLA computes it: counted from shapes, without compiling anything."""

from kvjax.cache.groups import Group
from kvjax.cache.planning.layout import CacheLayout
from kvjax.kernels.prefill.xla import computed_scores
from kvjax.models.config import DecoderConfig
from kvjax.selection.page_summaries import Pages


def prompt_attention_flops(config: DecoderConfig, layout: CacheLayout, rows: int, width: int) -> int:
    """Returns the FLOPs of the matrix products of attention, where a multiply-add counts as two, of the whole mesh.

    These are the products of queries and keys, of probabilities and values, and those that score pages where blocks of
    queries read pages of the prompt.

    Args:
      config: the decoder.
      layout: of the cache.
      rows: the number of rows.
      width: the number of tokens that prompts are padded to.
    """
    return sum(_of_group(group, config, layout, rows, width) for groups in layout.prompt for group in groups)


def _of_group(group: Group, config: DecoderConfig, layout: CacheLayout, rows: int, width: int) -> int:
    """Returns the FLOPs of one group of heads."""
    kv_heads = config.num_kv_heads if group.heads is None else len(group.heads)
    heads, dim, blocks, selection = rows * kv_heads * config.num_heads // config.num_kv_heads, config.head_dim, 1, None
    slots, step, causal = width, width, layout.block is None
    if layout.block is not None:
        slots, step, blocks = group.capacity, layout.block, -(-width // layout.block)
    pairs = 4 * heads * dim
    if group.sparse_prompt is None:
        return blocks * pairs * computed_scores(step, slots, heads, causal=causal)
    selection, sparse = group.selection, group.sparse_prompt
    assert isinstance(selection, Pages)
    dense = min(step, sparse.dense(selection.page)) if causal else 0
    flops = pairs * computed_scores(dense, dense, heads, causal=True) if dense else 0
    number, read = -(-(step - dense) // sparse.size), sparse.before * selection.page + sparse.size
    scored = -(-slots // selection.page) * selection.score_flops(dim, config.attention_soft_cap is not None)
    one = pairs * computed_scores(sparse.size, read, heads, causal=False)
    return blocks * (flops + number * (one + (heads * scored if sparse.pages else 0)))
