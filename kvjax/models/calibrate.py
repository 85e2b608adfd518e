"""Calibration: computes the shared parts of storages and the parameters of policies from one pass over a text."""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import check_type
from kvjax.cache import shared_prefix
from kvjax.cache.planning.layout import Group
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.cache.state import Block
from kvjax.errors import PolicyError, StorageError
from kvjax.inputs import check_batch
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig, model_sizes
from kvjax.models.decoder_layer import POLICY, SIDES, run_layer
from kvjax.models.gradients import gradients
from kvjax.models.model import Model, check_model
from kvjax.models.stacked_params import layer_part, with_attention
from kvjax.parallel import distributed, host_memory
from kvjax.parallel.sharding import Params
from kvjax.policies.base import Policy
from kvjax.policies.parameters import ModelSizes, Parameters, TextSamples, expected
from kvjax.policies.traits import parameters_of
from kvjax.policies.window import full
from kvjax.products.quantized import dequantize, is_quantized, outputs_of
from kvjax.storage.base import UNROTATED, Storage
from kvjax.storage.calibration import SIDES as STORAGE_SIDES
from kvjax.storage.calibration import Calibration, required, shapes_of, shapes_text
from kvjax.storage.calibration_text import CalibrationText
from kvjax.storage.dense import dense
from kvjax.storage.side import Samples, Sides

Array = jax.Array

EMBEDDINGS = 64  # rows of the embedding that a fingerprint looks at
DIGITS = 16  # of a fingerprint


class Needs(NamedTuple):
    """The storages and parameters that need a calibration.

    Attributes:
      storages: the storage of each layer.
      parameters: the parameters of the policies.
    """

    storages: tuple[Storage, ...]
    parameters: tuple[Parameters, ...]

    @property
    def any(self) -> bool:
        """Whether a calibration is needed."""
        return bool(self.parameters) or any(map(required, self.storages))


def calibrate(
    model: Model, tokens: ArrayLike, what: Storage | Policy | CacheSpec, *, lengths: ArrayLike | None = None
) -> Calibration:
    """Makes the calibration of a storage or a policy from a text, in one pass under full attention.

    Layers run one after the other, and each is reduced before the next runs.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end; or a list of rows of any lengths.
      what: a storage that needs it, such as ``kvjax.storage.low_rank(32, 32)``, a policy, such as
        ``kvjax.policies.qfilters(0.2)``, or a `CacheSpec` of both.
      lengths: [B] int, the number of real tokens of each row; None for T.

    Raises:
      InputError: invalid tokens.
      StorageError: a storage that needs no calibration.
      PolicyError: a policy that needs no calibration, or whose parameters are trained.
      ConfigError: a model that is spread over several processes.
    """
    check_model(model)
    _check_what(what)
    storage, parameters = _storage(what), _parameters(what)
    if not required(storage) and not parameters:
        if isinstance(what, Storage):
            raise StorageError(f"storage {storage.name} needs no calibration; leave it out.")
        raise PolicyError(f"{what.name} needs no calibration; leave it out.")
    if trained := [each.name for each in parameters if each.trained]:
        raise PolicyError(
            f"the parameters {trained[0]} are trained, not computed from a text; load them with kvjax.load_calibration."
        )
    sizes = model_sizes(model.config)
    shapes = expected(parameters, sizes)  # raises for a model that the policy does not run on
    distributed.check_alone(model.params, "kvjax.calibrate")
    shared_prefix.refuse(model.params, "kvjax.calibrate")
    storage = storage.bound(model.config.num_kv_heads)
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    with model.on_mesh():
        layers: list[Sides] = []

        def of_storage() -> Iterator[Samples]:
            for own, text in layer_samples(model, batch.tokens, batch.lengths, storage):
                layers.append(
                    {each.name: _prepared(each, text, sizes, shapes[each.name]) for each in parameters}
                )  # fmt: skip
                yield own

        if required(storage):
            made = Calibration.of(storage, of_storage(), model.config.rope, model.dtype)
            layers = [{**sides, **own} for sides, own in zip(made.layers, layers, strict=True)]
        else:
            collections.deque(of_storage(), maxlen=0)
            made = Calibration((), "", model.config.rope)
        method = ", ".join(filter(None, [made.method, *(each.kind for each in parameters)]))
        kinds = tuple((each.name, each.kind) for each in parameters)
        made = made.replace(layers=tuple(layers), method=method, policies=kinds, model=fingerprint(model))
        return made.with_text(CalibrationText.of(batch.tokens, batch.lengths))


def calibrated(model: Model, what: Storage | Policy | CacheSpec, calibration: Calibration | None) -> Model:
    """Returns the model with a calibration among its parameters, where every function that takes a model finds it.

    Args:
      model: from `kvjax.load`.
      what: a storage or a policy that needs it, or a `CacheSpec`.
      calibration: from `calibrate`; None = the model's own, if one is needed.

    Raises:
      StorageError: a storage that needs a calibration and has none, or one that is for another storage or model.
      PolicyError: the same, for a policy; or a cache that rows after a shared prefix cannot have.
    """
    check_model(model)
    _check_what(what)
    if not isinstance(what, Storage):
        shared_prefix.check_rows(model.params, as_spec(what))
    return with_calibration(model, needs_of(what, model.config.num_layers), calibration)


def _check_what(what: object) -> None:
    """Raises a `PolicyError` for what is neither a storage nor a policy nor a `CacheSpec`."""
    valid = "a storage such as kvjax.storage.int8(), a policy such as kvjax.policies.h2o(0.2), or a kvjax.CacheSpec"
    check_type("what is calibrated", what, (Storage, Policy, CacheSpec), valid, error=PolicyError)


def needs_of(what: Storage | Policy | CacheSpec, num_layers: int) -> Needs:
    """Returns the parts of a storage, a policy or a `CacheSpec` that need a calibration."""
    storage = _storage(what)
    return Needs(tuple(storage.of_layer(index, num_layers) for index in range(num_layers)), _parameters(what))


def _storage(what: Storage | Policy | CacheSpec) -> Storage:
    return what if isinstance(what, Storage) else what.storage if isinstance(what, CacheSpec) else dense()


def _parameters(what: Storage | Policy | CacheSpec) -> tuple[Parameters, ...]:
    if isinstance(what, Storage):
        return ()
    return parameters_of(what.policy if isinstance(what, CacheSpec) else what)


def _prepared(
    own: Parameters, samples: TextSamples, sizes: ModelSizes, shapes: dict[str, tuple[tuple[int, ...], str]]
) -> dict[str, Array]:
    """Returns one layer's parameters.

    Raises:
      PolicyError: `prepare` returned shapes that differ from `parts`, or numbers that are not finite.
    """
    made = {name: np.asarray(x, np.float32) for name, x in own.prepare(samples, sizes).items()}
    found, needed = {name: x.shape for name, x in made.items()}, {name: shape for name, (shape, _) in shapes.items()}
    if found != needed:
        raise PolicyError(f"parameters {own.name}: prepare returned shapes {found}; expected {needed}.")
    if not all(np.all(np.isfinite(x)) for x in made.values()):
        raise PolicyError(f"parameters {own.name} have numbers that are infinite or NaN; give another text.")
    return {name: jnp.asarray(x) for name, x in made.items()}


def with_calibration(model: Model, needs: Needs, calibration: Calibration | None) -> Model:
    """Returns the model with a calibration, as `calibrated`, for given storages and parameters."""
    config, storages = model.config, needs.storages
    if calibration is None:
        if not needs.any:
            return model
        attentions = [layer_part(model.params, index, "attention") for index in range(config.num_layers)]
        if any(map(required, storages)) and any(SIDES not in own for own in attentions):
            raise StorageError(
                f"storage {storages[0].name} needs a calibration: make it with kvjax.calibrate(model, tokens, "
                "storage), or load it with kvjax.load_calibration(path), and pass calibration=."
            )
        layers = tuple({**own.get(SIDES, {}), **own.get(POLICY, {})} for own in attentions)
        _check(Calibration(layers, "the model's own", config.rope), model, needs)
        return model
    if not isinstance(calibration, Calibration):
        raise StorageError(f"calibration={type(calibration).__name__} is not valid; give one from kvjax.calibrate.")
    distributed.check_alone(model.params, f"a cache that has a calibration ({calibration.method})")
    _check(calibration, model, needs)
    if calibration.model is not None and (own := fingerprint(model)) not in (None, calibration.model):
        raise StorageError(
            f"the calibration ({calibration.method}) was made for a model with the fingerprint {calibration.model}, "
            f"and this model has {own}; make one for this model with kvjax.calibrate."
        )
    entries: list[Params] = []
    for given in calibration.layers:
        sides = {name: parts for name, parts in given.items() if name in STORAGE_SIDES}
        others = {name: parts for name, parts in given.items() if name not in STORAGE_SIDES}
        entries.append({name: own for name, own in ((SIDES, sides), (POLICY, others)) if own})
    return dataclasses.replace(model, params=with_attention(model.params, entries))


def _check(calibration: Calibration, model: Model, needs: Needs) -> None:
    """Checks that a calibration fits a model, its storages and its policies.

    Raises:
      StorageError: see `Calibration.check`.
      PolicyError: the parameters of a policy are missing, or have other shapes or another kind.
    """
    config = model.config
    if any(map(required, needs.storages)) or not needs.parameters:
        calibration.check(needs.storages, config.num_kv_heads, config.head_dim, model.dtype, config.rope)
    calibration.check_rope(config.rope)
    kinds = dict(calibration.policies)
    shapes = expected(needs.parameters, model_sizes(config))
    for own in needs.parameters:
        make = "make it with kvjax.calibrate(model, tokens, policy)" if not own.trained else "train it for this model"
        mine = [shapes_of({own.name: layer.get(own.name, {})}) for layer in calibration.layers]
        if len(mine) != config.num_layers or any(not each[own.name] for each in mine):
            raise PolicyError(
                f"the policy reads parameters {own.name!r} of {config.num_layers} layers, which the calibration "
                f"({calibration.method}) does not have; {make}, or load it with kvjax.load_calibration(path), and pass "
                "calibration=."
            )
        if kinds.get(own.name, own.kind) != own.kind:
            raise PolicyError(f"the calibration has {kinds[own.name]}, but the policy needs {own.kind}; {make}.")
        needed = {own.name: shapes[own.name]}
        if wrong := [each for each in mine if each != needed]:
            raise PolicyError(
                f"the calibration ({calibration.method}) has {shapes_text(wrong[0])}; the policy and this model need "
                f"{shapes_text(needed)}; {make}."
            )


def fingerprint(model: Model) -> str | None:
    """Returns a short hash of a model's configuration, of its first embeddings and of its layers' norms.

    These are the same however the weights are quantised, sharded or offloaded, and whatever their dtype. None in a
    gradient, whose numbers are not known.
    """
    found = hashlib.sha256(repr(model.config).encode())
    norms = [layer_part(model.params, index, "attention_norm") for index in range(model.config.num_layers)]
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


def layer_samples(
    model: Model, tokens: np.ndarray, lengths: np.ndarray, storage: Storage
) -> Iterator[tuple[Samples, TextSamples]]:
    """Yields the samples of each layer under full attention; the keys and values of one layer exist at a time.

    Args:
      model: from `kvjax.load`, used on its mesh; see `Model.on_mesh`.
      tokens: [B, T] int32, rows padded at the end.
      lengths: [B] int, the number of real tokens of each row.
      storage: bound to the model's KV heads; keys are in its frame.
    """
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
        keys, values, query = flat(seen.key if rotated else layer.key), flat(layer.value), flat(seen.query)
        text = TextSamples(flat(output.projected[0]), query)
        own = Samples(
            own=keys, query=query, key=keys, value=values,
            inputs=np.asarray(output.entered, np.float32)[real], kernels=_kernels(params, config),
            gradients={} if slopes is None else {name: flat(each) for name, each in slopes[index].items()},
        )  # fmt: skip
        yield own, text
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
    # [B, T, hidden]
    return bind(config, params).enter(tokens, block)
