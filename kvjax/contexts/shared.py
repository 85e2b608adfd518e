"""A context as the prefix of all rows: its slots are held once, and all rows read them together."""

import dataclasses

import jax
import numpy as np

from kvjax import policies
from kvjax.arguments import plain_signature
from kvjax.cache.planning.limits import slots_bucket
from kvjax.cache.shared_prefix import PARAM, SharedPrefix
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Layer, LayerKV, exact_store
from kvjax.contexts.prefix_store import rotated_by_length
from kvjax.contexts.rewinding import reason_against
from kvjax.contexts.turns import own_model
from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.models.model import Model
from kvjax.models.stacked_params import with_rest
from kvjax.parallel import distributed
from kvjax.typing import PyTree

Array = jax.Array


@plain_signature
def with_prefix(model: Model, context: Context) -> Model:
    """Returns the model with a context as the prefix of every prompt; it is held once for all rows.

    Results are those of rows that have copies of the context (`kvjax.contexts.rows`), except for rounding. The slots
    of the text are in memory once instead of once per row, and a step reads them once.
    `kvjax.generate`, `kvjax.log_likelihood`, `kvjax.score_choices`, `kvjax.serve.Runner` and the functions of
    `kvjax.contexts` take such a model, with `kvjax.policies.full`. Positions of slots count from the first token after
    the text. A gradient is with respect to all parameters but ``shared_prefix``, which has integers.

    Example:
      document = kvjax.contexts.prefill(model, tokens, policies.full())
      reader = kvjax.contexts.with_prefix(model, document)
      answers = kvjax.generate(reader, questions, policies.full(), max_new_tokens=32)

    Args:
      model: that of the context, with rotary or no positions; on one device.
      context: of one row, under `kvjax.policies.full` with exact storage. It is copied.

    Raises:
      InputError: the context is of more than one row or of another cache, or the model's positions are learned or
        depend on the length of the text.
    """
    own = own_model(model, context)
    if reason := _refuses(own, context):
        raise InputError(f"a context cannot be the prefix of all rows: {reason}.")
    length = int(distributed.to_host(context.state.length)[0])
    layers = _trimmed(context.state.layers, size=slots_bucket(length))
    assert context.text is not None
    # [V]
    seen = np.zeros(own.config.vocab_size, bool)
    seen[context.text[0]] = True
    prefix = SharedPrefix(layers, *jax.device_put((np.array([length], np.int32), seen)))
    return dataclasses.replace(own, params=with_rest(own.params, {PARAM: prefix}))


def _refuses(model: Model, context: Context) -> str | None:
    """Returns why a context cannot be the prefix of all rows, or None."""
    if context.num_rows != 1 or context.logits.shape[0] != 1:
        return f"it has {context.num_rows} rows; take one by kvjax.contexts.rows(context, [0])"
    if context.made is None or context.made.spec != CacheSpec(policies.full()):
        held = "is not known" if context.made is None else f"is {context.made.spec.name}"
        return f"its cache {held}; give one under policies.full() with exact storage"
    if context.text is None:
        return "its tokens are not known"
    return refuses_model(model) or reason_against(context.layout)


def refuses_model(model: Model) -> str | None:
    """Returns why no text can be the prefix of all rows of a model, or None."""
    if model.mesh is not None:
        return "the model is on a mesh"
    if model.config.learned_positions:
        return "the model has learned positions"
    if scaling := rotated_by_length(model):
        return f"keys depend on the length of the whole text ({scaling} RoPE)"
    return "the model has such a prefix already; extend that text instead" if PARAM in model.params else None


@jax.jit(static_argnames=("size",))
def _trimmed(layers: PyTree, *, size: int) -> PyTree:
    """Returns copies of layers with only the first slots; tokens of a full cache are in the first slots, in order."""

    def of_group(group: LayerKV) -> LayerKV:
        # [1, K, S, D] each, or [1, L, K, S, D]
        key, value = (x[..., :size, :] for x in (group.key, group.value))
        return LayerKV(group.position[..., :size], (exact_store(key, value),), {}, {}, dim=group.dim)

    return jax.tree.map(lambda layer: Layer(map(of_group, layer)), layers, is_leaf=lambda x: isinstance(x, Layer))
