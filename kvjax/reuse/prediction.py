"""KV prediction (arXiv:2410.08391): a smaller model reads the prompt, and linear maps make a larger model's cache."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax import policies
from kvjax.arguments import plain_signature
from kvjax.cache import shared_prefix
from kvjax.cache.empty import empty_layers
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState
from kvjax.contexts.turns import extend
from kvjax.errors import InputError, shown
from kvjax.generation.context import Context, Made, padded_rows
from kvjax.generation.continuations import takes_blocks
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import GroupBudgets, prepare
from kvjax.generation.program import program
from kvjax.inputs import check_batch
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.models.stacked_params import LAYER
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.reuse.last_block import checked_room
from kvjax.reuse.whole_text import KeyValue, filled, run_whole
from kvjax.summary import one_line

Array = jax.Array
T = TypeVar("T")


class KVMaps(NamedTuple):
    """Linear maps from the keys and values of an auxiliary model to those of a base, for each of its L layers.

    Inputs are all KV heads of an auxiliary layer, one after the other; outputs those of the base.

    Attributes:
      key: [L, K_aux * D_aux, K * D], of keys as projected: neither normalised nor rotated.
      key_offset: [L, K * D].
      value: [L, K_aux * D_aux, K * D].
      value_offset: [L, K * D].
    """

    key: Array
    key_offset: Array
    value: Array
    value_offset: Array

    def __repr__(self) -> str:
        return one_line(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Predictor:
    """An auxiliary model, and maps of its keys and values to those of a base.

    Attributes:
      auxiliary: reads prompts; it has the vocabulary of the base.
      maps: to each layer of the base.
      sources: for each layer of the base, the auxiliary layer that is mapped to it.
    """

    auxiliary: Model
    maps: KVMaps
    sources: tuple[int, ...]

    def __repr__(self) -> str:
        return one_line(self)


def fewer_layers(model: Model, layers: Sequence[int]) -> Model:
    """Returns a model of some layers of another one, with which it shares its arrays.

    Args:
      model: from `kvjax.load`.
      layers: the indices of the layers that it has, ascending; at least one.

    Raises:
      InputError: layers that the model does not have, or that do not ascend.
    """
    shared_prefix.refuse(model.params, "reuse.fewer_layers")
    config = model.config
    chosen = tuple(layers)
    whole = all(isinstance(each, numbers.Integral) and not isinstance(each, bool) for each in chosen)
    if (
        not chosen
        or not whole
        or list(chosen) != sorted({*chosen})
        or not 0 <= chosen[0] <= chosen[-1] < config.num_layers
    ):
        raise InputError(
            f"layers must be ascending indices from 0 to {config.num_layers - 1}, at least one; got {shown(layers)}."
        )

    def of(each: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(each[index] for index in chosen) if each else ()

    params = {name: model.params[name] for name in model.params if not name.startswith(LAYER)}
    params |= {f"layer_{number}": model.params[f"layer_{index}"] for number, index in enumerate(chosen)}
    smaller = dataclasses.replace(
        config, num_layers=len(chosen), windows=of(config.windows), ropes=of(config.ropes)
    )  # fmt: skip
    return dataclasses.replace(model, config=smaller, params=params)


def initial_predictor(
    model: Model, auxiliary: Model, *, sources: Sequence[int] | None = None, seed: int = 0
) -> Predictor:
    """Returns a predictor before training.

    Maps are identities where the heads of an auxiliary layer have as many features together as those of the base, and
    otherwise random with variance 1 / inputs; offsets are 0.

    Args:
      model: the base.
      auxiliary: a smaller model of the same vocabulary, such as ``fewer_layers(model, [0, 2, 4])``, or the base.
      sources: for each layer of the base, the auxiliary layer that is mapped to it; None for i · L_aux // L.
      seed: the random seed of maps that are not identities.

    Raises:
      InputError: models of different vocabularies, or sources that are not layers of the auxiliary model.
    """
    config, other = model.config, auxiliary.config
    if sources is None:
        sources = tuple(index * other.num_layers // config.num_layers for index in range(config.num_layers))
    inputs, outputs = (each.num_kv_heads * each.head_dim for each in (other, config))
    layers = config.num_layers

    def matrix(key: Array) -> Array:
        if inputs == outputs:
            return jnp.tile(jnp.eye(inputs, dtype=jnp.float32), (layers, 1, 1))
        return jax.random.normal(key, (layers, inputs, outputs), jnp.float32) * jnp.float32(inputs) ** -0.5

    first, second = jax.random.split(jax.random.key(seed))
    zeros = jnp.zeros((layers, outputs), jnp.float32)
    made = Predictor(auxiliary, KVMaps(matrix(first), zeros, matrix(second), zeros), tuple(sources))
    check_predictor(model, made)
    return made


@plain_signature
def predict(
    model: Model, predictor: Predictor, tokens: ArrayLike, *, room: int | None = None, lengths: ArrayLike | None = None
) -> Context:
    """Predicts the cache of prompts, and returns the context after them (KV prediction, arXiv:2410.08391, section 3).

    The auxiliary model reads each prompt but its last token. The keys and values of the base are linear maps of the
    auxiliary model's, before the base's norm of keys and before rotation; then the base is fed the last token. It
    generates, reads further turns and answers on this cache. The cache is full and exact: a policy would need
    the base's attention to the prompt.

    Args:
      model: the base.
      predictor: from `initial_predictor`, or trained by `kvjax.training.train_predictor`.
      tokens: see `kvjax.generate`.
      room: the number of tokens of a row in all that arrays are made for; None = 256 more than the longest prompt.
        Arrays grow when more tokens follow.
      lengths: see `kvjax.generate`.

    Returns:
      The context, which further turns and answers continue. It cannot be saved or kept as a prefix, since its tokens
      were not fed.

    Raises:
      InputError: tokens that are not valid for both models; a room that is smaller than a prompt; a predictor
        for another base; models on a mesh; or a base whose full cache does not hold all tokens in single slots.
      ConfigError: a model that is spread over several processes.
    """
    check_predictor(model, predictor)
    config, auxiliary = model.config, predictor.auxiliary
    batch = check_batch(config, tokens, lengths, new_tokens=0)
    check_batch(auxiliary.config, tokens, lengths, new_tokens=0)
    room = checked_room(config, room, int(batch.lengths.max()))
    spec, options = CacheSpec(policies.full()), CacheOptions()
    total = np.full(len(batch.lengths), room, np.int32)
    prepared = prepare(
        model, spec, batch.lengths, total, width=batch.width, options=options,
        following=room - int(batch.lengths.max()),
    )  # fmt: skip
    _check_layout(prepared.layout)
    read = (batch.lengths - 1).astype(np.int32)
    # [B, width]
    ids = np.zeros((len(read), prepared.width), np.int32)
    ids[:, : batch.tokens.shape[1]] = batch.tokens
    placed = model.place((ids, read))
    _, own = run_whole(auxiliary.config, auxiliary.params, *placed)
    state = _cache_of(
        model.params, predictor.maps, own, placed[1], *model.place((total, prepared.budgets.decode)), config=config,
        layout=prepared.layout, sources=predictor.sources,
    )  # fmt: skip
    known = padded_rows([row[:count] for row, count in zip(batch.tokens, read, strict=True)], len(read))
    resolved = np.stack([batch.lengths, total], axis=1).astype(np.int32)
    begun = Context(
        jnp.zeros((len(read), config.vocab_size), jnp.float32), state, prepared.layout, known, len(read), None,
        Made(model, spec, options, prepared.sizes), resolved,
    )  # fmt: skip
    return extend(model, begun, batch.tokens[np.arange(len(read)), read][:, None], donate=True)


@program(static_argnames=("config", "layout", "sources"))
def _cache_of(
    params: Params,
    maps: KVMaps,
    layers: tuple[KeyValue, ...],
    lengths: Array,
    total: Array,
    budget: GroupBudgets,
    *,
    config: DecoderConfig,
    layout: CacheLayout,
    sources: tuple[int, ...],
) -> KVState:
    """Returns the cache that is predicted.

    Args:
      params: of the base.
      maps: see `Predictor`.
      layers: the keys and values of the auxiliary model.
      lengths: [B] int32, the tokens that it has read.
      total: [B] int32, see `KVState`.
      budget: see `kvjax.generation.prefill.prefill_steps`.
      config: of the base.
      layout: of the cache.
      sources: see `Predictor`.
    """
    mapped = mapped_layers(config, maps, sources, layers)
    dtype = params["embed"]["tokens"].dtype
    mapped = [KeyValue(*(each.astype(dtype) for each in own)) for own in mapped]
    empty = empty_layers(layout.decode, len(lengths), config.num_kv_heads, config.head_dim, dtype)
    layers_filled = filled(config, params, empty, _cut(mapped, layout), lengths, total)
    return arranged_state(KVState(layers_filled, lengths, prompt=lengths, total=total, budget=budget), layout.runs)


def _cut(layers: Sequence[KeyValue], layout: CacheLayout) -> list[KeyValue]:
    """Leaves out the padding of prompts that is beyond the slots of a cache."""
    slots = min(group.capacity for group in layout.groups)
    return [KeyValue(*(each[:, :, :slots] for each in own)) for own in layers]


def mapped_layers(
    config: DecoderConfig, maps: KVMaps, sources: Sequence[int], layers: Sequence[KeyValue]
) -> list[KeyValue]:
    """Maps keys and values of an auxiliary model to those of a base.

    Args:
      config: of the base.
      maps: see `Predictor`.
      sources: see `Predictor`.
      layers: of the auxiliary model, [B, K_aux, n, D_aux] each.

    Returns:
      Of each layer of the base, keys and values [B, K, n, D] in the dtype of the maps.
    """

    def mapped(x: Array, matrix: Array, offset: Array) -> Array:
        batch, _, n, _ = x.shape
        # [B, n, K_aux * D_aux]
        joined = jnp.swapaxes(x, 1, 2).reshape(batch, n, -1).astype(matrix.dtype)
        # [B, n, K, D]
        y = (joined @ matrix + offset).reshape(batch, n, config.num_kv_heads, config.head_dim)
        return jnp.swapaxes(y, 1, 2)

    return [
        KeyValue(
            mapped(layers[source].key, maps.key[index], maps.key_offset[index]),
            mapped(layers[source].value, maps.value[index], maps.value_offset[index]),
        )
        for index, source in enumerate(sources)
    ]


def check_predictor(model: Model, predictor: Predictor) -> None:
    """Checks that a predictor is one for a base.

    Raises:
      InputError: it is not; or one of the models is on a mesh.
      ConfigError: a model is spread over several processes.
    """
    if not isinstance(predictor, Predictor):
        raise InputError(f"predictor must be a kvjax.reuse.Predictor; got {shown(predictor)}.")
    auxiliary = predictor.auxiliary
    for each in (model, auxiliary):
        distributed.check_alone(each.params, "KV prediction")
        shared_prefix.refuse(each.params, "KV prediction")
        if each.mesh is not None:
            raise InputError("KV prediction runs on one device; load the base and the auxiliary model without a mesh.")
    config, other = model.config, auxiliary.config
    if config.vocab_size != other.vocab_size:
        raise InputError(
            f"the auxiliary model has a vocabulary of {other.vocab_size}, and the base one of {config.vocab_size}; "
            "both must read the same tokens."
        )
    if len(predictor.sources) != config.num_layers or not all(
        isinstance(each, numbers.Integral) and 0 <= each < other.num_layers for each in predictor.sources
    ):
        raise InputError(
            f"sources must be {config.num_layers} layers of the auxiliary model, from 0 to {other.num_layers - 1}, one "
            f"for each layer of the base; got {shown(predictor.sources)}."
        )
    inputs, outputs = (each.num_kv_heads * each.head_dim for each in (other, config))
    shapes = [(config.num_layers, *shape) for shape in ((inputs, outputs), (outputs,)) * 2]
    for name, own, shape in zip(KVMaps._fields, predictor.maps, shapes, strict=True):
        if np.shape(own) != shape:
            raise InputError(
                f"maps.{name} has shape {list(np.shape(own))}, and these models need {list(shape)}; make maps with "
                "kvjax.reuse.initial_predictor."
            )


def _check_layout(layout: CacheLayout) -> None:
    """Checks that a full cache has one group of heads in each layer, and a separate slot for every token."""
    if not takes_blocks(layout.decode) or any(len(layer) != 1 for layer in layout.decode):
        raise InputError("the cache of this model cannot be predicted: it does not hold every token in its own slot.")
