"""KV prediction: identity maps are a prefill, maps are linear maps of the right layers, gradients, and training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import contexts, policies, reuse, training
from kvjax.errors import CheckpointError, InputError
from kvjax.numerics.rope import Rope
from kvjax.training import prediction
from tests.tiny import random_tokens, random_weights, tiny

TOKENS, LENGTHS = random_tokens(3, 20, seed=1), [20, 7, 1]
#: What layers of models have of their own, which a prediction must not apply twice or leave out.
KINDS = {
    "plain": {},
    "norm of each head": {"qk_norm": True},
    "norm with a scale for each head": {"qk_norm": True, "qk_norm_form": "per_head", "qkv_bias": True},
    "norm of all heads": {"qk_norm": True, "qk_norm_form": "joint"},
    "learned positions": {"learned_positions": True, "rope": None},
    "windows": {"windows": (4, None)},
    "RoPE by layer": {"rope": None, "ropes": (Rope(dim=8), None)},
}


def model_of(**settings):
    """A model with random scales of norms, so that a norm that is applied twice changes keys."""
    config = dataclasses.replace(tiny().model.config, **settings)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf * rng.uniform(0.5, 2, leaf.shape).astype(np.float32) if leaf.ndim < 2 else leaf,
        random_weights(config),
    )
    return kvjax.Model(config, params)


def random_predictor(model, auxiliary, **options) -> reuse.Predictor:
    made = reuse.initial_predictor(model, auxiliary, **options)
    rng = np.random.default_rng(3)
    maps = reuse.KVMaps(*(jnp.asarray(rng.normal(size=each.shape) / 4, jnp.float32) for each in made.maps))
    return dataclasses.replace(made, maps=maps)


@pytest.fixture(scope="module")
def model():
    return tiny(layers=4).model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_base_as_its_own_auxiliary_is_a_prefill(kind):
    model = model_of(**KINDS[kind])
    made = reuse.predict(model, reuse.initial_predictor(model, model), TOKENS, lengths=LENGTHS, room=64)
    plain = contexts.prefill(model, TOKENS, policies.full(), lengths=LENGTHS, room=64)
    np.testing.assert_allclose(made.logits, plain.logits, atol=1e-4)
    one, two = (contexts.extend(model, each, random_tokens(3, 4, seed=2)) for each in (made, plain))
    np.testing.assert_allclose(one.logits, two.logits, atol=1e-4)
    assert [each.tolist() for each in made.text] == [each.tolist() for each in plain.text]
    for layer in range(2):
        for got, expected in zip(one.kept(layer), two.kept(layer), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_maps_are_of_the_layers_that_are_named(model):
    """Values, and the keys of the first position, are stored as they are mapped; those of the last token are not."""
    auxiliary = tiny("mqa", head_dim=16, layers=2).model
    for sources, expected in ((None, [0, 0, 1, 1]), ((1, 0, 1, 0), [1, 0, 1, 0])):
        predictor = random_predictor(model, auxiliary, sources=sources)
        made = reuse.predict(model, predictor, TOKENS[:1])
        cache = reuse.compute(auxiliary, TOKENS[0, :-1])
        for index, source in enumerate(expected):
            layer, maps = made.state.layers[index], predictor.maps
            order = np.argsort(np.where(layer.position[0, 0] < 0, 1 << 20, layer.position[0, 0]))[:19]
            # [19, K * D]
            value, key = (side[source].swapaxes(0, 1).reshape(19, -1) for side in (cache.value, cache.key))
            value = value @ np.asarray(maps.value[index]) + np.asarray(maps.value_offset[index])
            key = key @ np.asarray(maps.key[index]) + np.asarray(maps.key_offset[index])
            stored = np.asarray(layer.value)[0][:, order].swapaxes(0, 1).reshape(19, -1)
            np.testing.assert_allclose(stored, value, atol=1e-5)
            np.testing.assert_allclose(np.asarray(layer.key)[0][:, order[0]].ravel(), key[0], atol=1e-5)


@pytest.mark.sampled(0)
def test_rows_do_not_depend_on_each_other_or_on_padding(model):
    predictor = random_predictor(model, reuse.fewer_layers(model, [0, 2]))
    together = reuse.predict(model, predictor, TOKENS, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        alone = reuse.predict(model, predictor, TOKENS[row, :length])
        np.testing.assert_allclose(together.logits[row], alone.logits[0], atol=1e-4)
        answers = [
            contexts.decode(model, each, max_new_tokens=4).tokens
            for each in (contexts.rows(together, [row]), alone)
        ]  # fmt: skip
        np.testing.assert_array_equal(*answers)
    plain = contexts.prefill(model, TOKENS, policies.full(), lengths=LENGTHS)
    assert np.abs(np.asarray(together.logits - plain.logits))[:2].max() > 1e-3
    # A prompt of one token has no predicted slot.
    np.testing.assert_allclose(together.logits[2], plain.logits[2], atol=1e-4)


def test_fewer_layers_are_those_of_the_model(model):
    config = dataclasses.replace(model.config, windows=(None, 8, None, 4))
    smaller = reuse.fewer_layers(dataclasses.replace(model, config=config), [1, 3])
    assert smaller.config.windows == (8, 4) and smaller.config.num_layers == 2
    assert smaller.params["layer_1"] is model.params["layer_3"] and "layer_2" not in smaller.params
    assert reuse.fewer_layers(model, range(4)).config == model.config
    for wrong in ([], [2, 1], [0, 4], [0, 0], [-1], [True]):
        with pytest.raises(InputError, match="layers must be ascending indices from 0 to 3"):
            reuse.fewer_layers(model, wrong)


def test_a_predicted_context_is_not_saved_or_stored(model, tmp_path):
    made = reuse.predict(model, reuse.initial_predictor(model, model), TOKENS[:1])
    with pytest.raises(InputError, match="cannot be saved"):
        contexts.save(tmp_path / "context", made)
    with pytest.raises(InputError, match="cannot be stored"):
        kvjax.PrefixStore(1 << 24).add(made)


def test_refusals(model):
    predictor = reuse.initial_predictor(model, model)
    with pytest.raises(InputError, match="sources must be 2 layers of the auxiliary model, from 0 to 3"):
        reuse.predict(tiny().model, predictor, TOKENS)
    with pytest.raises(InputError, match=r"sources must be 4 layers of the auxiliary model, from 0 to 1"):
        reuse.initial_predictor(model, tiny().model, sources=[0, 1, 2, 1])
    maps = predictor.maps._replace(value=predictor.maps.value[:, :3])
    with pytest.raises(InputError, match=r"maps.value has shape \[4, 3, 16\], and these models need \[4, 16, 16\]"):
        reuse.predict(model, dataclasses.replace(predictor, maps=maps), TOKENS)
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, vocab_size=63))
    with pytest.raises(InputError, match="a vocabulary of 63, and the base one of 64"):
        reuse.initial_predictor(model, other)
    with pytest.raises(InputError, match=r"predictor must be a kvjax\.reuse\.Predictor; got 3"):
        reuse.predict(model, 3, TOKENS)
    with pytest.raises(InputError, match="room=4 is smaller"):
        reuse.predict(model, predictor, TOKENS, room=4)
    short = dataclasses.replace(
        model, config=dataclasses.replace(model.config, learned_positions=True, max_positions=8)
    )
    with pytest.raises(InputError, match="8"):
        reuse.predict(model, dataclasses.replace(predictor, auxiliary=short), TOKENS)
    mesh = dataclasses.replace(model, mesh=jax.make_mesh((1,), ("data",)))
    with pytest.raises(InputError, match="without a mesh"):
        reuse.predict(mesh, predictor, TOKENS)
    for options in ({"prompt_length": 1}, {"prompt_length": 20}, {"prompt_length": 8, "rows": 0}):
        with pytest.raises(InputError):
            training.train_predictor(model, predictor, TOKENS, **options)


def directional(loss, trained, seed=0, step=3e-3):
    """The slope of a loss along a random direction, by the gradient and by differences."""
    rng = np.random.default_rng(seed)
    way = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), trained)
    size = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(way)))
    way = jax.tree.map(lambda leaf: leaf / size, way)
    one, two = (
        loss(jax.tree.map(lambda x, d, by=by: x + by * d, trained, way)) for by in (step, -step)
    )  # fmt: skip
    slope = jax.grad(loss)(trained)
    inner = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(way), strict=True))
    return float(inner), float(one - two) / (2 * step)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("part", ["total", "base", "auxiliary", "key", "value"])
def test_gradients_are_those_of_differences(part):
    model = model_of(qk_norm=True)
    predictor = random_predictor(model, reuse.fewer_layers(model, [1]))

    @jax.jit
    def loss(trained):
        losses = training.prediction_losses(
            model.config, predictor.auxiliary.config, predictor.sources, model.params, trained, jnp.asarray(TOKENS),
            prompt=12,
        )  # fmt: skip
        return getattr(losses, part)

    by_gradient, by_difference = directional(loss, prediction.trained_prediction(predictor))
    assert by_gradient == pytest.approx(by_difference, rel=2e-2, abs=1e-4) and abs(by_gradient) > 2e-3


def test_the_loss_of_the_base_is_that_of_predicted_contexts():
    model = tiny().model
    predictor = random_predictor(model, reuse.fewer_layers(model, [1]))
    losses = prediction.prediction_losses(
        model.config, predictor.auxiliary.config, predictor.sources, model.params,
        prediction.trained_prediction(predictor), jnp.asarray(TOKENS), prompt=12,
    )  # fmt: skip
    nats = []
    for row in TOKENS:
        context = reuse.predict(model, predictor, row[:12])
        for token in row[12:]:
            nats.append(-float(jax.nn.log_softmax(context.logits)[0, token]))
            context = contexts.extend(model, context, [[int(token)]])
    assert float(losses.base) == pytest.approx(np.mean(nats), abs=1e-4)
    alone = kvjax.log_likelihood(predictor.auxiliary, TOKENS, policies.full(), prompt_length=20).logprobs
    assert float(losses.auxiliary) == pytest.approx(-np.mean(np.asarray(alone)), abs=1e-4)
    own = reuse.initial_predictor(model, model)
    same = prediction.prediction_losses(
        model.config, model.config, own.sources, model.params, prediction.trained_prediction(own), jnp.asarray(TOKENS),
        prompt=12,
    )  # fmt: skip
    assert float(same.key) < 1e-6 and float(same.value) < 1e-6


@pytest.mark.sampled(0)
def test_training_lowers_the_loss_and_files_have_what_was_trained(tmp_path):
    model = tiny().model
    predictor = random_predictor(model, reuse.fewer_layers(model, [1]))
    made = training.train_predictor(model, predictor, TOKENS, prompt_length=12, steps=12, rows=3, learning_rate=1e-2)
    total = made.losses.total
    assert total.shape == (12,) and total[1] < total[0] and total[-1] < total[0] - 0.05
    assert (np.asarray(predictor.maps.key) != np.asarray(made.predictor.maps.key)).any()
    reuse.save_predictor(tmp_path / "predictor", model, made.predictor)
    again = reuse.load_predictor(tmp_path / "predictor", model)
    assert again.sources == made.predictor.sources and again.auxiliary.config == made.predictor.auxiliary.config
    one, two = (reuse.predict(model, each, TOKENS).logits for each in (again, made.predictor))
    np.testing.assert_array_equal(one, two)
    other = tiny(seed=1).model
    with pytest.raises(CheckpointError, match="made for another model"):
        reuse.load_predictor(tmp_path / "predictor", other)
    with pytest.raises(CheckpointError, match="cannot be read"):
        reuse.load_predictor(tmp_path / "nothing", model)
    with pytest.raises(InputError, match="sources must be 4 layers"):
        reuse.save_predictor(tmp_path / "other", tiny(layers=4).model, made.predictor)
