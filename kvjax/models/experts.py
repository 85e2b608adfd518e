"""Routed experts: each token goes through a few MLPs of many, chosen by a router (Mixtral, arXiv:2401.04088).

No token is dropped, whatever the router chooses. Tokens are sorted by expert and cut into blocks of one expert each, of
which there are as many as any choice may need, so that shapes do not depend on the choice. A block reads its expert's
matrices where they lie; a block without tokens reads nothing. A decoding step of few rows therefore reads the experts
that it needs and no others, and a prompt computes little more than what its tokens need: at most one incomplete block
for each expert. `jax.lax.ragged_dot` would do the same on TPUs, but on CPUs it multiplies every token by every expert.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from kvjax.models.config import DecoderConfig
from kvjax.models.layers import ACTIVATIONS, Linear
from kvjax.parallel import sharding
from kvjax.products import QuantizedMatrix, product

Array = jax.Array
Kernels = dict[str, Any]  # ``gate``, ``up`` and ``down`` -> [E, in, out], arrays or `QuantizedMatrix`

ROUTER = "router"  # name of the router's projection, whose rounding would change which experts are chosen
BLOCK = 128  # the most tokens of a block: enough that a product is limited by arithmetic


class Experts(nn.Module):
    """The routed MLP of one layer: the sum of the chosen experts' outputs, weighted by the router's probabilities.

    Attributes:
      config: the decoder.
      dtype: of the parameters.
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [B, n, hidden] to [B, n, hidden]."""
        config = self.config
        # [B, n, E] float32
        logits = Linear(config.num_experts, False, self.dtype, name=ROUTER)(x).astype(jnp.float32)
        # [B, n, k] float32 and int32
        weight, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), config.experts_per_token)
        if config.normalised_experts:
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        outer, inner = config.hidden_size, config.mlp_size
        shapes = {"gate": (outer, inner), "up": (outer, inner), "down": (inner, outer)}
        kernels = {
            name: Stacked((config.num_experts, *shape), self.dtype, name=name)() for name, shape in shapes.items()
        }
        run = functools.partial(routed, activation=ACTIVATIONS[config.activation])
        return _on_mesh(run, x, chosen, weight, kernels).astype(x.dtype)


class Stacked(nn.Module):
    """The matrices of all experts.

    Attributes:
      shape: [E, in, out].
      dtype: of the parameters.
    """

    shape: tuple[int, int, int]
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self) -> Array | QuantizedMatrix:
        """Returns the matrices."""
        # Flax would compare the arrays of a quantised matrix with this shape.
        kernel: Array | QuantizedMatrix | None = self.get_variable("params", "kernel")
        if not isinstance(kernel, QuantizedMatrix):
            kernel = self.param("kernel", nn.initializers.normal(self.shape[1] ** -0.5), self.shape, self.dtype)
        return kernel


def routed(x: Array, chosen: Array, weight: Array, kernels: Kernels, *, activation: Callable[[Array], Array]) -> Array:
    """Computes the weighted sum of each token's experts.

    Args:
      x: [B, n, hidden].
      chosen: [B, n, k] int32, different experts for each token.
      weight: [B, n, k] float32.
      kernels: the matrices of all experts.
      activation: of the gate.

    Returns:
      [B, n, hidden] float32, summed in the order of the experts.
    """
    hidden, k = x.shape[-1], chosen.shape[-1]
    # [N, hidden]
    tokens = x.reshape(-1, hidden)
    count, experts = len(tokens), jax.tree.leaves(kernels)[0].shape[0]
    size = min(count, BLOCK)
    # [N * k]: pairs of a token and one of its experts, pair p being of token p // k, by ascending expert
    pairs = jnp.argsort(chosen.reshape(-1), stable=True).astype(jnp.int32)
    expert = chosen.reshape(-1)[pairs]
    # [E + 1]: where the pairs of each expert begin, and their end
    start = jnp.searchsorted(expert, jnp.arange(experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    # [E]: the number of blocks up to those of each expert
    blocks = jnp.cumsum(-(-(start[1:] - start[:-1]) // size))

    def add(total: Array, block: Array) -> tuple[Array, None]:
        """Adds what one block contributes to the output, [N, hidden] float32."""
        own = jnp.searchsorted(blocks, block, side="right").astype(jnp.int32)
        # [size]: of the sorted pairs; those from `end` on are of other experts
        first = start[own] + (block - jnp.where(own > 0, blocks[own - 1], 0)) * size
        at, end = first + jnp.arange(size, dtype=jnp.int32), start[own + 1]
        pair = pairs[jnp.minimum(at, len(pairs) - 1)]
        matrices = jax.tree.map(lambda each: jax.lax.dynamic_index_in_dim(each, own, keepdims=False), kernels)
        # [size, hidden]
        rows = tokens[pair // k]
        # [size, mlp]
        inner = activation(product(rows, matrices["gate"])) * product(rows, matrices["up"])
        # [size, hidden] float32
        output = product(inner, matrices["down"]).astype(jnp.float32) * weight.reshape(-1)[pair][:, None]
        # Out of bounds, where writes are dropped.
        target = jnp.where(at < end, pair // k, count)
        return total.at[target].add(output, mode="drop"), None

    def step(total: Array, block: Array) -> tuple[Array, None]:
        return jax.lax.cond(block < blocks[-1], add, lambda total, _: (total, None), total, block)

    maximum = max_blocks(count * k, count, experts)
    total, _ = jax.lax.scan(step, jnp.zeros((count, hidden), jnp.float32), jnp.arange(maximum, dtype=jnp.int32))
    return total.reshape(x.shape)


def max_blocks(pairs: int, tokens: int, experts: int) -> int:
    """Returns the most blocks that any choice of experts needs.

    Args:
      pairs: of a token and one of its experts.
      tokens: the number of tokens.
      experts: the number of experts.
    """
    size, hit = min(tokens, BLOCK), min(experts, pairs)
    # An expert has a token at most once. Each expert that is chosen has one block that may be incomplete.
    return hit if size == tokens else (pairs + hit * (size - 1)) // size


def _on_mesh(run: Callable[..., Array], x: Array, chosen: Array, weight: Array, kernels: Kernels) -> Array:
    """Runs `routed` on each device for its rows and its part of the experts' hidden features."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run(x, chosen, weight, kernels)

    def place(path: KeyPath, leaf: Array) -> PartitionSpec:
        name, *part = sharding.path_names(path)
        return sharding.parameter_spec(("mlp", name, "kernel", *part), leaf.shape, mesh)

    places = jax.tree_util.tree_map_with_path(place, kernels)
    # Of all three matrices the hidden features are divided, or of none.
    axes = {tuple(name for name in each if name is not None) for each in jax.tree.leaves(places)}
    divided = axes.pop() if len(axes) == 1 else ()
    places = places if divided else jax.tree.map(lambda _: PartitionSpec(), kernels)
    rows = sharding.spec(("batch", None, None), x.shape, mesh)

    def parts(*arguments: Any) -> Array:
        total = run(*arguments)
        # Of a pair (names of axes,), or of axes that divide the features together.
        return jax.lax.psum(total, divided[0]) if divided else total

    own = (rows, rows, rows, places)
    return jax.shard_map(parts, mesh=mesh, in_specs=own, out_specs=rows, check_vma=False)(x, chosen, weight, kernels)
