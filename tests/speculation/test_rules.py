"""Acceptance rules: worked cases, and distributions by enumeration in float64."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.speculation import rules

V = 5
accept_ratio = jax.jit(rules.accept_ratio)


@pytest.fixture(scope="module")
def cases(shared_data):
    arrays = np.load(shared_data / "examples" / "reuse_cases.npz")
    about = json.loads(bytes(arrays["cases"]))

    def of(kind):
        for number, case in enumerate(about):
            if case["kind"] == kind:
                given = {name: arrays[f"{number}_in_{name}"] for name in case["inputs"]}
                given = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in given.items()}
                yield case, given, {name: arrays[f"{number}_{name}"] for name in case["outputs"]}

    return of


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def probs(logits):
    return jax.nn.softmax(jnp.asarray(logits), axis=-1)


def test_rounds_of_the_ratio_rule(cases):
    for case, given, expected in cases("ratio_round"):
        made = accept_ratio(
            probs(given["p_logits"]), probs(given["q_logits"]), given["draft"], given["u"]
        )  # fmt: skip
        assert made.accepted == case["expect"]["accepted"]
        np.testing.assert_allclose(made.probs, expected["law"], atol=1e-7)
        token = rules.sample_inverse_cdf(made.probs, given["w"])
        np.testing.assert_array_equal([*given["draft"][: made.accepted], token], expected["tokens"])


def enumerated(p, q):
    """Joint chances of (0, 1, 2 accepted, their tokens and the one after) of a round of two drafts."""
    (p1, p2, p3), (q1, q2) = p, q
    one, two = q1 * rules.acceptance_chance(p1, q1), q2 * rules.acceptance_chance(p2, q2)
    refused, refused_then = 1 - one.sum(), 1 - two.sum(-1)
    return (
        refused * rules.residual(p1, q1),
        (one * refused_then)[:, None] * rules.residual(p2, q2),
        one[:, None, None] * two[:, :, None] * p3,
    )


def test_distributions_of_the_ratio_rule(cases):
    for case, given, expected in cases("ratio_law"):
        p = [probs(given[f"p{place}_logits"]) for place in (1, 2, 3)]
        q = [probs(given[f"q{place}_logits"]) for place in (1, 2)]
        joint = enumerated(p, q)
        for number, made in enumerate(joint):
            np.testing.assert_allclose(made, expected[f"law_{number}"], atol=1e-7)
        accepted = np.array([made.sum() for made in joint])
        np.testing.assert_allclose(accepted, expected["accepted"], atol=1e-7)
        np.testing.assert_allclose(accepted @ [1, 2, 3], case["expect"]["tokens_a_round"], rtol=1e-12)
        place = [1 - accepted[0], accepted[2] / (1 - accepted[0])]
        np.testing.assert_allclose(place, expected["place"], atol=1e-7)


def random_rounds(seed):
    """Probabilities of a round after each path; some of the five tokens are filtered out of some of them."""
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        logits = rng.normal(size=(*shape, V)) * 2
        return probs(
            np.where((rng.random(logits.shape) < 0.3) & (logits < logits.max(-1, keepdims=True)), -np.inf, logits)
        )

    return [drawn(), drawn(V), drawn(V, V)], [drawn(), drawn(V)]


@pytest.mark.parametrize("seed", range(4))
def test_the_text_has_the_distribution_of_the_target(seed):
    """Exactly: the chance of each text of three tokens, whatever number of drafts a round accepts."""
    (p1, p2, p3), q = random_rounds(seed)
    none, one, two = enumerated((p1, p2, p3), q)
    # A round that ends early is followed by tokens of the target's distribution.
    three = (none[:, None, None] * p2[:, :, None] + one[:, :, None]) * p3 + two
    np.testing.assert_allclose(three, p1[:, None, None] * p2[:, :, None] * p3, atol=1e-12)


def test_a_chain_of_two_levels_has_the_distribution_of_the_target(cases):
    """A refused token of the middle level is drawn from its residual; TriForce's code draws it from all of `r`."""
    for case, given, expected in cases("chain_law"):
        p, q, r = (probs(given[f"{name}_logits"]) for name in "pqr")

        def verified(target, drafts):
            kept = drafts * rules.acceptance_chance(target, drafts)
            return kept + (1 - kept.sum()) * rules.residual(target, drafts)

        middle = verified(r, q)
        np.testing.assert_allclose(middle, r, atol=1e-12)
        np.testing.assert_allclose(middle, expected["middle"], atol=1e-7)
        np.testing.assert_allclose(verified(p, middle), p, atol=1e-12)
        np.testing.assert_allclose(p, expected["law"], atol=1e-7)
        accepted = [(x * rules.acceptance_chance(y, x)).sum() for x, y in ((q, r), (r, p))]
        wanted = [case["expect"][f"accepted_{name}"] for name in ("inner", "outer")]
        np.testing.assert_allclose(accepted, wanted, rtol=1e-6)
    p, q = jnp.array([0.6, 0.3, 0.1]), jnp.array([0.2, 0.2, 0.6])
    kept = q * rules.acceptance_chance(p, q)
    wrong = kept + (1 - kept.sum()) * p
    np.testing.assert_allclose(wrong, [0.5, 0.35, 0.15], atol=1e-12)


def test_frequencies_of_draws():
    """200,000 rounds: tokens at the first place, and the drafts that are accepted, within 4 standard errors."""
    (p1, p2, p3), (q1, q2) = random_rounds(11)
    draws, keys = 200_000, iter(jax.random.split(jax.random.key(5), 4))
    first = rules.sample_inverse_cdf(jnp.broadcast_to(q1, (draws, V)), jax.random.uniform(next(keys), (draws,)))
    second = rules.sample_inverse_cdf(q2[first], jax.random.uniform(next(keys), (draws,)))
    draft = jnp.stack([first, second], axis=1)
    p = jnp.stack([jnp.broadcast_to(p1, (draws, V)), p2[first], p3[first, second]], axis=1)
    q = jnp.stack([jnp.broadcast_to(q1, (draws, V)), q2[first]], axis=1)
    made = rules.accept_ratio(p, q, draft, jax.random.uniform(next(keys), (draws, 2)))
    token = rules.sample_inverse_cdf(made.probs, jax.random.uniform(next(keys), (draws,)))
    tokens = jnp.where(made.accepted == 0, token, first)
    for got, chance in (
        (jnp.bincount(tokens, length=V), p1),
        (jnp.bincount(made.accepted, length=3), jnp.stack([x.sum() for x in enumerated((p1, p2, p3), (q1, q2))])),
    ):
        error = np.sqrt(chance * (1 - chance) / draws)
        assert np.all(np.abs(got / draws - chance) <= 4 * error)


def test_shared_rounds(cases):
    for case, given, expected in cases("shared_round"):
        p, q = given["p_logits"], given["q_logits"]
        draft = np.argmax(q + given["noise"][:-1], axis=1)
        np.testing.assert_array_equal(draft, expected["draft"])
        count, token = rules.accept_shared(draft, np.argmax(p + given["noise"], axis=1))
        assert count == case["expect"]["accepted"]
        np.testing.assert_array_equal([*draft[:count], token], expected["tokens"])
        one, two = probs(p[0]), probs(q[0])
        delta = rules.total_variation(one, two)
        np.testing.assert_allclose(delta, case["expect"]["total_variation"], rtol=1e-7)
        chance = rules.shared_acceptance_chance(one, two)
        np.testing.assert_allclose(chance, case["expect"]["chance_first"], rtol=1e-7)
        np.testing.assert_allclose((1 - delta) / (1 + delta), case["expect"]["bound"], rtol=1e-7)
        assert chance >= (1 - delta) / (1 + delta)


def test_a_draft_that_the_target_cannot_choose_is_refused():
    p, q = jnp.array([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]]), jnp.array([[0.5, 0.5, 0.0]])
    draft, zero = jnp.array([0]), jnp.zeros(1)
    made = rules.accept_ratio(p, q, draft, zero)
    assert made.accepted == 0
    np.testing.assert_allclose(made.probs, [0, 0, 1])
    assert rules.accept_ratio(p, q, jnp.array([1]), zero).accepted == 1
    # Equal distributions leave no residual, and probabilities of NaN accept nothing.
    np.testing.assert_allclose(rules.residual(p, p), p)
    broken = rules.accept_ratio(p, q * jnp.nan, jnp.array([1]), zero)
    assert broken.accepted == 0
    np.testing.assert_allclose(broken.probs, p[0])
    assert rules.sample_inverse_cdf(jnp.array([0.5, 0.4999, 0.0]), jnp.array(0.99999)) == 1


@pytest.mark.parametrize(("alpha", "gamma", "tokens"), [(0.8, 4, 3.3616), (1, 3, 4.0), (0, 5, 1.0)])
def test_mean_tokens_per_round(alpha, gamma, tokens):
    assert rules.mean_tokens_per_round(alpha, gamma) == pytest.approx(tokens, rel=1e-12)
