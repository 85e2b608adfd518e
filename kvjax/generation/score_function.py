"""The log-probabilities of tokens under a cache, as a function of parameters and tokens, for training steps."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Limits
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState
from kvjax.errors import InputError
from kvjax.generation.likelihood import score_steps
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import prefill_steps, prepare
from kvjax.models.model import Model
from kvjax.parallel.sharding import Params
from kvjax.policies.base import Policy
from kvjax.storage.gradient import differentiable

Array = jax.Array
CHUNK = 16  # tokens after the prompt between two caches stored for the backward pass


@dataclasses.dataclass(frozen=True)
class ScoreFunction:
    """The result of `score_function`: a differentiable score of rows of equal length.

    Attributes:
      score: (parameters, tokens [B, T] int32) -> the log-probability of each token after the first, [B, T - 1] float32.
      layout: the static description of the cache.
      least_slots: the smallest number of slots that a KV head may keep; None where every token is kept.
    """

    score: Callable[[Params, Array], Array]
    layout: CacheLayout
    least_slots: int | None


def score_function(
    model: Model,
    policy: Policy | CacheSpec,
    *,
    rows: int,
    prompt_length: int,
    length: int,
    prefill_block: int | None = None,
) -> ScoreFunction:
    """Returns `kvjax.log_likelihood`, for rows of equal length, as a function that can be traced.

    `log_likelihood` checks tokens on the host and lowers a spec in each call. Here this is done once, so that one
    compiled training step serves all batches. The gradient is that of `log_likelihood`: it passes straight through the
    codes of a storage, and treats the choice of slots as a constant. The backward pass computes blocks of the prompt,
    and parts of the tokens after it, again, so that only the caches between them are stored.

    Args:
      model: from `kvjax.load`, with a calibration among its parameters if the storage needs one. Call the score in
        ``model.on_mesh()``, with rows divided as `Model.place` divides them.
      policy: which slots the cache keeps, or a `CacheSpec`.
      rows: B; a multiple of the parts that the mesh divides rows into.
      prompt_length: the number of tokens of each row that are processed as its prompt. The others are fed one at a
        time.
      length: T, the number of tokens of each row.
      prefill_block: see `kvjax.CacheOptions`.

    Raises:
      InputError: a prompt longer than a row, or rows that the mesh does not divide.
      PolicyError: if the policy, storage and selection cannot be combined.
      StorageError: see `kvjax.generate`.
    """
    if not 1 <= prompt_length <= length:
        raise InputError(f"prompt_length={prompt_length} must be from 1 to the {length} tokens of a row.")
    if model.rows_on_mesh(rows) != rows:
        raise InputError(f"rows={rows} is not a multiple of the parts of mesh {model.mesh and dict(model.mesh.shape)}.")
    following = length - prompt_length
    limits = Limits(prompt_length, max(following, 1), shortest=prompt_length)
    options = CacheOptions(prefill_block=prefill_block, implementation="xla", limits=limits)
    model, spec = options.resolve(model, policy)
    spec = dataclasses.replace(spec, storage=differentiable(spec.storage))
    # [B]
    prompt, total = (np.full((rows,), each, np.int32) for each in (prompt_length, length))
    with model.on_mesh():
        prepared = prepare(model, spec, prompt, total, width=prompt_length, options=options)
    # Loops over layers read weights by kvjax's own product, which has no gradient.
    layout = dataclasses.replace(prepared.layout, runs=())
    budgets, config = prepared.budgets, model.config

    def score(params: Params, tokens: Array) -> Array:
        # [B, width + 1]: the prompt, and the token after it
        ids = tokens[:, : prepared.width + 1]
        ids = jnp.pad(ids, ((0, 0), (0, prepared.width + 1 - ids.shape[1])))
        _, scores, state = prefill_steps(
            params, ids, jnp.asarray(prompt), jnp.asarray(total), budgets.prompt, budgets.decode, config=config,
            layout=layout, score=True,
        )  # fmt: skip
        # The last token is only predicted.
        if (steps := following - 1) > 0:
            # [B, T]
            scores = jnp.pad(scores, ((0, 0), (0, length - scores.shape[1])))

            def chunk(carry: tuple[Array, KVState], _: None) -> tuple[tuple[Array, KVState], None]:
                before, kv = carry
                after, kv, _ = score_steps(
                    params, kv, before, tokens, jnp.asarray(total), jnp.int32(0), config=config, phase=layout.decode,
                    static_steps=min(CHUNK, steps),
                )  # fmt: skip
                return (after, kv), None

            body = jax.checkpoint(chunk, prevent_cse=False)
            (scores, _), _ = jax.lax.scan(body, (scores, state), length=-(-steps // CHUNK))
        return scores[:, : length - 1]

    limited = [int(each.min()) for each in jax.tree.leaves((budgets.prompt, budgets.decode))]
    return ScoreFunction(score, layout, min(limited, default=None))
