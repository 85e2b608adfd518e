"""Trained parameters: all parameters of a model, or low-rank updates of projections (LoRA, arXiv:2106.09685)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import traverse_util

from experiments.tuning.config import FULL, LoraConfig, TuneConfig
from kvjax.errors import ConfigError
from kvjax.models.decoder_layer import POLICY, SIDES, SKEW
from kvjax.parallel.sharding import Params
from kvjax.typing import PyTree

Array = jax.Array
FIXED = (SIDES, SKEW, POLICY)  # optional parameters of an attention that are not the model's own
KERNEL = "kernel"
A, B = "a", "b"  # the factors of an update


def initial(config: TuneConfig, params: Params) -> PyTree:
    """Returns the initial trained parameters in float32, with which the model is unchanged.

    Args:
      config: the method and its settings.
      params: of the model.

    Returns:
      A part of the tree of parameters. With LoRA, a projection [..., in, out] has the factors ``a`` [..., in, rank],
      normal with variance 1 / in, and ``b`` [..., rank, out], zero.

    Raises:
      ConfigError: projections that the model does not have.
    """
    if config.method == FULL:
        return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), _plain(without_fixed(params)))
    return _factors(config.lora, params, jax.random.key(config.seed))


def _factors(lora: LoraConfig, params: Params, key: Array) -> PyTree:
    leaves = traverse_util.flatten_dict(_plain(without_fixed(params)))
    known = sorted({path[-2] for path in leaves if path[0].startswith("layer_") and path[-1] == KERNEL})
    if missing := [name for name in lora.projections if name not in known]:
        raise ConfigError(f"lora.projections: the model has no {missing[0]!r}; valid: {', '.join(known)}.")
    found: dict[tuple[str, ...], Array] = {}
    for number, (path, leaf) in enumerate(sorted(leaves.items())):
        if path[0].startswith("layer_") and path[-1] == KERNEL and path[-2] in lora.projections:
            *stack, inputs, outputs = leaf.shape
            normal = jax.random.normal(jax.random.fold_in(key, number), (*stack, inputs, lora.rank), jnp.float32)
            found[*path, A] = normal / jnp.sqrt(jnp.float32(inputs))
            found[*path, B] = jnp.zeros((*stack, lora.rank, outputs), jnp.float32)
    return traverse_util.unflatten_dict(found)


def merged(params: Params, trained: PyTree, config: TuneConfig) -> Params:
    """Returns the parameters of the tuned model, in the dtype of the model.

    Args:
      params: of the model before.
      trained: from `initial`, after any number of steps.
      config: the method and its settings.
    """
    scale = config.lora.alpha / config.lora.rank

    def node(before: PyTree, own: PyTree) -> PyTree:
        if isinstance(before, Mapping):
            return {name: node(each, own[name]) if name in own else each for name, each in before.items()}
        if not isinstance(own, Mapping):
            return own.astype(before.dtype)
        # [..., in, out]
        update = scale * (own[A] @ own[B])
        return (before.astype(jnp.float32) + update).astype(before.dtype)

    tuned: Params = node(params, trained)
    return tuned


def without_fixed(params: Params) -> Params:
    """Returns parameters without those that a calibration or a skew has added."""
    return {
        name: {part: each for part, each in node.items() if part not in FIXED} if name == "attention"
        else without_fixed(node) if isinstance(node, Mapping) else node
        for name, node in params.items()
    }  # fmt: skip


def count(trained: PyTree) -> int:
    """Returns the number of trained numbers."""
    return sum(leaf.size for leaf in jax.tree.leaves(trained))


def _plain(params: Params) -> Params:
    """Returns nested dicts."""
    return {name: _plain(node) if isinstance(node, Mapping) else node for name, node in params.items()}
