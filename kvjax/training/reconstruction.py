"""Trains the directions of a storage to reconstruct keys and values, one layer at a time (CSKV, arXiv:2409.10593)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import count_argument, number_argument
from kvjax.cache import shared_prefix
from kvjax.errors import InputError, StorageError
from kvjax.inputs import check_batch
from kvjax.models.calibrate import calibrated, layer_samples
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.storage.base import Storage
from kvjax.storage.block_codec import BlockCodec
from kvjax.storage.calibration import Calibration, required
from kvjax.storage.calibration_text import CalibrationText
from kvjax.storage.codec import Codec
from kvjax.storage.dims import EXACT, Chain
from kvjax.storage.side import Sides, rows_of
from kvjax.summary import one_line

Array = jax.Array


class TrainedCalibration(NamedTuple):
    """The result of `train_reconstruction`.

    Attributes:
      calibration: the trained parts, for the same storage.
      losses: [steps] float32, the mean over layers of `reconstruction_loss` before each step.
    """

    calibration: Calibration
    losses: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def reconstruction_loss(storage: Storage, sides: Sides, key: Array, value: Array) -> Array:
    """Returns the squared error of the keys and values of one layer as a storage holds them, [] float32.

    The error of keys and that of values are each averaged over tokens, KV heads and features, and added. Vectors that
    no calibration is for add nothing.

    Args:
      storage: of the layer; see `Storage.of_layer` and `Storage.bound`.
      sides: the calibration of the layer, {part: [K, ...]} float32 of ``key`` and of ``value``.
      key: [n, K, D] float32, before RoPE if the storage holds keys so.
      value: [n, K, D] float32.

    Raises:
      StorageError: no gradient passes through a codec.
    """
    kv_heads = key.shape[1]
    # One run for all heads of equal codecs, so that the heads of a latent are never separated.
    groups: dict[Storage, list[int]] = {}
    for head in range(kv_heads):
        groups.setdefault(storage.of_head(head, kv_heads), []).append(head)
    total = jnp.float32(0)
    for own, heads in groups.items():
        for name, side in required(own).items():
            codec, dim = _of_vectors(own, name), key.shape[-1]
            # [1, K, n, D]
            x = jnp.swapaxes({"key": key, "value": value}[name][:, jnp.asarray(heads)], 0, 1)[None]
            parts = side.aligned(rows_of(sides[name], heads), x.ndim)
            held = codec.decode(codec.encode(x, parts, jnp.float32), parts, dim)
            total += jnp.mean(jnp.square(held - x)) * (len(heads) / kv_heads)
    return total


def _of_vectors(storage: Storage, name: str) -> Codec:
    """Returns the codec of one key or value.

    Raises:
      StorageError: no gradient passes through it.
    """
    codec = storage.codecs[name]
    single = codec.single if isinstance(codec, BlockCodec) else codec
    # Shorter vectors that are held exactly.
    exact = isinstance(single, Chain) and single.codec == EXACT
    if single is None or not (exact or single.has_gradient):
        raise StorageError(
            f"storage {storage.name}: no gradient passes through its {name}s, {codec!r}. Train the directions without "
            f"{name}_codec; a storage with {name}_codec takes the same calibration."
        )
    assert isinstance(single, Codec)
    return single


def train_reconstruction(
    model: Model,
    tokens: ArrayLike,
    storage: Storage,
    calibration: Calibration,
    *,
    lengths: ArrayLike | None = None,
    steps: int = 50,
    learning_rate: float = 1e-3,
) -> TrainedCalibration:
    """Trains a calibration to reconstruct the keys and values of a text under full attention (CSKV, arXiv:2409.10593).

    The loss is `reconstruction_loss` of each layer, of which the inputs are those of the full model, and the model is
    not trained. Layers are trained one after the other by Adam (optax), each step on all tokens. As all layers have
    optimizers of their own, this equals the training of the sum over layers, the authors' loss.

    The least loss of given ranks is known: it is that of the principal directions of the vectors themselves about 0
    (Eckart and Young), such as ``kvjax.storage.kv_heads`` has. Training approaches it from the directions of the
    weights.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end; or a list of rows of any lengths.
      storage: needs a calibration; its codecs pass gradients, such as ``kvjax.storage.cskv(64)``.
      calibration: the initial values, from `kvjax.calibrate`.
      lengths: [B] int, the number of real tokens of each row; None for T.
      steps: the number of steps.
      learning_rate: of Adam.

    Raises:
      InputError: invalid tokens, or a number that is not valid.
      StorageError: a calibration for another storage or model, or a codec that passes no gradient.
      ConfigError: a model that is spread over several processes.
    """
    distributed.check_alone(model.params, "kvjax.training.train_reconstruction")
    shared_prefix.refuse(model.params, "kvjax.training.train_reconstruction")
    steps = count_argument("steps", steps, minimum=1, error=InputError)
    learning_rate = number_argument("learning_rate", learning_rate, minimum=0.0, maximum=float("inf"), error=InputError)
    calibrated(model, storage, calibration)  # raises where it does not fit
    layers, kv_heads = model.config.num_layers, model.config.num_kv_heads
    bound = storage.bound(kv_heads)
    for index in range(layers):
        for head in range(kv_heads):
            one = bound.of_layer(index, layers).of_head(head, kv_heads)
            for name in required(one):
                _of_vectors(one, name)
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    made, losses = [], []
    with model.on_mesh():
        samples = layer_samples(model, batch.tokens, batch.lengths, bound)
        for index, ((given, _), before) in enumerate(zip(samples, calibration.layers, strict=True)):
            own = bound.of_layer(index, layers)
            start = {name: dict(before[name]) for name in required(own)}
            exact = jax.tree.map(lambda x: x.astype(jnp.float32), start)
            sides, loss = _trained(own, exact, jnp.asarray(given.key), jnp.asarray(given.value), learning_rate, steps)
            stored = jax.tree.map(lambda x, old: x.astype(old.dtype), sides, start)
            made.append({**before, **stored})
            losses.append(loss)
    method = f"{calibration.method}; trained for {steps} steps to reconstruct keys and values"
    trained = calibration.replace(layers=tuple(made), method=method)
    text = CalibrationText.of(batch.tokens, batch.lengths)
    return TrainedCalibration(trained.with_text(text), np.mean(jax.device_get(losses), axis=0))


@functools.partial(jax.jit, static_argnames=("storage", "learning_rate", "steps"))
def _trained(
    storage: Storage, sides: Sides, key: Array, value: Array, learning_rate: float, steps: int
) -> tuple[Sides, Array]:
    """Returns one layer's trained sides, and the losses [steps] float32 before each step."""
    import optax

    optimizer = optax.adam(learning_rate)

    def step(carry: tuple[Sides, optax.OptState], _: None) -> tuple[tuple[Sides, optax.OptState], Array]:
        sides, memory = carry
        loss, slope = jax.value_and_grad(lambda sides: reconstruction_loss(storage, sides, key, value))(sides)
        # optax multiplies integers by floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            change, memory = optimizer.update(slope, memory, sides)
            return (optax.apply_updates(sides, change), memory), loss

    (sides, _), losses = jax.lax.scan(step, (sides, optimizer.init(sides)), length=steps)
    return sides, losses
