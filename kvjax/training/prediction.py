"""Trains KV prediction (`kvjax.reuse.predict`): an auxiliary model, and maps from its keys and values."""

import dataclasses
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
from kvjax.reuse.prediction import KVMaps, Predictor, check_predictor, mapped_layers
from kvjax.reuse.whole_text import KeyValue, full_cache, full_phase, run_whole
from kvjax.summary import one_line
from kvjax.training.train import optimizer_of

Array = jax.Array


class TrainedPrediction(TypedDict):
    """The parameters that are trained.

    Attributes:
      auxiliary: of the auxiliary model.
      maps: see `kvjax.reuse.Predictor`.
    """

    auxiliary: Params
    maps: KVMaps


class PredictionLosses(NamedTuple):
    """The parts of the loss of a batch, [] float32 each.

    Attributes:
      base: the mean negative log-likelihood under the base with predicted caches, of the tokens after prompts, in nats.
      auxiliary: the mean negative log-likelihood under the auxiliary model, of all tokens but the first, in nats.
      key: the mean absolute difference of predicted keys from those of the base, before norm and rotation.
      value: the same of values.
    """

    base: Array
    auxiliary: Array
    key: Array
    value: Array

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def total(self) -> Array:
        """The loss, [] float32: the sum of all."""
        return self.base + self.auxiliary + self.key + self.value


def prediction_losses(
    config: DecoderConfig,
    auxiliary: DecoderConfig,
    sources: tuple[int, ...],
    params: Params,
    trained: TrainedPrediction,
    tokens: Array,
    *,
    prompt: int,
) -> PredictionLosses:
    """Computes the loss of KV prediction (arXiv:2410.08391, section 3.2), whose four parts have the weight 1.

    The auxiliary model reads whole texts. The base reads the last token of each prompt and what follows, on the cache
    that is predicted for the tokens before. The paper applies the loss to all tokens of a text; here, as in generation,
    those after a prompt attend to each other by the base's own keys and values.

    Args:
      config: the base.
      auxiliary: the auxiliary model.
      sources: see `kvjax.reuse.Predictor`.
      params: of the base, which are constants.
      trained: the parameters that are trained.
      tokens: [B, T] int32, texts without padding.
      prompt: the tokens of a prompt, from 2 to T - 1.
    """
    rows, width = tokens.shape
    read = jnp.full((rows,), prompt - 1, jnp.int32)
    params = jax.lax.stop_gradient(params)
    _, own = run_whole(config, params, tokens[:, : prompt - 1], read)
    hidden, layers = run_whole(auxiliary, trained["auxiliary"], tokens, jnp.full((rows,), width, jnp.int32))
    of_auxiliary = logprobs_of(bind(auxiliary, trained["auxiliary"]), hidden[:, :-1], tokens[:, 1:])
    # [B, K_aux, prompt - 1, D_aux] each
    layers = tuple(KeyValue(*(each[:, :, : prompt - 1] for each in layer)) for layer in layers)
    predicted = mapped_layers(config, trained["maps"], sources, layers)
    kv = full_cache(config, params, predicted, read, jnp.full((rows,), width, jnp.int32), width)
    # [B, T - prompt]: the last token of a text is not fed
    position = jnp.broadcast_to(jnp.arange(prompt - 1, width - 1, dtype=jnp.int32), (rows, width - prompt))
    block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
    decoder = bind(config, params)
    x, _ = decoder.hidden(tokens[:, prompt - 1 : -1], kv, block, full_phase(config, width))
    of_base = logprobs_of(decoder, x, tokens[:, prompt:])
    distance = [
        jnp.mean(jnp.stack([
            jnp.mean(jnp.abs(one.astype(jnp.float32) - two.astype(jnp.float32)))
            for one, two in zip(side, other, strict=True)
        ]))
        for side, other in zip(zip(*predicted, strict=True), zip(*own, strict=True), strict=True)
    ]  # fmt: skip
    return PredictionLosses(-jnp.mean(of_base), -jnp.mean(of_auxiliary), *distance)


def trained_prediction(predictor: Predictor) -> TrainedPrediction:
    """Returns the parameters of a predictor that are trained, in float32."""
    return jax.tree.map(
        lambda leaf: jnp.array(leaf, jnp.float32),
        TrainedPrediction(auxiliary=predictor.auxiliary.params, maps=predictor.maps),
    )  # fmt: skip


def predictor_of(predictor: Predictor, trained: TrainedPrediction) -> Predictor:
    """Returns a predictor with trained parameters, those of the auxiliary model in the dtype that it has."""
    dtype = predictor.auxiliary.dtype
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), trained["auxiliary"])
    auxiliary = dataclasses.replace(predictor.auxiliary, params=params)
    return Predictor(auxiliary, trained["maps"], predictor.sources)


class TrainedPredictor(NamedTuple):
    """The result of `train_predictor`.

    Attributes:
      predictor: with trained parameters, for `kvjax.reuse.predict`.
      losses: the parts of the loss before each step, [steps] float32 each.
    """

    predictor: Predictor
    losses: PredictionLosses

    def __repr__(self) -> str:
        return one_line(self)


def train_predictor(
    model: Model,
    predictor: Predictor,
    tokens: ArrayLike,
    *,
    prompt_length: int,
    steps: int = 200,
    rows: int = 4,
    learning_rate: float = 3e-4,
) -> TrainedPredictor:
    """Trains an auxiliary model and its maps (KV prediction, arXiv:2410.08391); the base is not trained.

    The optimizer is AdamW (optax) with a cosine schedule, after clipping to a global norm of 1. ``python -m
    experiments.train_reuse`` trains on text files, and resumes.

    Args:
      model: the base.
      predictor: from `kvjax.reuse.initial_predictor`.
      tokens: [N, T] int, texts without padding.
      prompt_length: the tokens of a text whose cache is predicted, and the one after them; from 2 to T - 1.
      steps: the number of steps.
      rows: the number of texts of each step's batch; steps go through all texts in turn.
      learning_rate: the learning rate of the first step.

    Raises:
      InputError: tokens that do not fit the models, a predictor for another base, or a number that is not valid.
      ConfigError: a model that is spread over several processes.
    """
    import optax

    check_predictor(model, predictor)
    texts = check_batch(model.config, tokens, None, new_tokens=0).tokens
    steps, rows = (
        count_argument(*each, minimum=1, error=InputError) for each in (("steps", steps), ("rows", rows))
    )  # fmt: skip
    prompt = count_argument("prompt_length", prompt_length, minimum=2, maximum=texts.shape[1] - 1, error=InputError)
    learning_rate = number_argument("learning_rate", learning_rate, minimum=0.0, maximum=float("inf"), error=InputError)
    optimizer = optimizer_of(learning_rate, steps)
    config, other, sources = model.config, predictor.auxiliary.config, predictor.sources

    @jax.jit
    def step(
        params: Params, trained: TrainedPrediction, memory: optax.OptState, ids: Array
    ) -> tuple[TrainedPrediction, optax.OptState, PredictionLosses]:
        def loss_of(trained: TrainedPrediction) -> tuple[Array, PredictionLosses]:
            losses = prediction_losses(config, other, sources, params, trained, ids, prompt=prompt)
            return losses.total, losses

        slope, losses = jax.grad(loss_of, has_aux=True)(trained)
        # optax multiplies integers by floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            change, memory = optimizer.update(slope, memory, trained)
            return optax.apply_updates(trained, change), memory, losses

    trained = trained_prediction(predictor)
    memory, losses = optimizer.init(trained), []
    for number in range(steps):
        own = (number * rows + np.arange(rows)) % len(texts)
        trained, memory, found = step(model.params, trained, memory, model.place(texts[own]))
        losses.append(found)
    found = jax.tree.map(lambda *each: np.asarray(each, np.float32), *jax.device_get(losses))
    return TrainedPredictor(predictor_of(predictor, trained), found)
