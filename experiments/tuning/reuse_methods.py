"""The two methods of learned reuse as trainings: what is trained, its loss, and the loss of held-out windows."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tuning.reuse_config import AUGMENTATION, PREDICTION, TrainReuseConfig, layers_of
from kvjax import reuse, training
from kvjax.errors import ConfigError, InputError
from kvjax.models.model import Model
from kvjax.parallel.sharding import Params
from kvjax.training import augmentation, prediction
from kvjax.typing import PyTree

Array = jax.Array
Measured = Callable[..., dict[str, Array]]  # parameters of the model, those of the variants, and a batch -> losses
UNCHANGED = "unchanged"  # the cache of the model itself


class Method(Protocol):
    """A method of learned reuse."""

    def initial(self) -> list[PyTree]:
        """Returns the first parameters of each variant."""

    def loss(self, variant: int, params: Params, trained: PyTree, tokens: Array, key: Array) -> tuple[Array, Array]:
        """Returns the loss of a batch, and the part that counts in the end, [] float32 in nats."""

    def held_out(self, params: Params, trained: list[PyTree], tokens: np.ndarray) -> dict[str, float]:
        """Returns the mean loss of each variant on held-out windows, and of the model itself, in nats."""

    def save(self, folder: Path, trained: list[PyTree]) -> None:
        """Saves each variant for the library."""


class Prediction:
    """KV prediction.

    Attributes:
      predictors: of each variant, before training.
    """

    def __init__(self, config: TrainReuseConfig, model: Model):
        self.config, self.model = config, model
        try:
            smaller = [reuse.fewer_layers(model, layers_of(each)) for each in config.variants]
        except InputError as error:
            raise ConfigError(f"prediction.auxiliaries: {error}") from None
        self.predictors = [reuse.initial_predictor(model, each, seed=config.seed) for each in smaller]

    def initial(self) -> list[PyTree]:
        return [prediction.trained_prediction(each) for each in self.predictors]

    def losses(self, variant: int, params: Params, trained: PyTree, tokens: Array) -> training.PredictionLosses:
        """Returns the parts of the loss of a batch."""
        own = self.predictors[variant]
        return prediction.prediction_losses(
            self.model.config, own.auxiliary.config, own.sources, params, trained, tokens,
            prompt=self.config.windows.prompt_length,
        )  # fmt: skip

    def loss(self, variant: int, params: Params, trained: PyTree, tokens: Array, key: Array) -> tuple[Array, Array]:
        losses = self.losses(variant, params, trained, tokens)
        return losses.total, losses.base

    def held_out(self, params: Params, trained: list[PyTree], tokens: np.ndarray) -> dict[str, float]:
        return _means(self._measured, self.config.rows, params, trained, tokens)

    @functools.cached_property
    def _measured(self) -> Measured:
        @jax.jit
        def measured(params: Params, trained: list[PyTree], tokens: Array) -> dict[str, Array]:
            found: dict[str, Array] = {}
            for variant, name in enumerate(self.config.variants):
                losses = self.losses(variant, params, trained[variant], tokens)
                found |= {name: losses.base, f"{name} alone": losses.auxiliary}
                found |= {f"{name} keys": losses.key, f"{name} values": losses.value}
            return found

        return measured

    def save(self, folder: Path, trained: list[PyTree]) -> None:
        for name, before, own in zip(self.config.variants, self.predictors, trained, strict=True):
            made = prediction.predictor_of(before, own)
            reuse.save_predictor(folder / f"predictor-{name}", self.model, made)


class Augmentation:
    """Cache augmentation."""

    def __init__(self, config: TrainReuseConfig, model: Model):
        self.config, self.model = config, model

    def initial(self) -> list[PyTree]:
        return [
            augmentation.trained_augmentation(
                reuse.initial_coprocessor(self.model, count, seed=self.config.seed)
            )
            for count in self.config.augmentation.latents
        ]  # fmt: skip

    def loss(self, variant: int, params: Params, trained: PyTree, tokens: Array, key: Array) -> tuple[Array, Array]:
        own = self.config.augmentation
        shape = (tokens.shape[0], own.points)
        # The points of a step are those of every variant.
        points = jax.random.randint(key, shape, 1, tokens.shape[1] - own.ahead + 1)
        loss = jnp.mean(augmentation.nats_ahead(self.model.config, params, trained, tokens, points, ahead=own.ahead))
        return loss, loss

    def nats(self, params: Params, trained: PyTree | None, tokens: Array, points: Array) -> Array:
        """Returns the losses of the tokens after points, [B, M, ahead] float32; `trained` of None = unchanged."""
        return augmentation.nats_ahead(
            self.model.config, params, trained, tokens, points, ahead=self.config.augmentation.ahead
        )

    def points(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the points of held-out windows, [B, M] int32, which are the same in each evaluation."""
        own = self.config.augmentation
        rng = np.random.default_rng(self.config.seed)
        return augmentation.random_points(rng, (len(tokens), own.points), tokens.shape[1], own.ahead)

    def held_out(self, params: Params, trained: list[PyTree], tokens: np.ndarray) -> dict[str, float]:
        return _means(self._measured, self.config.rows, params, trained, tokens, self.points(tokens))

    @functools.cached_property
    def _measured(self) -> Measured:
        @jax.jit
        def measured(params: Params, trained: list[PyTree], tokens: Array, points: Array) -> dict[str, Array]:
            found = {UNCHANGED: jnp.mean(self.nats(params, None, tokens, points))}
            for name, own in zip(self.config.variants, trained, strict=True):
                found[name] = jnp.mean(self.nats(params, own, tokens, points))
            return found

        return measured

    def save(self, folder: Path, trained: list[PyTree]) -> None:
        for name, own in zip(self.config.variants, trained, strict=True):
            made = augmentation.coprocessor_of(self.model, own)
            reuse.save_coprocessor(folder / f"coprocessor-{name}.safetensors", self.model, made)


METHODS: dict[str, Callable[[TrainReuseConfig, Model], Prediction | Augmentation]] = {
    PREDICTION: Prediction, AUGMENTATION: Augmentation,
}  # fmt: skip


def _means(measured: Measured, rows: int, params: Params, trained: list[PyTree], *data: np.ndarray) -> dict[str, float]:
    """Returns the means over all rows of data of a function of batches; a smaller last batch has another program."""
    sums: dict[str, float] = {}
    for start in range(0, len(data[0]), rows):
        batch = [jnp.asarray(each[start : start + rows]) for each in data]
        for name, value in measured(params, trained, *batch).items():
            sums[name] = sums.get(name, 0.0) + float(value) * len(batch[0])
    return {name: total / len(data[0]) for name, total in sums.items()}
