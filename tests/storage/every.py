"""Every storage of the registry in a small form, and a program of one layer that any of them can run."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import policies, storage
from kvjax.cache import CacheSpec, LayerKV, shared_layers
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.state import EMPTY, Block, Layer
from kvjax.cache.step.interface import LayerArgs
from kvjax.cache.step.step import step_layer
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.storage import Calibration, Samples, Storage, read

DIM, HEADS, KV_HEADS, WIDTH, STEPS = 8, 4, 2, 12, 5
LENGTHS = np.array([12, 6, 9, 12])
ROPE = Rope(dim=DIM)
LAYERS = 2  # the last of which is run; it is the upper one of a pair

HELD: dict[str, Storage] = {
    "dense": storage.dense(),
    "fp16": storage.fp16(residual=3),
    "int8": storage.int8(),
    "int4": storage.int4(residual=3),
    "int2": storage.int2(4),
    "integer": storage.integer(3, 4, key_bits=5, residual=2),
    "fp8": storage.fp8(),
    "bfp": storage.bfp(4, 4),
    "mxfp4": storage.mxfp4(4, residual=2),
    "nvfp4": storage.nvfp4(4),
    "levels": storage.levels(3),
    "turboquant": storage.turboquant(3),
    "rotated": storage.rotated(storage.int4(residual=2), seed=1),
    "think": storage.think(0.4, 4, 2),
    "low_rank": storage.low_rank(3, 5, 2),
    "cskv": storage.cskv(4, 3),
    "kv_heads": storage.kv_heads(2, residual=2),
    "kivi": storage.kivi(2, 2, 4),
    "gear": storage.gear(4, 3, 4, rank=2, decode_rank=1),
    "kvarn": storage.kvarn(3, 2, 4),
    "mikv": storage.mikv(2, low_capacity=4),
    "kvquant": storage.kvquant(3, 0.2, 1, "kmeans", residual=2),
    "zipcache": storage.zipcache(4, 2, 0.6, 3),
    "minicache": storage.minicache(0, retained=0.2),
}
#: Slots of codes with scales, as int4 and turboquant are: what is not in their codecs is the same.
LIKE_OTHERS = ("int8", "int2", "integer", "fp8", "bfp", "mxfp4", "nvfp4", "levels")
#: One storage for each way in which codes lie and share something.
KINDS = [name for name in HELD if name not in LIKE_OTHERS]
NEWEST = policies.compress(importance=policies.recency, budget=0.7, name="newest")
#: Policies that evict, of those that the storage goes with; h2o for all others.
POLICY: dict[str, policies.Policy] = {
    "cskv": NEWEST, "minicache": NEWEST, "kv_heads": policies.tova(0.5),
    "kivi": policies.knorm(0.7), "gear": policies.knorm(0.7), "kvarn": policies.knorm(0.7),
    "zipcache": policies.knorm(0.7),
}  # fmt: skip
CONFIG = DecoderConfig(
    family="llama", vocab_size=2, hidden_size=HEADS * DIM, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS,
    head_dim=DIM, mlp_size=1, max_positions=512, rope=ROPE,
)  # fmt: skip
Tokens = tuple[Any, Any, Any]  # queries [B, H, T, D], keys and values [B, K, T, D]


class Prepared(NamedTuple):
    """A storage that is ready to run.

    Attributes:
      layout: of all layers.
      budgets: of the batch.
      sides: of the calibration.
    """

    layout: CacheLayout
    budgets: Any
    sides: Any


class Found(NamedTuple):
    """The results of a run.

    Attributes:
      output: [B, H, STEPS, D] of the decoding steps.
      key: [B, K, N, D] float32 as the layer is read afterwards.
      value: [B, K, N, D].
      position: [B, K, N] int32.
      layer: the layer.
      changed: [] bool, whether `change` changed anything.
    """

    output: jax.Array
    key: jax.Array
    value: jax.Array
    position: jax.Array
    layer: LayerKV
    changed: jax.Array


@functools.cache
def samples() -> Samples:
    rng = np.random.default_rng(5)
    key, value = rng.normal(size=(2, 60, KV_HEADS, DIM)).astype(np.float32)
    kernels = {name: rng.normal(size=(12, KV_HEADS, DIM)) for name in ("key", "value")}
    return Samples(own=key, query=None, key=key, value=value, inputs=rng.normal(size=(60, 12)), kernels=kernels)


def spec(name: str) -> CacheSpec:
    """The storage under a policy that evicts."""
    return CacheSpec(POLICY.get(name, policies.h2o(0.5)), HELD[name])


def prepare(name: str) -> Prepared:
    """Lowers a storage, on the mesh in force."""
    held = HELD[name]
    sizes = sizes_for(LENGTHS, STEPS, width=WIDTH, block=None, limits=Limits(WIDTH, STEPS), last_fed=True)
    lowered = lower(spec(name), CONFIG, sizes, LENGTHS, implementation="xla")
    needed = held.sides_of("calibration")
    sides = Calibration.of(held, [samples()], ROPE).layers[0] if needed else {}
    return Prepared(lowered.layout, jax.tree.map(jnp.asarray, tuple(lowered.budgets)), sides)


def tokens(seed: int = 0) -> Tokens:
    """Returns queries, keys and values of prompts and of the tokens that follow; those of padding are large."""
    rng = np.random.default_rng(seed)
    made = [rng.normal(size=(len(LENGTHS), count, WIDTH + STEPS, DIM)) for count in (HEADS, KV_HEADS, KV_HEADS)]
    return tuple(x.astype(np.float32) for x in made)  # type: ignore[return-value]


def run(
    name: str, made: Prepared, given: Tokens, lower_layer: Tokens, change: Callable[[LayerKV], LayerKV] | None = None
) -> Found:
    """Runs the prompt and the decoding steps of the last layer, to be jitted.

    Args:
      name: of the storage.
      made: from `prepare`.
      given: from `tokens`; of row b, those from LENGTHS[b] on follow its prompt.
      lower_layer: the same of the layer before it, of which a pair holds a part.
      change: applied to the layer before each decoding step; None = nothing is.
    """
    layout, budgets, sides = made
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    total, index = lengths + STEPS, LAYERS - 1

    def take(layer: Layer | None, of: Tokens, position: jax.Array, budget: Any, phase: Any) -> Any:
        at = jnp.maximum(position, 0)[:, None, :, None]
        own = [jnp.where(position[:, None, :, None] >= 0, jnp.take_along_axis(x, at, axis=2), 7.0) for x in of]
        block = Block(position=position, prompt=lengths, total=total, budget=budget).of_layer(index)
        output, after, _ = step_layer(
            layer, *own, block=block, groups=phase[index], args=LayerArgs(rope=ROPE, sides=sides)
        )
        return output, after

    position = jnp.arange(WIDTH, dtype=jnp.int32)
    position = jnp.where(position < lengths[:, None], position, EMPTY)
    paired = layout.decode[index][0].storage.resolved_layout.of_pairs
    layers = tuple(
        take(None, of, position, budgets[0], layout.prompt)[1] for of in ((lower_layer, given) if paired else (given,))
    )
    layers = shared_layers.join_prompts(layers, layout.decode) if paired else (layers[0],) * LAYERS

    def one(layer: LayerKV, number: jax.Array) -> tuple[LayerKV, Any]:
        own = Layer((layer if change is None else change(layer),))
        both = zip(jax.tree.leaves(layer.stores), jax.tree.leaves(own[0].stores), strict=True)
        changed = jnp.any(jnp.stack([jnp.any(x != y) for x, y in both]))
        borrowed = shared_layers.borrow((*layers[:index], own), index, layout.decode[index])
        output, after = take(borrowed, given, (lengths + number)[:, None], budgets[1], layout.decode)
        return shared_layers.release(after, own, layout.decode[index])[0], (output[:, :, 0], changed)

    layer, (outputs, changed) = jax.lax.scan(one, layers[index][0], jnp.arange(STEPS, dtype=jnp.int32))
    calibration = Calibration((sides,), rope=ROPE) if sides else None
    held = read(HELD[name], layer, calibration, lower=layers[0][0] if paired else None)
    return Found(jnp.moveaxis(outputs, 0, 2), *held, layer, jnp.any(changed))
