"""Trains nested directions of heads, and searches a rank for each head (MatryoshkaKV, arXiv:2410.14731).

A storage of low rank holds a vector by its coefficients in the first directions of the head. Training begins at the
principal directions of `kvjax.calibrate`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.analysis.gates import hidden_states, rates
from kvjax.analysis.scan import ANALYSIS
from kvjax.arguments import count_argument, number_argument
from kvjax.cache import shared_prefix
from kvjax.errors import InputError, StorageError, shown
from kvjax.inputs import check_batch
from kvjax.models.calibrate import calibrated
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.model import Model
from kvjax.models.nested import Directions, Nested
from kvjax.models.stacked_params import unstacked
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.storage.calibration import Calibration
from kvjax.storage.calibration_text import CalibrationText
from kvjax.storage.low_rank import low_rank
from kvjax.summary import one_line

Array = jax.Array
SIDES = ("key", "value")
LEVELS = tuple(eighths / 8 for eighths in range(1, 9))  # parts of a head's directions
TOKENS = 256  # tokens of a row whose logits exist at the same time


class TrainedDirections(NamedTuple):
    """The result of `train_directions`.

    Attributes:
      calibration: all directions of every head, for ``low_rank(D, D)``; see `shortened`.
      losses: [steps] float32, the loss before each step, with the ranks drawn for this step.
    """

    calibration: Calibration
    losses: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


class Ranks(NamedTuple):
    """The result of `search_ranks`.

    Attributes:
      key: [L, K] int32, the number of directions of keys.
      value: [L, K] int32, the number of directions of values.
      loss: float, the loss with these ranks.
    """

    key: np.ndarray
    value: np.ndarray
    loss: float

    def __repr__(self) -> str:
        return one_line(self)


def train_directions(
    model: Model,
    tokens: ArrayLike,
    calibration: Calibration,
    *,
    lengths: ArrayLike | None = None,
    levels: Sequence[float] = LEVELS,
    steps: int = 200,
    learning_rate: float = 1e-3,
    rows: int = 1,
    seed: int = 0,
) -> TrainedDirections:
    """Trains the directions of every head so that any number of the first ones can be kept (MatryoshkaKV).

    In each step, the keys and the values of each head are held in a number of directions drawn from `levels`. The loss
    is the Kullback-Leibler divergence of the next token's distribution from that of the full model, averaged over the
    tokens. Cayley's map keeps directions orthogonal: U = U₀ (I + A)⁻¹ (I - A) with A = P - Pᵀ. Adam (optax) trains P.
    The model is not trained.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] int, rows padded at the end.
      calibration: from ``kvjax.calibrate(model, tokens, kvjax.storage.low_rank(D, D))``, with all D directions.
      lengths: [B] real tokens of each row; None = all T.
      levels: the parts of the D directions that ranks are drawn from, in (0, 1].
      steps: the number of steps.
      learning_rate: the largest learning rate of Adam; see `head_gates` for its schedule.
      rows: the rows of the batch of each step; steps go through all rows in turn.
      seed: the random seed of the ranks.

    Raises:
      InputError: tokens or lengths that do not fit the model, or a number that is not valid.
      StorageError: a calibration that does not have all directions of this model.
      ConfigError: a model that is spread over several processes.
    """
    import optax

    work = _Work.of(model, tokens, lengths, calibration)
    steps, rows = (
        count_argument(name, each, minimum=1, error=InputError) for name, each in (("steps", steps), ("rows", rows))
    )
    choices = _levels(levels, model.config.head_dim)
    rng, optimizer = np.random.default_rng(count_argument("seed", seed, error=InputError)), optax.scale_by_adam()

    @jax.jit
    def step(
        params: Params, sides: Any, turn: Any, memory: optax.OptState, learning_rate: Array, ranks: Array, *data: Array
    ) -> tuple[Any, optax.OptState, Array]:
        def loss(turn: Any) -> Array:
            expected = jax.lax.stop_gradient(hidden_states(params, None, *data, config=model.config))
            return divergence(params, _turned(sides, turn), ranks, expected, *data, config=model.config)

        value, slope = jax.value_and_grad(loss)(turn)
        # optax multiplies integers by floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            change, memory = optimizer.update(slope, memory)
        return jax.tree.map(lambda x, y: x - learning_rate * y, turn, change), memory, value

    with model.on_mesh():
        turn = [{name: jnp.zeros_like(layer[name]["basis"]) for name in SIDES} for layer in work.sides]
        memory, losses = optimizer.init(turn), []
        for number, now in enumerate(learning_rate * rates(steps)):
            own = (number * rows + np.arange(rows)) % len(work.tokens)
            data = model.place((work.tokens[own], work.lengths[own].astype(np.int32)))
            ranks = jnp.asarray(rng.choice(choices, work.shape), jnp.int32)
            turn, memory, value = step(model.params, work.sides, turn, memory, jnp.float32(now), ranks, *data)
            losses.append(value)
        made = _turned(work.sides, turn)
    layers = tuple(
        {name: {part: x.astype(old[name][part].dtype) for part, x in new[name].items()} for name in SIDES}
        for new, old in zip(made, calibration.layers, strict=True)
    )
    trained = calibration.replace(layers=layers, method=f"{calibration.method}; trained for {steps} steps")
    trained = trained.with_text(CalibrationText.of(work.tokens, work.lengths))
    return TrainedDirections(trained, np.asarray(losses, np.float32))


def search_ranks(
    model: Model,
    tokens: ArrayLike,
    calibration: Calibration,
    share: float,
    *,
    lengths: ArrayLike | None = None,
    levels: Sequence[float] = LEVELS,
    at_once: int = 1,
) -> Ranks:
    """Finds a rank for the keys and the values of each head by a greedy search (MatryoshkaKV).

    The search begins with all directions. Each round measures the loss of `train_directions` with the rank of each
    head's keys or values one level lower, and lowers the ranks of the least loss. It ends when the mean rank is at most
    `share` of D. With L layers of K KV heads, a round runs the text 2 · L · K times.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] int, rows padded at the end; all rows are one batch.
      calibration: see `train_directions`.
      share: the mean part of the directions that is kept, in (0, 1].
      lengths: [B] real tokens of each row; None = all T.
      levels: parts of the D directions, in (0, 1].
      at_once: the number of ranks that a round lowers.

    Returns:
      The ranks: ``low_rank(ranks.key, ranks.value)`` is the storage, and ``shortened(calibration, ranks)`` its
      calibration.

    Raises:
      InputError: tokens or lengths that do not fit the model, or a share below the lowest level.
      StorageError: see `train_directions`.
      ConfigError: a model that is spread over several processes.
    """
    work, dim = _Work.of(model, tokens, lengths, calibration), model.config.head_dim
    choices = np.sort(np.unique(np.append(_levels(levels, dim), dim)))
    share = number_argument("share", share, minimum=choices[0] / dim, maximum=1.0, error=InputError)
    at_once = count_argument("at_once", at_once, minimum=1, error=InputError)
    with model.on_mesh():
        data = model.place((work.tokens, work.lengths.astype(np.int32)))
        expected = jax.jit(functools.partial(hidden_states, config=model.config))(model.params, None, *data)
        measure = jax.jit(functools.partial(divergence, config=model.config))

        def loss(levels: np.ndarray) -> float:
            ranks = jnp.asarray(choices[levels], jnp.int32)
            return float(measure(model.params, work.sides, ranks, expected, *data))

        # [L, 2, K]: indices of `choices`
        now = np.full(work.shape, len(choices) - 1)
        while choices[now].mean() > share * dim + 1e-9:
            found = []
            for place in zip(*np.nonzero(now), strict=True):
                lower = now.copy()
                lower[place] -= 1
                found.append((loss(lower), place))
            for _, place in sorted(found)[:at_once]:
                if choices[now].mean() > share * dim + 1e-9:
                    now[place] -= 1
        last = loss(now)
    key, value = np.moveaxis(choices[now].astype(np.int32), 1, 0)
    return Ranks(key, value, last)


def shortened(calibration: Calibration, ranks: Ranks) -> Calibration:
    """Returns the calibration of ``low_rank(ranks.key, ranks.value)``: the first directions of each layer.

    Args:
      calibration: has all directions.
      ranks: the ranks for the same model.
    """
    layers = []
    for layer, *own in zip(calibration.layers, ranks.key, ranks.value, strict=True):
        layers.append(
            {
                name: {**layer[name], "basis": layer[name]["basis"][..., : int(rank.max())]}
                for name, rank in zip(SIDES, own, strict=True)
            }
        )
    return calibration.replace(layers=tuple(layers)).with_text(calibration.text)


def divergence(
    params: Params,
    sides: Sequence[dict[str, dict[str, Array]]],
    ranks: Array,
    expected: Array,
    tokens: Array,
    lengths: Array,
    *,
    config: DecoderConfig,
) -> Array:
    """Computes the mean divergence of the next token's distribution with keys and values in their first directions.

    Args:
      params: of the model.
      sides: of each layer, {"key": {"basis": [K, D, D], "mean": [K, D]}, "value": ...} float32.
      ranks: [L, 2, K] int32, the directions of keys and of values that are kept.
      expected: [B, T, E], the last hidden states of the full model.
      tokens: [B, T] int32.
      lengths: [B] int32.
      config: the decoder.
    """
    own = [
        Nested(
            *(
                Directions(layer[name]["basis"], layer[name].get("mean"), rank)
                for name, rank in zip(SIDES, each, strict=True)
            )
        )
        for layer, each in zip(sides, ranks, strict=True)
    ]
    got = hidden_states(params, own, tokens, lengths, config=config)
    batch, width, _ = got.shape
    parts = -(-width // TOKENS)
    decoder = Decoder(config, params["embed"]["tokens"].dtype)

    @jax.checkpoint
    def of_part(inputs: tuple[Array, Array, Array]) -> Array:
        one, two, real = inputs
        # [B, n, V]
        full, nested = (
            jax.nn.log_softmax(cast(Array, decoder.apply({"params": unstacked(params)}, x, method="logits")))
            for x in (one, two)
        )
        return jnp.sum(jnp.where(real, jnp.sum(jnp.exp(full) * (full - nested), axis=-1), 0.0))

    def cut(x: Array) -> Array:
        """[B, T, ...] -> [parts, B, TOKENS, ...]"""
        padded = jnp.pad(x, ((0, 0), (0, parts * TOKENS - width), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, parts, TOKENS, *x.shape[2:]), 1, 0)

    # [B, T]
    real = jnp.arange(width) < lengths[:, None]
    total = jnp.sum(jax.lax.map(of_part, (cut(expected), cut(got), cut(real))))
    return total / jnp.sum(lengths).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Work:
    """The checked arguments of `train_directions` and `search_ranks`.

    Attributes:
      tokens: [B, T] int32.
      lengths: [B] int.
      sides: for each layer, the directions in float32.
      shape: (L, 2, K), the shape of ranks.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sides: list[dict[str, dict[str, Array]]]
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, model: Model, tokens: ArrayLike, lengths: ArrayLike | None, calibration: Calibration) -> "_Work":
        """Checks arguments; for errors see `train_directions`."""
        distributed.check_alone(model.params, ANALYSIS)
        shared_prefix.refuse(model.params, ANALYSIS)
        config = model.config
        batch = check_batch(config, tokens, lengths, new_tokens=0)
        if not isinstance(calibration, Calibration):
            raise StorageError(f"calibration={shown(calibration)} is not valid; give one from kvjax.calibrate.")
        center = "mean" in calibration.layers[0].get("key", {})
        calibrated(model, low_rank(config.head_dim, config.head_dim, center=center), calibration)
        sides = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), [dict(layer) for layer in calibration.layers])
        return cls(batch.tokens, batch.lengths, sides, (config.num_layers, len(SIDES), config.num_kv_heads))


def _levels(levels: Sequence[float], dim: int) -> np.ndarray:
    """Returns numbers of directions for parts of D, each at least 1."""
    parts = [number_argument("each of the levels", each, minimum=0.0, maximum=1.0, error=InputError) for each in levels]
    if not parts or min(parts) <= 0:
        raise InputError(f"levels={shown(levels)} is not valid; give parts of a head's directions, in (0, 1].")
    return np.array([max(1, int(part * dim + 1e-9)) for part in parts])


def _turned(
    sides: Sequence[dict[str, dict[str, Array]]], turn: Sequence[dict[str, Array]]
) -> list[dict[str, dict[str, Array]]]:
    """Returns the directions rotated by Cayley's map of P - Pᵀ, [K, D, D] for each layer and side."""
    # [L · 2, K, D, D]. One solution for all: several at once, of 64 directions, wait for each other forever on two
    # cores (jaxlib 0.10.2).
    free = jnp.stack([own[name] for own in turn for name in SIDES])
    skew = free - jnp.swapaxes(free, -1, -2)
    one = jnp.broadcast_to(jnp.eye(free.shape[-1], dtype=free.dtype), free.shape)
    cayley = iter(jnp.linalg.solve(one + skew, one - skew))

    def of_side(side: dict[str, Array], turned: Array) -> dict[str, Array]:
        return {**side, "basis": jnp.einsum("kde,ker->kdr", side["basis"], turned, precision=jax.lax.Precision.HIGHEST)}

    return [{name: of_side(layer[name], next(cayley)) for name in SIDES} for layer in sides]
