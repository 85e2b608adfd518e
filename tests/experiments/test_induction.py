"""The parameters that training begins with look things up before the first step."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.training.config import TrainConfig, decoder_config
from experiments.training.induction import initial_parameters
from kvjax.models.decoder import Decoder
from kvjax.models.parameters import parameter_shapes


@pytest.mark.sampled(0)
@pytest.mark.parametrize("period", [5, 20, 60, 120])
def test_a_random_sequence_is_continued_from_its_first_repetition(period):
    config = decoder_config(TrainConfig(), bos=0)
    params = initial_parameters(config, jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(
        lambda leaf: leaf.shape, parameter_shapes(config)
    )
    rng = np.random.default_rng(period)
    rows = np.stack([np.tile(rng.permutation(np.arange(300, 2048))[:period], 60)[:200] for _ in range(4)])
    logits, _ = Decoder(config).apply({"params": params}, rows[:, :-1].astype(np.int32))
    right = np.asarray(logits.argmax(-1)) == rows[:, 1:]
    assert right[:, period + 1 :].mean() > 0.85
    assert right[:, : period - 1].mean() < 0.1


def test_a_decoder_without_room_for_it_is_refused():
    config = dataclasses.replace(decoder_config(TrainConfig(), bos=0), num_layers=1, windows=())
    with pytest.raises(ValueError, match="an induction head does not fit"):
        initial_parameters(config, jax.random.key(0))
