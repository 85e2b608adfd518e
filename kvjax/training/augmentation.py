"""Trains cache augmentation (`kvjax.reuse.augment`): a copy of the decoder, and its input vectors."""

from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import count_argument, number_argument
from kvjax.cache.state import Block
from kvjax.errors import InputError
from kvjax.inputs import check_batch
from kvjax.models.bound import bind, logprobs_of
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.parallel.sharding import Params
from kvjax.reuse.augmentation import Coprocessor, appended, check_coprocessor, reader_params
from kvjax.reuse.whole_text import KeyValue, full_cache, full_phase, run_whole
from kvjax.summary import one_line
from kvjax.training.train import optimizer_of

Array = jax.Array
AHEAD = 16  # tokens after a point whose loss is trained (arXiv:2412.17747, section 2.2)


class TrainedAugmentation(TypedDict):
    """The parameters that are trained; see `kvjax.reuse.Coprocessor`."""

    params: Params
    latents: Array


def random_points(rng: np.random.Generator, shape: tuple[int, int], width: int, ahead: int = AHEAD) -> np.ndarray:
    """Draws points of texts, [B, M] int32: numbers of tokens, at least 1, after which at least `ahead` follow.

    Args:
      rng: of the draw.
      shape: B and M.
      width: the tokens of a text.
      ahead: the tokens that follow.
    """
    return rng.integers(1, width - ahead + 1, shape).astype(np.int32)


def nats_ahead(
    config: DecoderConfig,
    params: Params,
    trained: TrainedAugmentation | None,
    tokens: Array,
    points: Array,
    *,
    ahead: int = AHEAD,
) -> Array:
    """Returns the negative log-likelihoods of the tokens after points of texts, whose caches are augmented there.

    A text is read once; the cache at a point has the slots of the tokens before it.

    Args:
      config: the decoder.
      params: of the decoder, which are constants.
      trained: the coprocessor; None, or one without input vectors, for the cache as it is.
      tokens: [B, T] int32, texts without padding.
      points: [B, M] int32, see `random_points`.
      ahead: the number of tokens after each point.

    Returns:
      [B, M, ahead] float32, in nats.
    """
    batch, width = tokens.shape
    count = points.shape[1]
    params = jax.lax.stop_gradient(params)
    decoder = bind(config, params)
    _, layers = run_whole(config, params, tokens, jnp.full((batch,), width, jnp.int32))
    # [B * M, K, T, D] each
    layers = tuple(KeyValue(*(jnp.repeat(each, count, axis=0) for each in layer)) for layer in layers)
    # [B * M]
    at = points.reshape(-1)
    latents = 0 if trained is None else len(trained["latents"])
    # Without input vectors, the decoder is fed the last token before a point again.
    begun = at if latents else at - 1
    slots = width + latents + ahead
    phase = full_phase(config, slots)
    kv = full_cache(config, params, layers, begun, jnp.full_like(at, slots), slots)
    hidden = []
    if trained is not None and latents:
        reader = bind(config, reader_params(params, trained["params"]))
        x, kv = appended(decoder, reader, trained["latents"], kv, phase)
        hidden.append(x[:, -1:])
    # [B * M, ahead + 1]: the tokens from the one before a point on
    index = at[:, None] + jnp.arange(-1, ahead, dtype=jnp.int32)
    ids = jnp.take_along_axis(jnp.repeat(tokens, count, axis=0), index, axis=1)
    given = ids[:, 1 if latents else 0 : -1]
    if given.shape[1]:
        position = kv.length[:, None] + jnp.arange(given.shape[1], dtype=jnp.int32)
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
        x, _ = decoder.hidden(given, kv, block, phase)
        hidden.append(x)
    # [B * M, ahead]
    found = -logprobs_of(decoder, jnp.concatenate(hidden, axis=1), ids[:, 1:])
    return found.reshape(batch, count, ahead)


def trained_augmentation(coprocessor: Coprocessor) -> TrainedAugmentation:
    """Returns the parameters of a coprocessor that are trained, in float32."""
    return jax.tree.map(
        lambda leaf: jnp.array(leaf, jnp.float32),
        TrainedAugmentation(params=coprocessor.params, latents=coprocessor.latents),
    )  # fmt: skip


def coprocessor_of(model: Model, trained: TrainedAugmentation) -> Coprocessor:
    """Returns a coprocessor with trained parameters, in the dtype of the model."""
    made = jax.tree.map(lambda leaf: leaf.astype(model.dtype), trained)
    return Coprocessor(made["params"], made["latents"])


class TrainedCoprocessor(NamedTuple):
    """The result of `train_coprocessor`.

    Attributes:
      coprocessor: with trained parameters, for `kvjax.reuse.augment`.
      losses: [steps] float32, the loss before each step.
    """

    coprocessor: Coprocessor
    losses: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def train_coprocessor(
    model: Model,
    coprocessor: Coprocessor,
    tokens: ArrayLike,
    *,
    steps: int = 200,
    rows: int = 4,
    points: int = 4,
    ahead: int = AHEAD,
    learning_rate: float = 3e-4,
    seed: int = 0,
) -> TrainedCoprocessor:
    """Trains a coprocessor and its input vectors (arXiv:2412.17747, section 2.2); the decoder is not trained.

    The loss is the mean negative log-likelihood of the next tokens after random points of texts, in nats. The optimizer
    is AdamW (optax) with a cosine schedule, after clipping to a global norm of 1. ``python -m
    experiments.train_reuse`` trains on text files, and resumes.

    Args:
      model: the decoder.
      coprocessor: from `kvjax.reuse.initial_coprocessor`, with at least one input vector.
      tokens: [N, T] int, texts without padding.
      steps: the number of steps.
      rows: the number of texts of each step's batch; steps go through all texts in turn.
      points: the number of points of a text.
      ahead: the number of tokens after a point, below T.
      learning_rate: the learning rate of the first step.
      seed: the random seed of the points.

    Raises:
      InputError: tokens that do not fit the model, a coprocessor for another model, or a number that is not valid.
      ConfigError: a model that is spread over several processes.
    """
    import optax

    check_coprocessor(model, coprocessor)
    if not len(coprocessor.latents):
        raise InputError("a coprocessor without input vectors has nothing to train; give at least one.")
    texts = check_batch(model.config, tokens, None, new_tokens=0).tokens
    width = texts.shape[1]
    steps, rows, points = (
        count_argument(*each, minimum=1, error=InputError)
        for each in (("steps", steps), ("rows", rows), ("points", points))
    )
    ahead = count_argument("ahead", ahead, minimum=1, maximum=width - 1, error=InputError)
    learning_rate = number_argument("learning_rate", learning_rate, minimum=0.0, maximum=float("inf"), error=InputError)
    optimizer = optimizer_of(learning_rate, steps)
    config = model.config

    @jax.jit
    def step(
        params: Params, trained: TrainedAugmentation, memory: optax.OptState, ids: Array, at: Array
    ) -> tuple[TrainedAugmentation, optax.OptState, Array]:
        def loss_of(trained: TrainedAugmentation) -> Array:
            return jnp.mean(nats_ahead(config, params, trained, ids, at, ahead=ahead))

        loss, slope = jax.value_and_grad(loss_of)(trained)
        # optax multiplies integers by floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            change, memory = optimizer.update(slope, memory, trained)
            return optax.apply_updates(trained, change), memory, loss

    trained, rng = trained_augmentation(coprocessor), np.random.default_rng(seed)
    memory, losses = optimizer.init(trained), []
    for number in range(steps):
        own = (number * rows + np.arange(rows)) % len(texts)
        at = random_points(rng, (rows, points), width, ahead)
        trained, memory, loss = step(model.params, trained, memory, *model.place((texts[own], at)))
        losses.append(loss)
    return TrainedCoprocessor(coprocessor_of(model, trained), np.asarray(jax.device_get(losses), np.float32))
