"""Counts of the blocks that TPU kernels move: those of a walk over the tiles, and the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.errors import InputError, KvjaxError
from kvjax.kernels.prefill import grid_tpu
from kvjax.planning import kernel_traffic
from kvjax.planning.attention_traffic import attention_traffic
from kvjax.planning.kernel_traffic import decode_kernels, prefill_kernels

DIM = 64


@pytest.mark.parametrize(("tokens", "window"), [(640, None), (640, 200), (300, None)])
def test_attention_of_a_prompt(monkeypatch, tokens, window):
    """A tile of slots that has just been copied is not copied again, and tiles after the diagonal are never copied."""
    monkeypatch.setattr(grid_tpu, "TILE", 128)
    (found,) = prefill_kernels(tokens, DIM, window=window)
    tiles, at = -(-tokens // 128), None
    copied = 0
    for query in range(tiles):
        first = 0 if window is None else max(128 * query - window + 1, 0) // 128
        for slot in range(first, query + 1):
            copied += min(128, tokens - 128 * slot) if slot != at else 0
            at = slot
    assert (found.kernel, found.query_tile, found.slot_tile, found.steps) == ("attend_queries", 128, 128, tiles**2)
    # Queries and outputs once
    assert found.features == 2 * DIM * (tokens + copied)
    if window is None and tokens % 128 == 0:
        # The formula has half of the tiles; the diagonal is the other half of one, less the tile that stays.
        formula = attention_traffic(tokens, DIM, tile=128, memory=1, slots=1).prefill_causal
        assert found.features == formula + 2 * DIM * (tokens / 2 - 128)


def test_statistics_are_a_second_pass(monkeypatch):
    monkeypatch.setattr(grid_tpu, "TILE", 128)
    first, second = prefill_kernels(512, DIM, statistics=True)
    (alone,) = prefill_kernels(512, DIM)
    assert first.features == alone.features and first.lines == alone.lines + 512  # log-sum-exps
    # Keys once; for each of 4 tiles of slots the queries from its own tile on. The last tile has the one that is there.
    assert (second.kernel, second.features) == ("reduce_columns", DIM * (512 + 128 * (4 + 3 + 2)))
    shared = prefill_kernels(512, DIM, group=4, statistics=True)
    assert shared[0].features == 4 * first.features  # a program has one of the heads, since tiles are full


@pytest.mark.parametrize("group", [1, 4])
def test_a_decode_step_reads_the_cache_once(group):
    (plain,) = decode_kernels(900, DIM, group=group)
    (counting,) = decode_kernels(900, DIM, group=group, statistics=True)
    formula = attention_traffic(1, DIM, tile=1, memory=1, slots=900).decode
    assert plain.features == counting.features == formula + 2 * group * DIM
    assert (plain.kernel, plain.lines, counting.lines) == ("attend_one_query", 900, 1800)


def test_blocks_that_depend_on_keys_are_not_counted():
    def kernel(problem):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(1,), in_specs=[pl.BlockSpec((8, DIM), lambda at, which: (which[0], 0))],
            out_specs=pl.BlockSpec((8, DIM), lambda at, which: (0, 0)),
        )  # fmt: skip

        def body(which, key, out):
            out[...] = key[...]

        which = jnp.argmax(problem.key[0, 0, :, 0])[None].astype(jnp.int32)
        return pl.pallas_call(
            body, grid_spec=spec, out_shape=jax.ShapeDtypeStruct((8, DIM), jnp.bfloat16), name="by_key"
        )(which, problem.key[0, 0])

    with pytest.raises(KvjaxError, match="blocks of by_key depend on queries"):
        kernel_traffic._counted(kernel, 1, 16, DIM, 1, None, False)
    for function in (lambda: prefill_kernels(0, DIM), lambda: decode_kernels(8, 0), lambda: decode_kernels(np.nan, 8)):
        with pytest.raises(InputError, match="must be"):
            function()
