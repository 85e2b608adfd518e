"""Families whose attention differs from LLaMA's, token by token under a cache, against ``transformers``.

What H2O keeps is replayed in float64 from the attention of ``transformers``: in a decoder of one layer, which slots are
held changes no key, so that a query's probabilities over the slots that it sees are those of the full cache, divided by
their sum.
"""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.checkpoint.huggingface import load
from tests.models import hf_models
from tests.models.hf_models import CASES, Case

PROMPT, TOLERANCE = 20, 1e-4
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True, scope="module")
def need_transformers():
    pytest.importorskip("torch", reason="parity needs torch")
    pytest.importorskip("transformers", reason="parity needs transformers")


def next_tokens(logprobs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """[B, T, V] -> [B, T - 1], the log-probability of the token after each."""
    return np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None].astype(np.int64), axis=2)[..., 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "smollm3", "granite", "mixtral"])
def test_the_full_cache(name, tmp_path):
    reference = hf_models.make(BY_NAME[name], tmp_path)
    tokens = hf_models.tokens()
    scored = kvjax.log_likelihood(load(tmp_path), tokens, policies.full(), prompt_length=PROMPT)
    expected = next_tokens(hf_models.log_probabilities(reference, tokens), tokens)
    np.testing.assert_allclose(scored.logprobs, expected, atol=TOLERANCE)


def replay(full: np.ndarray, budget: int, window: int | None) -> np.ndarray:
    """H2O in float64: which slots each query sees, [B, K, T, T] bool.

    Args:
      full: [B, K, G, T, T] probabilities under the full cache.
      budget: slots of a KV head; half are for the newest.
      window: the layer's; tokens that it has left go first.
    """
    batch, kv_heads, _, width, _ = full.shape
    seen = np.zeros((batch, kv_heads, width, width), bool)
    for b, k in np.ndindex(batch, kv_heads):
        held: list[int] = []
        mass = np.zeros(width)
        for first, last in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, width))]:
            held += range(first, last)
            for t in range(first, last):
                row = full[b, k, :, t] * np.isin(np.arange(width), held)
                seen[b, k, t] = row.sum(axis=0) > 0
                mass += (row / row.sum(axis=1, keepdims=True)).mean(axis=0)
            while len(held) > budget:
                old = [j for j in held if window is not None and j <= last - 1 - window]
                held.remove(min(old) if old else min(held[: -(budget // 2)], key=lambda j: mass[j]))
    return seen


@pytest.mark.parametrize(("kind", "budget"), [("full_attention", 12), ("sliding_attention", 6)])
def test_h2o_with_soft_caps(kind, budget, tmp_path):
    import torch

    one_layer = BY_NAME["gemma2"].arguments | {"num_hidden_layers": 1, "layer_types": [kind], "sliding_window": 10}
    reference = hf_models.make(Case("one", "gemma2", one_layer), tmp_path)
    model, tokens = load(tmp_path), hf_models.tokens()
    scored = kvjax.log_likelihood(model, tokens, policies.h2o(budget), prompt_length=PROMPT)

    ids = torch.from_numpy(tokens).long()
    with torch.no_grad():
        (full,) = reference(ids, use_cache=False, output_attentions=True).attentions
        full = full.double().numpy().reshape(2, 2, 2, *full.shape[2:])
        seen = replay(full, budget, model.config.windows[0])
        assert (seen != replay(full, 40, None)).any()  # something that was in sight is gone
        mask = torch.where(torch.from_numpy(np.repeat(seen, 2, axis=1)), 0.0, torch.finfo(torch.float32).min)
        logits = reference(ids, attention_mask=dict.fromkeys((kind,), mask), use_cache=False).logits
    expected = next_tokens(torch.log_softmax(logits.double(), -1).numpy(), tokens)
    np.testing.assert_allclose(scored.logprobs, expected, atol=TOLERANCE)


def test_a_budget_of_the_window_loses_nothing(tmp_path):
    """A layer holds as many slots as its window, and what the window has left goes first, heavy hitter or not."""
    case = BY_NAME["gemma2"]
    hf_models.make(dataclasses.replace(case, arguments=case.arguments | {"num_hidden_layers": 1}), tmp_path)
    model, tokens = load(tmp_path), hf_models.tokens()
    assert model.config.windows == (7,)
    exact = kvjax.log_likelihood(model, tokens, policies.full(), prompt_length=PROMPT)
    scored = kvjax.log_likelihood(model, tokens, policies.h2o(16), prompt_length=PROMPT)
    np.testing.assert_allclose(scored.logprobs, exact.logprobs, atol=1e-6)
    held = np.sort(np.asarray(scored.state.layers[0].position), axis=2)[..., -7:]
    np.testing.assert_array_equal(held, np.broadcast_to(np.arange(33, 40), held.shape))
    assert scored.state.layers[0].position.shape[2] == 8
