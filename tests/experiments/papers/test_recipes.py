"""Recipes: budgets that share arrays compute what budgets of their own do, and results mean what they say."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from experiments.config import ModelConfig
from experiments.papers.own import topk_heavy
from experiments.papers.parts import Lab
from experiments.papers.recipes import caches, choice, cpu, lm, neurons, recall, training, worked
from experiments.papers.settings import FAST, TEXTS, Settings
from kvjax import policies
from kvjax.cache import CacheSpec, Limits
from kvjax.errors import ConfigError
from tests.tiny import random_tokens, tiny

pytestmark = pytest.mark.thorough

SCALE = dataclasses.replace(FAST, rows=2, prompt=24, new=8, length=32)


class TinyLab(Lab):
    """Measures a random model of two layers on random tokens."""

    def model(self, name="main"):
        return tiny().model

    def rows(self, part, text, rows, length):
        return random_tokens(rows, length, seed=1)


@pytest.fixture
def lab(tmp_path):
    for file in TEXTS.values():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("text")
    return TinyLab(Settings(ModelConfig(shape="tiny"), tmp_path, 0, SCALE), tmp_path / "parts")


@pytest.mark.sampled(0)
def test_a_training_continues_after_an_interruption(lab, tmp_path, monkeypatch):
    part = training.Checkpoints(
        text="book", source="war", rows=2, length=16, layers=None, count=24, batch=2, shares=(0.25, 0.5, 1.0)
    )
    monkeypatch.setattr(training, "CHECKPOINTS", 3)
    with jax.numpy_dtype_promotion("standard"):  # optax and orbax rely on it
        expected = lab.get(part)
        other = TinyLab(lab.settings, tmp_path / "others")
        step, taken = training.train_step, []

        def interrupted(*given):
            taken.append(given)
            if len(taken) == 16:
                raise KeyboardInterrupt
            return step(*given)

        monkeypatch.setattr(training, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            other.get(part)
        assert not other.has(part)
        found = other.get(part)
        # 15 steps were finished, and the newest checkpoint was written after step 8.
        assert len(taken) == 16 + 24 - 8
        for name in ("exponent", "overlap"):
            assert len(found[name]) == 3
            np.testing.assert_array_equal(found[name], expected[name])
    assert not list((tmp_path / "others").glob("*-training"))


@pytest.mark.sampled(0)
def test_budgets_share_a_program_and_nothing_else(lab):
    tokens = random_tokens(2, 32, seed=1)
    programs = set()
    for budget in (0.25, 0.5, 9):
        found = lab.get(lm.lm(lab.settings, "h2o", budget))["logprobs"]
        own = kvjax.log_likelihood(
            tiny().model, tokens, policies.h2o(budget), prompt_length=24, limits=Limits(24, 8, shortest=24),
            implementation="auto",
        )  # fmt: skip
        np.testing.assert_allclose(found, np.asarray(own.logprobs)[:, 23:], atol=1e-5)
        policy = caches.build("h2o", budget, lab.settings, 24).policy
        programs.add((policy.budget.traced(), policy.budget.largest(range(24, 25), 2)))
    assert len(programs) == 1
    settings = dataclasses.replace(lab.settings, scale=dataclasses.replace(SCALE, tiers=(0.3, 1.0)))
    sizes = [caches.build("h2o", b, settings, 24).policy.budget.largest(range(24, 25), 1)[0] for b in (0.2, 0.5)]
    assert sizes == [7, 24]
    assert caches.build("full", 1.0, settings, 24) == CacheSpec(policies.full())


def test_losses_and_ties(lab):
    rng = np.random.default_rng(0)
    full = {"logprobs": rng.normal(-3, 0.1, (40, 16)).astype(np.float32)}
    worse = {"logprobs": full["logprobs"] - np.float32(0.02)}
    assert lm.loss(worse, full) == pytest.approx(np.expm1(0.02), rel=1e-4)
    assert lm.perplexity(full) == pytest.approx(np.exp(-full["logprobs"].mean()), rel=1e-5)
    made = lm.compare("full against worse", full, worse, lab.settings)
    assert made.lower and not lm.as_good(made)
    assert lm.as_good(lm.compare("worse against full", worse, full, lab.settings))
    assert lm.as_good(lm.compare("full against itself", full, full, lab.settings))


@pytest.mark.sampled(0)
def test_own_caches(lab):
    tokens = random_tokens(2, 32, seed=1)
    spec = caches.exact_spec("full + own:topk_heavy(n=40)", 1.0)
    assert spec.selection == topk_heavy(40)
    options = {"prompt_length": 20, "limits": Limits(20, 12)}
    full = kvjax.log_likelihood(tiny().model, tokens, policies.full(), **options).logprobs
    wide = kvjax.log_likelihood(tiny().model, tokens, spec, **options).logprobs
    np.testing.assert_allclose(np.asarray(wide), np.asarray(full), atol=1e-5)
    found = kvjax.analysis.selected(
        tiny().model, tokens, CacheSpec(policies.full(), selection=topk_heavy(7)), prompt_length=20
    )
    assert (found.number[..., 20:] == 7).all()
    overlap = found.overlap[..., 20:]
    assert (overlap >= 4 / 7 - 1e-6).all() and overlap.mean() < 1, "four of seven are the best of the true ones"
    lightest = caches.exact_spec("own:lightest", 0.5).policy
    state = kvjax.generate(tiny().model, tokens, lightest, max_new_tokens=2).state
    assert lightest.budget == policies.Fraction(0.5) and state.layers[0][0].position.shape[2] >= 16
    with pytest.raises(ConfigError, match="unknown 'own:darkest'; known: own:lightest, own:chance"):
        caches.exact_spec("own:darkest", 0.5)


def test_algorithm_by_hand(lab):
    found = lab.get(worked.algorithm())
    np.testing.assert_array_equal(found["kvjax"], found["numpy"])
    assert (found["evicted"][3:] >= 0).all() and (found["evicted"][:3] == -1).all()
    assert (found["live"][5] >= 0).sum() == 4
    # Two keys, the first heavier: of three tokens and two slots, the second goes after the third query.
    logits = np.log(np.array([[[1.0, 1, 1], [3, 1, 1], [3, 1, 1]]]))
    last, steps = worked.follow(logits, 3, budget=2, recent=1)
    np.testing.assert_array_equal(last, [2, 2, 2])
    np.testing.assert_array_equal(steps["evicted"], [-1, -1, 1])
    np.testing.assert_allclose(steps["score"][2], [1 + 3 / 4 + 3 / 5, 1 / 4 + 1 / 5, 1 / 5])


def test_neurons(lab):
    model, tokens = tiny().model, random_tokens(2, 32, seed=1)
    active = neurons.frequency(model, tokens)
    assert active.shape == (2, model.config.mlp_size)
    count = round(neurons.TOP * model.config.mlp_size)
    np.testing.assert_allclose(active.mean(axis=1), count / model.config.mlp_size, atol=1e-6)
    none = np.zeros(active.shape, bool)
    every = neurons.without(model, ~none)
    assert all(
        not np.any(every.params[f"layer_{i}"]["mlp"][name]["kernel"]) for i in range(2) for name in ("up", "down")
    )
    np.testing.assert_array_equal(
        neurons.without(model, none).params["layer_1"]["mlp"]["down"]["kernel"],
        model.params["layer_1"]["mlp"]["down"]["kernel"],
    )
    one = none.copy()
    one[0, 3] = True
    kernel = np.asarray(neurons.without(model, one).params["layer_0"]["mlp"]["down"]["kernel"])
    assert not kernel[3].any() and kernel[4].any()


def test_shares_and_ranks(lab):
    scores = {"score": np.array([[-1.0, -2, np.nan], [-3, -2, -1]]), "label": np.array([0, 1])}
    assert list(choice.chosen(scores)) == [0, 2] and choice.accuracy(scores) == 0.5
    assert choice.chance(scores) == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert choice.agreement(scores, {"score": np.array([[-1.0, -2, np.nan], [-1, -2, -3]])}) == 0.5
    part = recall.Recall(cache="h2o", budget=0.2, task="passkey", prompts=1, length=100, nearest=10, farthest=19)
    assert recall.inside(part, 14) == 0.5
    from experiments.papers.h2o.neurons import spearman

    x = np.array([1.0, 2, 2, 5])
    assert spearman(x, x**3) == pytest.approx(1) and spearman(x, -x) == pytest.approx(-1)


def test_steps_of_a_bench_are_read(lab, monkeypatch):
    def run(command, **options):
        (file,) = (each.removeprefix("--output=") for each in command if each.startswith("--output="))
        rows = [{"side": "h2o", "ms/step": 2.0, "slots": 7}, {"side": "full", "ms/step": 5.0, "slots": 30}]
        rows.append({"side": "limit of h2o", "ms/step": 1.0, "slots": 7})
        Path(file).write_text(json.dumps({"decode": rows}))
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(cpu.subprocess, "run", run)
    found = lab.get(cpu.decode(lab.settings, 1, 512))
    assert cpu.milliseconds(found, "full") == 5.0 and list(found["side"]) == ["h2o", "full"]
