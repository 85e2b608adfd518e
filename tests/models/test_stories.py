"""A real trained model: grouped queries, tied embeddings, attention sinks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.checkpoint.huggingface import load
from kvjax.models.decoder import Decoder

OPENING = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@pytest.fixture(scope="module")
def stories(shared_data):
    folder = shared_data / "data/models/stories260K-hf"
    if not folder.is_dir():
        pytest.skip("no stories260K-hf in the shared data folder")
    return folder


def test_greedy_text(stories):
    model = load(stories, dtype=jnp.float32)
    length = 64

    @jax.jit
    def step(tokens, at):
        logits, _ = Decoder(model.config).apply({"params": model.params}, tokens)
        following = jnp.argmax(logits[0, at], -1).astype(jnp.int32)
        return tokens.at[0, at + 1].set(following)

    tokens = jnp.zeros((1, length), jnp.int32).at[0, 0].set(model.tokenizer.bos_id)
    for at in range(length - 1):
        tokens = step(tokens, at)
    assert model.tokenizer.decode(np.asarray(tokens[0])).startswith(OPENING)


def test_log_probabilities(stories):
    pytest.importorskip("torch", reason="parity needs torch")
    pytest.importorskip("transformers", reason="parity needs transformers")
    from tests.models import hf_models

    model = load(stories, dtype=jnp.float32)
    tokens = np.asarray([model.tokenizer.encode(OPENING)], np.int32)
    logits, _ = Decoder(model.config).apply({"params": model.params}, jnp.asarray(tokens))
    expected = hf_models.log_probabilities(hf_models.reload(stories), tokens)
    assert np.max(np.abs(np.asarray(jax.nn.log_softmax(logits)) - expected)) < 1e-4
