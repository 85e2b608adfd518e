"""Storages without a model: the step of generation on queries, keys and values that are given."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import count_argument, plain_signature
from kvjax.cache.arrangements import arrangement_of
from kvjax.cache.arrangements.block_arrays import OF_PROMPT
from kvjax.cache.empty import empty_layers
from kvjax.cache.groups import Group
from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Block, KVState, Layer, LayerKV, stored_groups
from kvjax.cache.step.interface import LayerArgs
from kvjax.cache.step.prompt_end import Prompt, convert
from kvjax.cache.step.step import step_layer
from kvjax.errors import InputError, PolicyError, StorageError
from kvjax.inputs import check_count
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.policies.base import Policy
from kvjax.policies.traits import evictions
from kvjax.policies.window import full
from kvjax.selection.base import Selection
from kvjax.selection.everything import everything
from kvjax.storage.base import Storage
from kvjax.storage.calibration import Calibration, required
from kvjax.storage.dims import LATENT
from kvjax.storage.minicache import DIRECTION
from kvjax.storage.side import Sides, rows_of
from kvjax.typing import PyTree

Array = jax.Array
Triple = tuple[Any, Any, Any]  # queries, keys and values

#: What a part of a store is counted as; others are parameters.
KINDS = {"codes": "codes", "exact": "exact", LATENT: "codes", DIRECTION: "codes"}


@plain_signature
def replay(
    storage: Storage,
    prompt: Triple,
    decode: Triple,
    lengths: object,
    policy: Policy | None = None,
    rope: Rope | None = None,
    *,
    selection: Selection | None = None,
    prefill_block: int | None = None,
    calibration: Calibration | None = None,
) -> tuple[Array, PyTree]:
    """One layer's prompt and decoding steps, exactly as generation takes them.

    Args:
      storage: how slots are held.
      prompt: query [B, H, n, D], key [B, K, n, D], value [B, K, n, D], rows padded at the end.
      decode: the same of the decoding steps, one token each, [B, ..., steps, D].
      lengths: [B] int tokens of each row's prompt.
      policy: which slots stay; None = all.
      rope: rotates queries and keys; None = they are given as attention takes them.
      selection: which slots a decoding query reads; None = all.
      prefill_block: tokens of a block of the prompt; None = in one shot.
      calibration: of the storage, if it needs one, for one layer; such as `Calibration.of` makes from vectors.

    Returns:
      Outputs of the decoding steps [B, H, steps, D], and the layer afterwards: a `LayerKV`, or a tuple of one for each
      group of heads if these differ in policy or storage.

    Raises:
      InputError: arrays whose shapes do not fit each other.
      PolicyError: a combination that cannot work.
      StorageError: a storage that cannot be combined with the policy, or that has no calibration that fits.
    """
    prompt, decode = _triple("prompt", prompt), _triple("decode", decode)
    lengths = np.asarray(lengths)
    if not np.issubdtype(lengths.dtype, np.integer):
        raise InputError(f"lengths must be whole numbers, one per row; got {lengths.tolist()}.")
    config = _config(prompt, decode, lengths, rope)
    policy = full() if policy is None else policy
    for each in evictions(policy):
        if each.params or each.writes:
            raise PolicyError(
                f"policy {each.name} reads parameters or hidden states, which need a model and not a single layer; "
                "run it with kvjax.generate."
            )
    spec = CacheSpec(policy, storage, everything() if selection is None else selection)
    sides = _sides(storage, calibration, config, prompt[2].dtype)
    width, steps = prompt[0].shape[2], decode[0].shape[2]
    if prefill_block is not None:
        check_count("prefill_block", prefill_block)
    limits = Limits(width, max(steps, 1), shortest=int(lengths.min()))
    sizes = sizes_for(lengths, steps, width=width, block=prefill_block, limits=limits, last_fed=True)
    lowered = lower(spec, config, sizes, lengths, implementation="xla", dtype=prompt[2].dtype)
    if lowered.layout.replay is not None:
        raise PolicyError(
            f"policy {policy.name}: it replays the prompt, which needs a model; run it with kvjax.generate."
        )
    given = prompt, decode, jnp.asarray(lengths, jnp.int32), lowered.budgets, sides
    output, layer = _run(*given, rope=rope, layout=lowered.layout)
    return output, layer[0] if len(layer) == 1 else layer


@functools.partial(jax.jit, static_argnames=("rope", "layout"))
def _run(
    prompt: Triple, decode: Triple, lengths: Array, budgets: PyTree, sides: Sides, *, rope: Rope | None, layout: Any
) -> PyTree:
    before, after = layout.prompt[0], layout.decode[0]
    width, steps = prompt[0].shape[2], decode[0].shape[2]
    total, args = lengths + steps, LayerArgs(rope=rope, sides=sides)

    def take(layer: Layer | None, own: PyTree, position: Array, budget: PyTree, groups: tuple[Group, ...]) -> PyTree:
        block = Block(position=position, prompt=lengths, total=total, budget=budget).of_layer(0)
        output, layer, _ = step_layer(layer, *own, block=block, groups=groups, args=args)
        return output, layer

    def one(layer: Layer | None, own: PyTree, start: PyTree) -> Layer:
        # [B, n]
        position = start + jnp.arange(own[0].shape[2], dtype=jnp.int32)
        position = jnp.where(position < lengths[:, None], position, -1)
        return take(layer, own, position, budgets.prompt, before)[1]

    if layout.block is None:
        layer = one(None, prompt, 0)
    else:
        size = layout.block
        starts = jnp.arange(0, width, size, dtype=jnp.int32)
        pad = ((0, 0), (0, 0), (0, -width % size), (0, 0))
        # [blocks, B, heads, size, D] each
        blocks = tuple(jnp.moveaxis(jnp.pad(x, pad).reshape(*x.shape[:2], -1, size, x.shape[3]), 2, 0) for x in prompt)
        batch, kv_heads, _, dim = prompt[1].shape
        (layer,) = empty_layers((before,), batch, kv_heads, dim, prompt[1].dtype)
        layer, _ = jax.lax.scan(lambda layer, inputs: (one(layer, *inputs), None), layer, (blocks, starts))
        frequencies = None if rope is None else rope.frequencies(total)
        layer = Layer(
            convert(own, first, then, Prompt(lengths, rope, frequencies, sides=rows_of(sides, then.heads)))
            for own, first, then in zip(layer, before, after, strict=True)
        )

    def body(layer: PyTree, inputs: tuple[Array, tuple[Array, ...]]) -> tuple[PyTree, Array]:
        number, own = inputs
        output, layer = take(layer, [x[:, :, None] for x in own], (lengths + number)[:, None], budgets.decode, after)
        return layer, output[:, :, 0]

    inputs = jnp.arange(steps, dtype=jnp.int32), tuple(jnp.moveaxis(x, 2, 0) for x in decode)
    layer, outputs = jax.lax.scan(body, layer, inputs)
    return jnp.moveaxis(outputs, 0, 2), layer


def _sides(storage: Storage, calibration: Calibration | None, config: DecoderConfig, dtype: DTypeLike) -> Sides:
    """Returns what the vectors of the layer share, from a calibration; {} if the storage needs none."""
    if calibration is None:
        if required(storage):
            raise StorageError(
                f"storage {storage.name} needs a calibration of one layer, such as kvjax.Calibration.of(storage, "
                "[Samples(...)]) makes; pass calibration=."
            )
        return {}
    _check_type(calibration)
    calibration.check(
        [storage.of_layer(0, 1)], config.num_kv_heads, config.head_dim, dtype, config.rope
    )  # fmt: skip
    return calibration.layers[0]


def _check_type(calibration: object) -> None:
    if not isinstance(calibration, Calibration):
        raise StorageError(
            f"calibration must be what kvjax.calibrate or kvjax.load_calibration returns; got {calibration!r}."
        )


def read(
    storage: Storage,
    layer: LayerKV,
    calibration: Calibration | None = None,
    *,
    index: int = 0,
    lower: LayerKV | None = None,
    heads: Sequence[int] | None = None,
) -> tuple[Array, Array, Array]:
    """Decodes the keys and values that a layer holds.

    Args:
      storage: how its slots are held.
      layer: from `replay`, or a group of heads of a `KVState`.
      calibration: of the storage, if it needs one.
      index: the layer's place in the calibration.
      lower: of the upper layer of a pair that is held together, the layer before it.
      heads: the model's KV heads that the layer has, if they are some of them; None = all.

    Returns:
      key [B, K, N, D] and value [B, K, N, D] float32, and position [B, K, N] int32, -1 = empty.

    Raises:
      InputError: a layer of several groups of heads.
      StorageError: a storage that the layer is not held in, or that needs a calibration.
    """
    layer = _one_group(layer)
    if heads is not None and len(heads) != layer.position.shape[1]:
        raise InputError(
            f"heads={tuple(heads)} has {len(heads)} entries, but the layer has {layer.position.shape[1]} KV heads."
        )
    storage = storage.bound(layer.position.shape[1]).of_layer(index).of_head(0 if heads is None else heads[0])
    if required(storage) and calibration is None and not layer.is_exact:
        raise StorageError(f"storage {storage.name} needs its calibration to be read; pass calibration=.")
    if calibration is not None:
        _check_type(calibration)
        count_argument("index", index, minimum=0, maximum=len(calibration.layers) - 1, error=StorageError)
    shared = {} if calibration is None else rows_of(calibration.layers[index], heads)
    below = None if lower is None else _one_group(lower)
    return arrangement_of(storage).read(storage, layer, shared, below)


def _one_group(layer: LayerKV) -> LayerKV:
    """Returns a group of heads as it is, and a layer's only one.

    Raises:
      InputError: a layer of several groups of heads.
    """
    if not isinstance(layer, tuple):
        return layer
    if len(layer) != 1:
        raise InputError(f"the layer has {len(layer)} groups of heads; read one at a time, such as layer[0].")
    return cast(LayerKV, layer[0])


def _triple(name: str, given: Triple) -> Triple:
    """Query, key and value as arrays.

    Raises:
      InputError: anything but three arrays of rank 4.
    """
    arrays = tuple(jnp.asarray(x) for x in given) if isinstance(given, tuple | list) else ()
    if len(arrays) != 3 or any(x.ndim != 4 for x in arrays):
        raise InputError(
            f"{name} must be query [B, H, n, D], key [B, K, n, D] and value [B, K, n, D]; got "
            f"{', '.join(str(x.shape) for x in arrays) or type(given).__name__}."
        )
    if any(not jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
        raise InputError(f"{name} must be of floats; got {', '.join(str(x.dtype) for x in arrays)}.")
    return arrays


def nbytes(state: KVState | LayerKV) -> int:
    """Bytes of all stores: codes, their parameters, exact parts and what rows share; not positions and statistics."""
    return breakdown(state)["stores"]


def breakdown(state: KVState | LayerKV) -> dict[str, int]:
    """Bytes that are held: of ``codes``, ``parameters``, ``exact`` parts and ``sides``, and of all these, ``stores``.

    Sides are those of prompts, which each row has. The ``rest`` is positions, statistics, the index of a selection and
    the marks of blocks. Capacity counts, not what is live. See `ratios` for what a cache of as many slots in the
    model's dtype would hold.
    """
    layers = [state] if isinstance(state, LayerKV) else stored_groups(state)
    found = dict.fromkeys(("codes", "parameters", "exact", "sides"), 0)
    for layer in layers:
        for path, leaf in jax.tree_util.tree_leaves_with_path(layer.stores):
            part = path[-1].key
            found[KINDS.get(part.removeprefix(OF_PROMPT), "parameters")] += leaf.size * leaf.dtype.itemsize
        for path, leaf in jax.tree_util.tree_leaves_with_path(layer.sides):
            found["exact" if path[-1].key == "exact" else "sides"] += leaf.size * leaf.dtype.itemsize
    rest = jax.tree.leaves([(layer.position, layer.stats, layer.index, layer.marks) for layer in layers])
    return found | {"stores": sum(found.values()), "rest": sum(leaf.size * leaf.dtype.itemsize for leaf in rest)}


def ratios(state: KVState | LayerKV, dtype: DTypeLike) -> dict[str, float]:
    """Bytes that are held over those of as many slots in a dtype: of the ``stores``, and ``with_rest``.

    Args:
      state: a cache, or one group of heads of a layer.
      dtype: the model's.
    """
    layers = [state] if isinstance(state, LayerKV) else stored_groups(state)
    exact = sum(2 * layer.position.size * layer.dim * jnp.dtype(dtype).itemsize for layer in layers)
    found = breakdown(state)
    return {"stores": found["stores"] / exact, "with_rest": (found["stores"] + found["rest"]) / exact}


def _config(prompt: Triple, decode: Triple, lengths: np.ndarray, rope: Rope | None) -> DecoderConfig:
    """A decoder of one layer with these heads.

    Raises:
      InputError: shapes that do not fit each other.
    """
    (batch, heads, width, dim), (_, kv_heads, _, _) = prompt[0].shape, prompt[1].shape
    steps = decode[0].shape[2]
    expected = {
        "prompt": [(batch, heads, width, dim), (batch, kv_heads, width, dim), (batch, kv_heads, width, dim)],
        "decode": [(batch, heads, steps, dim), (batch, kv_heads, steps, dim), (batch, kv_heads, steps, dim)],
    }
    for name, given in (("prompt", prompt), ("decode", decode)):
        if [x.shape for x in given] != expected[name] or heads % kv_heads:
            raise InputError(
                f"{name} must be query [B, H, n, D], key and value [B, K, n, D], H a multiple of K; got "
                f"{', '.join(str(x.shape) for x in given)}."
            )
    if lengths.shape != (batch,) or lengths.min() < 1 or lengths.max() > width:
        raise InputError(f"lengths must be {batch} numbers from 1 to {width}; got {lengths.tolist()}.")
    return DecoderConfig(
        family="replay", vocab_size=1, hidden_size=heads * dim, num_layers=1, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=dim, mlp_size=1, max_positions=width + steps, rope=rope,
    )  # fmt: skip
