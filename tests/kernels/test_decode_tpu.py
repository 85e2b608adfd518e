"""The decode kernel for TPUs: interpreted, races detected, against float64."""

import jax.numpy as jnp
import pytest

from kvjax import attention
from kvjax.errors import ConfigError
from kvjax.kernels.decode import pallas_tpu
from tests.kernels.cases import DECODE, Case, DecodeCases


@pytest.fixture
def machine(interpreted):
    return 2e-6


class TestDecode(DecodeCases):
    implementation = "pallas_tpu"

    def small_tiles(self, monkeypatch, case):
        monkeypatch.setattr(pallas_tpu, "TILE_BYTES", 1 << 16)  # of 128 slots at D = 128 in float32: several tiles


def test_slots_are_cut_into_tiles():
    assert pallas_tpu.tiling(8, 37, 64, 4) == (37, 8), "few slots: a program takes several pairs"
    tile, pairs = pallas_tpu.tiling(8, 1 << 16, 128, 2)
    assert (tile % 128, pairs) == (0, 1)


def test_what_cannot_run_says_so():
    problem = DECODE[-1].problem(*DECODE[-1].arrays())
    with pytest.raises(ValueError, match="interpret mode"):
        attention.attend_and_reduce(problem, "pallas_tpu")[0].output.block_until_ready()
    two = Case((2,), 1, 1, 2, 8, 64, jnp.float32)
    with pytest.raises(ConfigError, match="decode/pallas_tpu: it takes one query per head, not 2"):
        pallas_tpu.attend_and_reduce(two.problem(*two.arrays()))
