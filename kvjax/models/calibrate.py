"""Calibration: what a storage's vectors share, from one pass over a text under full attention."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.cache.planning.layout import Group
from kvjax.cache.state import Block
from kvjax.errors import StorageError
from kvjax.inputs import check_batch
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import SIDES, Decoder, run_layer
from kvjax.models.gradients import gradients
from kvjax.models.model import Model
from kvjax.parallel import distributed, host_memory
from kvjax.parallel.sharding import Params
from kvjax.policies.window import full
from kvjax.products.quantized import dequantize, is_quantized, outputs_of
from kvjax.storage.base import UNROTATED, Storage
from kvjax.storage.calibration import Calibration, required
from kvjax.storage.side import Samples

Array = jax.Array

EMBEDDINGS = 64  # rows of the embedding that a fingerprint looks at
DIGITS = 16  # of a fingerprint


def calibrate(model: Model, tokens: ArrayLike, storage: Storage, *, lengths: ArrayLike | None = None) -> Calibration:
    """Makes the calibration of a storage from a text, in one pass under full attention.

    Layers run one after the other, and each is reduced before the next runs.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end; or a list of rows of any lengths.
      storage: what needs it, such as ``kvjax.storage.low_rank(32, 32)``.
      lengths: [B] int, the number of real tokens of each row; None for T.

    Raises:
      InputError: invalid tokens.
      StorageError: a storage that needs no calibration.
      ConfigError: a model that is spread over several processes.
    """
    if not required(storage):
        raise StorageError(f"storage {storage.name} needs no calibration; leave it out.")
    distributed.check_alone(model.params, "kvjax.calibrate")
    storage = storage.bound(model.config.num_kv_heads)
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    with model.on_mesh():
        samples = _samples(model, batch.tokens, batch.lengths, storage)
        made = Calibration.of(storage, samples, model.config.rope, model.dtype)
        return made.replace(model=fingerprint(model))


def calibrated(model: Model, storage: Storage, calibration: Calibration | None) -> Model:
    """Returns the model with a calibration among its parameters, where every function that takes a model finds it.

    Args:
      model: from `kvjax.load`.
      storage: what needs it.
      calibration: from `calibrate`; None = the model's own, if the storage needs one.

    Raises:
      StorageError: a storage that needs a calibration and has none, or one that is for another storage or model.
    """
    layers = model.config.num_layers
    return with_calibration(model, [storage.of_layer(index, layers) for index in range(layers)], calibration)


def with_calibration(model: Model, storages: Sequence[Storage], calibration: Calibration | None) -> Model:
    """Returns what `calibrated` does, for the storage of each layer."""
    config = model.config
    shape = (storages, config.num_kv_heads, config.head_dim, model.dtype, config.rope)
    if calibration is None:
        if not any(map(required, storages)):
            return model
        layers = [model.params[f"layer_{index}"]["attention"].get(SIDES) for index in range(config.num_layers)]
        if any(layer is None for layer in layers):
            raise StorageError(
                f"storage {storages[0].name} needs a calibration: make it with kvjax.calibrate(model, tokens, "
                "storage), or load it with kvjax.load_calibration(path), and pass calibration=."
            )
        Calibration(tuple(layers), "the model's own", config.rope).check(*shape)
        return model
    distributed.check_alone(model.params, f"storage {storages[0].name}, which has a calibration,")
    if not isinstance(calibration, Calibration):
        raise StorageError(f"calibration={type(calibration).__name__} is not valid; give one from kvjax.calibrate.")
    calibration.check(*shape)
    if calibration.model is not None and (own := fingerprint(model)) not in (None, calibration.model):
        raise StorageError(
            f"the calibration ({calibration.method}) was made for a model with the fingerprint {calibration.model}, "
            f"and this model has {own}; make one for this model with kvjax.calibrate."
        )
    params = dict(model.params)
    for index, sides in enumerate(calibration.layers):
        layer = dict(params[f"layer_{index}"])
        layer["attention"] = {**layer["attention"], SIDES: sides}
        params[f"layer_{index}"] = layer
    return dataclasses.replace(model, params=params)


def fingerprint(model: Model) -> str | None:
    """Returns a short hash of a model's configuration, of its first embeddings and of its layers' norms.

    These are the same however the weights are quantised, sharded or offloaded, and whatever their dtype. None in a
    gradient, whose numbers are not known.
    """
    found = hashlib.sha256(repr(model.config).encode())
    norms = [model.params[f"layer_{index}"].get("attention_norm", {}) for index in range(model.config.num_layers)]
    tokens = model.params["embed"]["tokens"]
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((tokens, norms))):
        return None
    # The numbers are known while a caller's function is traced, too.
    with jax.ensure_compile_time_eval():
        if is_quantized(tokens):
            tokens = outputs_of(tokens, jnp.arange(min(EMBEDDINGS, tokens.shape[1])), tokens.dtype)
        for x in (tokens, *jax.tree.leaves(norms)):
            # So that it is the same in bfloat16 and in float32.
            found.update(np.asarray(host_memory.to_device(x)[:EMBEDDINGS].astype(jnp.bfloat16)).tobytes())
    return found.hexdigest()[:DIGITS]


def _samples(model: Model, tokens: np.ndarray, lengths: np.ndarray, storage: Storage) -> Iterator[Samples]:
    """Yields the `Samples` of each layer; of one layer at a time there are keys and values."""
    config, dtype = model.config, model.dtype
    ids, lengths = model.place((tokens, lengths.astype(np.int32)))
    block = _block(lengths, width=tokens.shape[1], layers=config.num_layers)
    x = _enter(model.params, ids, block, config=config)
    rotated = storage.frame != UNROTATED
    slopes = None
    if any(side.gradients for side in required(storage).values()):
        slopes = gradients(model, x, ids, block, rotated=rotated)
    # Keys under positions="cache" are held as they are before rotation; of a whole prompt, ranks are positions.
    policy = full(positions="cache" if config.rotates else "original")
    real = np.asarray(block.position) >= 0

    def flat(heads: object) -> np.ndarray:
        """[B, heads, T, D] -> [n, heads, D], without padding."""
        return np.asarray(np.swapaxes(np.asarray(heads, np.float32), 1, 2)[real])

    for index in range(config.num_layers):
        params = model.params[f"layer_{index}"]
        output = run_layer(
            params, x, None, block.of_layer(index), None, config=config, kind=config.kind(index), dtype=dtype,
            groups=(Group(policy=policy),),
        )  # fmt: skip
        (layer,), (seen,) = output.cache, output.seen
        assert seen is not None
        keys, values = flat(seen.key if rotated else layer.key), flat(layer.value)
        yield Samples(
            own=keys, query=flat(seen.query), key=keys, value=values,
            inputs=np.asarray(output.entered, np.float32)[real], kernels=_kernels(params, config),
            gradients={} if slopes is None else {name: flat(each) for name, each in slopes[index].items()},
        )  # fmt: skip
        x = output.x


def _kernels(params: Params, config: DecoderConfig) -> dict[str, np.ndarray]:
    """The projections of keys and values, [hidden, K, D] float32."""
    shape = (config.hidden_size, config.num_kv_heads, config.head_dim)

    def exact(name: str) -> np.ndarray:
        kernel = host_memory.to_device(params["attention"][name]["kernel"])
        return np.asarray(dequantize(kernel) if is_quantized(kernel) else kernel, np.float32).reshape(shape)

    return {name: exact(name) for name in ("key", "value")}


@functools.partial(jax.jit, static_argnames=("width", "layers"))
def _block(lengths: Array, *, width: int, layers: int) -> Block:
    # [B, T]
    position = jnp.arange(width, dtype=jnp.int32)
    position = jnp.where(position < lengths[:, None], position, -1)
    return Block(position=position, prompt=lengths, total=lengths, budget=((None,),) * layers)


@functools.partial(jax.jit, static_argnames=("config",))
def _enter(params: Params, tokens: Array, block: Block, *, config: DecoderConfig) -> Array:
    decoder = Decoder(config, params["embed"]["tokens"].dtype)
    # [B, T, hidden]
    return cast(Array, decoder.apply({"params": params}, tokens, block, method="enter"))
