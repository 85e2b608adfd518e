"""The reference itself: against the worked examples, and against what the definitions imply."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.reference import base, load_llama, policies, random_model, reference_run
from tests.reference.compressors import rounded
from tests.reference.step import Head, _kept, heavy_so_far

pytestmark = pytest.mark.thorough

CASES = 16
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


@pytest.fixture(scope="module")
def worked_cases(shared_data):
    """(cases, arrays, params, config) of the worked examples on the 260K-parameter LLaMA."""
    path = shared_data / "examples" / "policy_cases.npz"
    model = shared_data / "data" / "models" / "stories260K-hf"
    for needed in (path, model / "model.safetensors"):
        if not needed.exists():
            pytest.skip(f"the shared data folder has no {needed.relative_to(shared_data)}")
    arrays = dict(np.load(path))
    cases = json.loads(bytes(arrays["cases"]))
    return cases, arrays, *load_llama(model)


def run_case(worked_cases, index: int, **changes):
    cases, arrays, params, config = worked_cases
    case = cases[index]
    policy = policies.by_name(**{**case["policy"], **changes})
    tokens = arrays[f"{index}_tokens"]
    return reference_run(
        params,
        config,
        tokens,
        policy,
        case["prompt_length"],
        prefill_block=case["prefill_block"],
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("index", range(CASES))
def test_worked_case(worked_cases, index):
    cases, arrays, _, config = worked_cases
    assert len(cases) == CASES
    run = run_case(worked_cases, index)
    error = np.abs(run.logprobs - arrays[f"{index}_logprobs"]).max()
    assert error < 1.5e-5, f"{cases[index]}: log-probabilities differ by {error:.2g}"
    if cases[index]["policy"]["name"] == "full":
        expected = np.broadcast_to(np.arange(200), (config.num_layers, 2, config.num_kv_heads, 200))
    else:
        expected = arrays[f"{index}_kept"]
    np.testing.assert_array_equal(np.array(run.kept), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (1, {"sinks": 3}),
        (4, {"recent": 19}),
        (6, {"positions": "original"}),
        (7, {"gamma": 0.96}),
        (8, {"share_heads": False}),
        (10, {"history": 50}),
        (12, {"guard": 9}),
        (13, {"protect": 14}),
        (4, {"group_reduce": "max"}),
    ],
)
def test_worked_case_notices_a_change(worked_cases, index, changes):
    run = run_case(worked_cases, index, **changes)
    assert not np.array_equal(np.array(run.kept), worked_cases[1][f"{index}_kept"])


def random_tokens(batch: int, width: int, vocab: int = 64) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocab, (batch, width))


POLICIES = {
    "window": policies.window(12, sinks=3),
    "window_cache": policies.streaming_llm(12, sinks=3),
    "local_only": policies.local_only(12),
    "h2o": policies.h2o(12),
    "h2o_fraction": policies.h2o(0.4),
    "h2o_max": policies.h2o(12, group_reduce="max"),
    "heavy_only": policies.heavy_only(12),
    "h2o_decay": policies.h2o_decay(12),
    "scissorhands": policies.scissorhands(12, history=9),
    "tova": policies.tova(12),
    "mean_attention": policies.mean_attention(12),
    "roco": policies.roco(12, guard=2),
    "value_norm": base.evict(base.times_value_norm(base.by_mass()), base.all_but_recent(), 12),
    "strided": policies.strided(12, stride=3),
    "fixed": policies.fixed(12, block=4, columns=1),
    "snapkv": policies.snapkv(12, window=4),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("block", [None, 1, 7])
@pytest.mark.parametrize("name", POLICIES)
def test_ragged_rows_are_computed_alone(name, block):
    params, config = random_model()
    tokens = random_tokens(3, 40)
    lengths, prompts = np.array([40, 11, 25]), np.array([30, 20, 25])
    run = reference_run(params, config, tokens, POLICIES[name], prompts, lengths, block)
    for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        real = tokens[row : row + 1, :length]
        alone = reference_run(params, config, real, POLICIES[name], int(prompt), prefill_block=block)
        np.testing.assert_array_equal(run.logprobs[row, : length - 1], alone.logprobs[0])
        assert not run.logprobs[row, length - 1 :].any()
        for layer in range(config.num_layers):
            for head in range(config.num_kv_heads):
                kept = run.kept[layer][row][head]
                np.testing.assert_array_equal(kept, alone.kept[layer][0][head])
                budget = POLICIES[name].slots(layer, min(length, prompt))
                if name == "snapkv":
                    budget += max(length - prompt, 0)
                assert len(kept) == min(length, budget)
                assert np.all(np.diff(kept) > 0)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("block", [None, 1, 7])
def test_room_for_everything_is_full_attention(heads, positions, block):
    params, config = random_model(1, *HEADS[heads], tied=False)
    tokens = random_tokens(1, 30)
    full = reference_run(params, config, tokens, policies.full(), 30)
    run = reference_run(params, config, tokens, policies.h2o(30, positions=positions), 20, prefill_block=block)
    np.testing.assert_allclose(run.logprobs, full.logprobs, rtol=0, atol=1e-12)
    mass = np.array(run.stats[0][0][0]["mass"])
    np.testing.assert_allclose(mass.sum(), 30.0)  # every query spreads a mass of one


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (policies.window(6, sinks=2), [0, 1, 8, 9, 10, 11]),
        (policies.local_only(6), [6, 7, 8, 9, 10, 11]),
        (policies.strided(6, stride=4, local=2), [0, 4, 8, 9, 10, 11]),
        (policies.fixed(6, block=4, columns=1), [3, 7, 8, 9, 10, 11]),
    ],
)
def test_positions_kept_by_hand(policy, expected):
    params, config = random_model()
    run = reference_run(params, config, random_tokens(2, 12), policy, 1)
    assert (np.array(run.kept) == expected).all()


def test_group_reduce_matters_only_with_groups():
    tokens = random_tokens(1, 60)
    for name, (heads, kv_heads) in HEADS.items():
        params, config = random_model(2, heads, kv_heads)
        mean, largest = (
            reference_run(params, config, tokens, policies.h2o(10, group_reduce=reduce), 20)
            for reduce in ("mean", "max")
        )
        assert (np.array_equal(mean.kept, largest.kept)) == (name == "mha")


def test_a_long_history_is_all_of_it():
    params, config = random_model()
    tokens = random_tokens(2, 50)
    whole, long, short = (
        reference_run(params, config, tokens, policies.scissorhands(10, history=w), 20) for w in (None, 50, 5)
    )
    np.testing.assert_array_equal(np.array(whole.kept), np.array(long.kept))
    assert not np.array_equal(np.array(whole.kept), np.array(short.kept))


def whole_texts(variant: str, budget: int, recent: int, width: int = 40) -> np.ndarray:
    """Log-probabilities of two texts that are read at once, of `width` tokens each."""
    params, config = random_model()
    policy = policies.by_name("h2o", budget=budget, recent=recent, variant=variant)
    return reference_run(params, config, random_tokens(2, 40)[:, :width], policy, width).logprobs


def test_of_the_variants_for_whole_texts_local_is_causal():
    for variant, causal in (("local", True), ("global", False)):
        whole, first = whole_texts(variant, 12, 4), whole_texts(variant, 12, 4, width=25)
        assert np.allclose(whole[:, :24], first, atol=1e-12) == causal
    assert np.abs(whole_texts("local", 12, 4) - whole_texts("global", 12, 4)).max() > 1e-3


@pytest.mark.parametrize("variant", ["local", "global"])
def test_variants_for_whole_texts_at_their_limits(variant):
    params, config = random_model(1)
    full = reference_run(params, config, random_tokens(2, 40), policies.full(), 40)
    alike = policies.by_name("h2o", budget=40, recent=0, variant=variant)
    run = reference_run(params, config, random_tokens(2, 40), alike, 40)
    np.testing.assert_allclose(run.logprobs, full.logprobs, atol=1e-12)
    # Without heavy hitters it is the band of the newest, whose budget counts a query's own token.
    band = policies.by_name("h2o", budget=6, recent=6, variant=variant)
    run = reference_run(params, config, random_tokens(2, 40), band, 40)
    stepped = reference_run(params, config, random_tokens(2, 40), policies.local_only(5), 1)
    np.testing.assert_allclose(run.logprobs, stepped.logprobs, atol=1e-12)


def test_local_by_hand():
    """Three heavy slots of uniform attention: of equal A the newer stays, and a token that has left gets none again."""
    paid = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    head = Head(np.zeros((6, 1)), np.zeros((6, 1)), np.arange(6))
    # A after the first three queries: 11/6, 5/6, 1/3.
    expected = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5]]
    assert [np.flatnonzero(row).tolist() for row in heavy_so_far(head, paid, 3)] == expected
    # Queries that pay the newest token and the second most of all: it stays, and the first does not come back.
    paid[3] = [0, 0.5, 0, 0.5, 0, 0]
    paid[4] = [0.9, 0, 0.05, 0.02, 0.03, 0]
    paid[2] = [0.1, 0.45, 0.45, 0, 0, 0]
    paid[1] = [0.1, 0.9, 0, 0, 0, 0]
    paid[0] = [0.2, 0, 0, 0, 0, 0]
    # A: 0.4, 1.35, 0.45; of the first two the query 3 keeps 1 and 2.
    expected = [[0], [0, 1], [0, 1, 2], [1, 2, 3], [1, 3, 4], [1, 3, 5]]
    assert [np.flatnonzero(row).tolist() for row in heavy_so_far(head, paid, 3)] == expected


def test_norms_are_rounded_to_twelve_bits():
    unit = 2.0**-11
    assert rounded(np.array([1 + unit / 4, 1 + unit, 1 + 1.5 * unit, 1 + 2.5 * unit, 3.0])).tolist() == [
        1, 1 + unit, 1 + 2 * unit, 1 + 2 * unit, 3,
    ]  # fmt: skip
    # Equal tokens tie whatever rotation did to them; a norm that is nearly halfway is a near-tie.
    view = base.View(np.arange(4), np.array([[2.0], [1.0], [2.0 + 1e-9], [3.0]]), np.zeros((4, 1)), {}, [], 3, 4)
    ranking = policies.knorm(3).rank(view)
    assert ranking.priority.tolist() == [-2, -1, -2, -3]
    for position, expected in ((2.0 + unit * 0.9999999, True), (2.5, False)):
        near = view._replace(key=np.array([[2.0], [1.0], [position], [1.5]]))
        assert (_kept(policies.knorm(3).rank(near), near.position, 3)[1] < 1e-6) == expected


def test_budgets():
    assert [policies.h2o(0.1).slots(0, n) for n in (1, 19, 20, 30)] == [1, 1, 2, 3]
    assert policies.h2o(0.29).slots(0, 100) == 29  # 0.29 * 100 is 28.999... in binary
    assert policies.h2o((4, 1.0)).slots(1, 7) == 7
    params, config = random_model()
    with pytest.raises(ValueError, match="protects more"):
        reference_run(params, config, random_tokens(1, 9), policies.window(3, sinks=4), 9)
