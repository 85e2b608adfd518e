"""Cache augmentation: without input vectors nothing changes, what is appended, gradients, and training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import contexts, policies, reuse, selection, storage, training
from kvjax.cache import Block
from kvjax.errors import CheckpointError, InputError
from kvjax.models.bound import bind
from kvjax.models.decoder import Decoder
from kvjax.training import augmentation
from tests.reuse.test_prediction import directional, model_of
from tests.tiny import random_tokens, tiny

TOKENS, LENGTHS = random_tokens(3, 20, seed=1), [20, 7, 1]


@pytest.fixture(scope="module")
def model():
    return tiny().model


def random_coprocessor(model, latents: int) -> reuse.Coprocessor:
    """A coprocessor whose parameters are not those of the model."""
    made = reuse.initial_coprocessor(model, latents)
    rng = np.random.default_rng(5)
    changed = jax.tree.map(lambda leaf: leaf * (1 + 0.3 * rng.normal(size=leaf.shape).astype(np.float32)), made.params)
    return dataclasses.replace(made, params=changed)


def prefilled(model, **options):
    return contexts.prefill(model, TOKENS, policies.full(), lengths=LENGTHS, **options)


def test_no_input_vectors_leave_a_context_as_it_is(model):
    context = prefilled(model)
    assert reuse.augment(model, context, reuse.initial_coprocessor(model, 0)) is context
    at = np.array([[3, 9], [1, 4], [16, 2]], np.int32)
    found = training.nats_ahead(model.config, model.params, None, jnp.asarray(TOKENS), jnp.asarray(at), ahead=4)
    whole = -np.asarray(kvjax.log_likelihood(model, TOKENS, policies.full(), prompt_length=20).logprobs)
    expected = [[whole[row, point - 1 : point + 3] for point in own] for row, own in enumerate(at)]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", [{}, {"learned_positions": True, "rope": None}, {"embed_scale": 3.0}])
def test_a_copy_of_the_decoder_is_a_text_with_embeddings(settings):
    """Without a cache: the text and the input vectors, and then the text and the hidden states of these."""
    model = model_of(**settings)
    made = reuse.initial_coprocessor(model, 3)
    context = reuse.augment(model, contexts.prefill(model, TOKENS[:1], policies.full()), made)
    decoder = Decoder(model.config)
    text = model.params["embed"]["tokens"][TOKENS[:1]] * model.config.embed_scale

    def run(latents):
        x = jnp.concatenate([text, latents], axis=1)
        return decoder.apply({"params": model.params}, x, method="hidden")[0][:, -3:]

    hidden = run(run(made.latents[None]))
    logits = decoder.apply({"params": model.params}, hidden[:, -1], method="logits")
    np.testing.assert_allclose(context.logits, logits, atol=1e-4)
    assert np.abs(np.asarray(made.latents)).max() > 0


def test_embeddings_of_tokens_are_these_tokens(model):
    decoder, row = bind(model.config, model.params), jnp.full((1,), 20, jnp.int32)
    block = Block(jnp.arange(20, dtype=jnp.int32)[None], row, row, ((None,),) * 2)
    ids = jnp.asarray(TOKENS[:1])
    embedded = jnp.take(model.params["embed"]["tokens"], ids, axis=0)
    np.testing.assert_array_equal(decoder.enter(ids, block), decoder.enter(embedded, block))


@pytest.mark.sampled(0)
def test_rows_do_not_depend_on_each_other_and_old_slots_do_not_change(model):
    made, before = random_coprocessor(model, 5), prefilled(model, room=24)
    augmented = reuse.augment(model, before, made)  # arrays grow
    np.testing.assert_array_equal(augmented.state.length, np.add(LENGTHS, 5))
    for row, length in enumerate(LENGTHS):
        alone = reuse.augment(model, contexts.prefill(model, TOKENS[row, :length], policies.full()), made)
        np.testing.assert_allclose(augmented.logits[row], alone.logits[0], atol=1e-4)
        answers = [
            contexts.decode(model, each, max_new_tokens=4).tokens
            for each in (contexts.rows(augmented, [row]), alone)
        ]  # fmt: skip
        np.testing.assert_array_equal(*answers)
    for old, new in zip(before.state.layers, augmented.state.layers, strict=True):
        at = np.argsort(np.where(np.asarray(new.position[0, 0]) < 0, 1 << 20, new.position[0, 0]))
        own = np.argsort(np.where(np.asarray(old.position[0, 0]) < 0, 1 << 20, old.position[0, 0]))
        np.testing.assert_array_equal(np.asarray(new.position[0, 0])[at[:25]], np.arange(25))
        np.testing.assert_array_equal(np.asarray(new.key)[0][:, at[:20]], np.asarray(old.key)[0][:, own[:20]])
    # The context that was given goes on as before.
    np.testing.assert_array_equal(before.kept(0)[0][0], np.arange(20))
    assert augmented.text is None
    longer = contexts.extend(model, augmented, random_tokens(3, 2, seed=4))
    np.testing.assert_array_equal(longer.state.length, np.add(LENGTHS, 7))


def test_compressed_prompts_are_augmented(model):
    context = contexts.prefill(model, TOKENS[:1], policies.snapkv(8, window=4))
    made = reuse.augment(model, context, random_coprocessor(model, 3))
    np.testing.assert_array_equal(made.kept(0)[0][0], [*context.kept(0)[0][0], 20, 21, 22])


def test_refusals(model, tmp_path):
    made, context = random_coprocessor(model, 2), prefilled(model)
    for own in (
        {"policy": policies.h2o(8)},
        {"policy": policies.full(), "storage": storage.kivi(residual=8, group=8)},
        {"policy": policies.full(), "selection": selection.quest(page=4, budget=8, first_layer=0)},
    ):
        other = contexts.prefill(model, TOKENS, **own)
        with pytest.raises(InputError, match="cannot be augmented"):
            reuse.augment(model, other, made)
    with pytest.raises(InputError, match="belongs to another model"):
        reuse.augment(tiny(seed=1).model, context, made)
    with pytest.raises(InputError, match=r"not a copy of this model: .*layer_2.*, and in the model missing"):
        reuse.augment(model, context, random_coprocessor(tiny(layers=4).model, 2))
    with pytest.raises(InputError, match=r"latents must be vectors \[n, 32\].*got shape \[2, 3\]"):
        reuse.augment(model, context, dataclasses.replace(made, latents=made.latents[:, :3]))
    with pytest.raises(InputError, match=r"must be a kvjax\.reuse\.Coprocessor; got 1"):
        reuse.augment(model, context, 1)
    for wrong in (-1, 1.5, True):
        with pytest.raises(InputError, match="latents must be a whole number of at least 0"):
            reuse.initial_coprocessor(model, wrong)
    table = model_of(learned_positions=True, rope=None, max_positions=21)
    with pytest.raises(InputError, match="position table ends at 21"):
        reuse.augment(table, contexts.prefill(table, TOKENS, policies.full()), reuse.initial_coprocessor(table, 2))
    augmented = reuse.augment(model, contexts.rows(context, [0]), made)
    with pytest.raises(InputError, match="cannot be saved"):
        contexts.save(tmp_path / "context", augmented)
    with pytest.raises(InputError, match="cannot be stored"):
        kvjax.PrefixStore(1 << 24).add(augmented)
    with pytest.raises(InputError, match="tokens are not known"):
        reuse.edit(model, augmented, (0, 1, [3]))
    with pytest.raises(InputError, match="nothing to train"):
        training.train_coprocessor(model, reuse.initial_coprocessor(model, 0), TOKENS)
    with pytest.raises(InputError, match="ahead"):
        training.train_coprocessor(model, made, TOKENS, ahead=20)


@pytest.mark.sampled(0)
def test_the_loss_is_that_of_augmented_contexts(model):
    made = random_coprocessor(model, 3)
    at = np.array([[3, 12], [1, 4], [16, 2]], np.int32)
    found = training.nats_ahead(
        model.config, model.params, augmentation.trained_augmentation(made), jnp.asarray(TOKENS), jnp.asarray(at),
        ahead=4,
    )  # fmt: skip
    for row, own in enumerate(at):
        for number, point in enumerate(own):
            context = reuse.augment(model, contexts.prefill(model, TOKENS[row, :point], policies.full()), made)
            for place in range(4):
                token = int(TOKENS[row, point + place])
                nats = -float(jax.nn.log_softmax(context.logits)[0, token])
                assert float(found[row, number, place]) == pytest.approx(nats, abs=1e-4)
                context = contexts.extend(model, context, [[token]])


def test_points_leave_room_for_what_follows():
    drawn = augmentation.random_points(np.random.default_rng(0), (50, 8), 12, 4)
    assert drawn.min() == 1 and drawn.max() == 8


@pytest.mark.sampled(0)
def test_gradients_are_those_of_differences():
    model = model_of()
    made = random_coprocessor(model, 2)
    at = jnp.asarray([[3, 12], [1, 4], [15, 2]], jnp.int32)

    @jax.jit
    def loss(trained):
        return jnp.mean(training.nats_ahead(model.config, model.params, trained, jnp.asarray(TOKENS), at, ahead=4))

    trained = augmentation.trained_augmentation(made)
    by_gradient, by_difference = directional(loss, trained, seed=2, step=1e-2)
    assert by_gradient == pytest.approx(by_difference, rel=2e-2, abs=2e-3) and abs(by_gradient) > 1e-2
    slope = jax.grad(loss)(trained)
    assert all(
        float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves((slope["latents"], slope["params"]["layer_0"]))
    )


@pytest.mark.sampled(0)
def test_training_lowers_the_loss_and_files_have_what_was_trained(model, tmp_path):
    texts = np.tile(TOKENS[:1, :8], (2, 3))
    made = training.train_coprocessor(
        model, reuse.initial_coprocessor(model, 2), texts, steps=12, rows=2, points=4, ahead=4, learning_rate=1e-2
    )
    assert made.losses.shape == (12,) and made.losses[-3:].mean() < made.losses[:3].mean() - 0.1
    path = tmp_path / "coprocessor.safetensors"
    reuse.save_coprocessor(path, model, made.coprocessor)
    again, context = reuse.load_coprocessor(path, model), prefilled(model)
    one, two = (reuse.augment(model, context, each).logits for each in (again, made.coprocessor))
    np.testing.assert_array_equal(one, two)
    with pytest.raises(CheckpointError, match="made for another model"):
        reuse.load_coprocessor(path, tiny(seed=1).model)
    with pytest.raises(CheckpointError, match="cannot be read"):
        reuse.load_coprocessor(tmp_path / "nothing", model)
    (tmp_path / "maps.safetensors").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="has format 'kvjax-coprocessor-1', and 'kvjax-predictor-1' is needed"):
        reuse.load_predictor(tmp_path, model)
