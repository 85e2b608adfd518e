"""Layers that run as a loop while requests are served: results are those of unrolled layers."""

from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.generation import layer_calls
from kvjax.models import layer_loop
from kvjax.serve import Documents, Request, Runner
from tests.tiny import VOCAB, in_stacks, tiny

SPECS = {
    "full": CacheSpec(policies.full()),
    "h2o": CacheSpec(policies.h2o(12)),
    "snapkv-int8": CacheSpec(policies.snapkv(12, window=3), storage.int8()),
    "drafts": CacheSpec(policies.full()),
}


def served(name: str, folder: Path, model: kvjax.Model) -> tuple[list[kvjax.serve.Result], str]:
    """Returns results of prompts in one shot, in blocks and after a stored beginning, and of continued contexts."""
    rng = np.random.default_rng(2)
    beginning = rng.integers(4, VOCAB, 40)
    drafts = {"speculate": selection.quest(page=8, budget=16, first_layer=0)} if name == "drafts" else {}
    runner = Runner(
        model, SPECS[name], rows=3, limits=Limits(prompt=64, new_tokens=16), prefill_block=16,
        prefix_store=kvjax.PrefixStore(1 << 24), **drafts,
    )  # fmt: skip
    for length in (9, 3, 14, 20, 7):
        tokens = np.concatenate([beginning, rng.integers(4, VOCAB, length)])
        runner.submit(Request(tokens=tokens[-length:] if length < 9 else tokens, max_new_tokens=8))
    found = [*runner]
    if name != "drafts":
        prefix = runner.prefix(beginning[:20])
        runner.submit(Request(tokens=beginning[20:26], max_new_tokens=5, prefix=prefix, keep_context=True))
        found += [*runner]
        runner.save_prefix(folder, found[-1].context)
        kept = runner.load_prefix(folder)
        runner.submit(Request(tokens=beginning[26:28], max_new_tokens=3, prefix=kept))
        found += [*runner]
    if name == "full":
        documents = Documents([beginning[:10].tolist(), beginning[10:25].tolist()])
        runner.submit(Request(tokens=beginning[25:30], max_new_tokens=5, documents=documents))
        found += [*runner]
    return sorted(found, key=lambda result: result.id), runner.explain()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SPECS)
def test_results_are_those_of_unrolled_layers(name, tmp_path, monkeypatch):
    monkeypatch.setenv(layer_loop.VARIABLE, layer_loop.OFF)
    unrolled, how = served(name, tmp_path / "unrolled", tiny(layers=3).model)
    assert "run as one loop" not in how
    monkeypatch.delenv(layer_loop.VARIABLE)
    looped, how = served(name, tmp_path / "looped", in_stacks(tiny(layers=3).model))
    assert "layers 0-2 run as one loop" in how
    assert sum(result.found for result in looped) > 0
    assert_equal(looped, unrolled)


@pytest.mark.parametrize("name", ["full", "snapkv-int8"])
def test_results_are_those_of_layers_that_are_called(name, tmp_path, monkeypatch):
    blocks = []
    run_block = layer_calls.run_block
    monkeypatch.setattr(layer_calls, "MIN_BLOCK", 16)
    monkeypatch.setattr(
        layer_calls, "run_block", lambda *args, **rest: blocks.append(args[1].shape[1]) or run_block(*args, **rest)
    )
    monkeypatch.setenv(layer_loop.VARIABLE, layer_loop.OFF)
    unrolled, _ = served(name, tmp_path / "unrolled", tiny(layers=3).model)
    assert not blocks
    monkeypatch.setenv(layer_loop.VARIABLE, layer_loop.CALLS)
    called, how = served(name, tmp_path / "called", tiny(layers=3).model)
    assert "layers that are alike share a program" in how
    # Blocks of 16 tokens under a full cache, and whole prompts.
    assert (set(blocks) >= {16}) if name == "full" else blocks
    assert_equal(called, unrolled)


def assert_equal(results: list[kvjax.serve.Result], expected: list[kvjax.serve.Result]) -> None:
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.found == other.found
