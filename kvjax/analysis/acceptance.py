"""How well a cache, or another model, would draft: its probabilities of each token beside those of the full cache."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import plain_signature
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.planning.layout import Phase
from kvjax.cache.planning.limits import power_of_two
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Block, KVState
from kvjax.errors import InputError
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.generation.prefill import prepare, run_prompts
from kvjax.generation.program import program
from kvjax.generation.sampling import Greedy
from kvjax.inputs import check_batch, check_prompt
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.policies import full
from kvjax.selection.base import Selection
from kvjax.speculation.drafts import Draft, Level, Own, resolve_levels
from kvjax.summary import one_line

Array = jax.Array
LEAST = 64  # tokens after a prompt that arrays have room for at the least


class Acceptance(NamedTuple):
    """The result of `acceptance`, where N is the largest number of tokens of a row from its prompt length on.

    Attributes:
      agree: [B, N] bool, whether both distributions have the same most probable token; False from the end of a row on.
      overlap: [B, N] float32, Σ min(p, q), the chance that a draft is accepted by the ``ratio`` rule; 0 from the end of
        a row on.
      kl: [B, N] float32, KL(p ‖ q) in nats, p the full cache's; 0 from the end of a row on.
      counts: [B] int32, the number of entries of each row.
    """

    agree: np.ndarray
    overlap: np.ndarray
    kl: np.ndarray
    counts: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def agreement(self) -> float:
        """The share of tokens where both distributions have the same most probable token."""
        return float(self.agree.sum() / self.counts.sum())

    @property
    def chance(self) -> float:
        """The mean chance that a draft is accepted by the ``ratio`` rule."""
        return float(self.overlap.sum() / self.counts.sum())


@plain_signature
@cache_keywords()
def acceptance(
    model: Model,
    tokens: ArrayLike,
    draft: Draft | None = None,
    *,
    prompt_length: ArrayLike,
    draft_model: Model | None = None,
    lengths: ArrayLike | None = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> Acceptance:
    """Compares a draft's probabilities of each token with those of the full cache, by teacher forcing.

    It measures the quality of any policy. For greedy drafts of `kvjax.speculation.own`, it predicts
    which tokens each round of `kvjax.speculate` accepts.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end; or a list of rows of any lengths.
      draft: a policy, a `CacheSpec`, `kvjax.speculation.own`, or a selection, which chooses for each token; None for a
        full cache of `draft_model`.
      prompt_length: int or [B] int, the number of tokens of each row that are processed as its prompt.
      draft_model: another model that drafts.
      lengths: [B] int, the number of real tokens of each row; None for T.
      options: see `kvjax.CacheOptions`; storage and selection are those of the draft's `CacheSpec`.
      cache: fields of the options.

    Returns:
      An entry for each token from `prompt_length` on; the first one is of the logits after the prompt.

    Raises:
      InputError: tokens or lengths that are not valid, or no token after a prompt.
      PolicyError: see `kvjax.generate`; or a draft that reads slots which it chooses anew in each round.
      StorageError: see `kvjax.generate`.
    """
    options = options_of(options, cache, "acceptance")
    (level,) = _levels(model, draft, draft_model)
    other = model if level.model is None else level.model
    if isinstance(level.draft, Selection):
        given: Any = CacheSpec(full(), selection=level.draft)
    elif isinstance(level.draft, Own):
        given = level.draft.spec
    else:
        raise InputError(
            f"{level.draft!r} chooses slots in each round, and there are none here; give own(policy), whose cache is "
            "that of plain decoding."
        )
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    prompt = check_prompt(prompt_length, batch.lengths)
    counts = np.asarray(batch.lengths - prompt, np.int32)
    if (most := int(counts.max())) < 1:
        raise InputError(f"no row has a token after its prompt of {int(prompt.max())} tokens; lower prompt_length.")
    plain = CacheOptions(prefill_block=options.prefill_block, implementation=options.implementation)
    states, logits, phases = [], [], []
    for each, spec, cache_options in ((model, CacheSpec(full()), plain), (other, given, options)):
        resolved_model, resolved_spec = cache_options.resolve(each, spec)
        with resolved_model.on_mesh():
            prepared = prepare(
                resolved_model, resolved_spec, prompt, batch.lengths, width=int(prompt.max()), options=cache_options,
                pad_rows=True,
            )  # fmt: skip
            first, _, state = run_prompts(resolved_model, batch.tokens, prompt, batch.lengths, prepared, score=False)
        states.append(state)
        logits.append(first)
        phases.append(prepared.layout.decode)
        if each is other:
            other = resolved_model
    width = power_of_two(most, LEAST)
    # [B, width]: the tokens after each prompt
    ids = np.zeros((prepared.rows, width), np.int32)
    for row, (start, count) in enumerate(zip(prompt, counts, strict=True)):
        ids[row, :count] = batch.tokens[row, start : start + count]
    with model.on_mesh():
        ids, ends = model.place((ids, np.pad(counts, (0, prepared.rows - len(counts)))))
        made = _compare(
            (model.params, other.params), tuple(states), tuple(logits), ids, ends, np.int32(most),
            configs=(model.config, other.config), phases=tuple(phases),
        )  # fmt: skip
    agree, overlap, kl = (each[: len(counts), :most] for each in distributed.to_host(made))
    return Acceptance(agree, overlap, kl, counts)


def _levels(model: Model, draft: Draft | None, draft_model: Model | None) -> tuple[Level, ...]:
    """Returns the one level that is asked for, checked."""
    levels = resolve_levels(model, draft, Level(gamma=1, accept="shared", model=draft_model), Greedy())
    if len(levels) != 1:
        raise InputError(f"draft has {len(levels)} levels; give one of them.")
    return levels


@program(static_argnames=("configs", "phases"))
def _compare(
    params: tuple[Params, Params],
    states: tuple[KVState, KVState],
    logits: tuple[Array, Array],
    tokens: Array,
    counts: Array,
    most: Array,
    *,
    configs: tuple[DecoderConfig, DecoderConfig],
    phases: tuple[Phase, Phase],
) -> tuple[Array, Array, Array]:
    """Feeds the same tokens to two caches, and compares their probabilities of each.

    Args:
      params: of both decoders.
      states: after the prompts.
      logits: [B, V] each, after the prompts.
      tokens: [B, N] int32, those after the prompts.
      counts: [B] int32, the number of them.
      most: int32, the largest of these.
      configs: the decoders.
      phases: the groups of heads of each layer, of both caches.

    Returns:
      See `Acceptance`; [B, N] each.
    """
    decoders = [bind(*each) for each in zip(configs, params, strict=True)]
    runs = [decoder.runs_now(kv, phase) for decoder, kv, phase in zip(decoders, states, phases, strict=True)]
    decoders = [decoder.looped(run) for decoder, run in zip(decoders, runs, strict=True)]
    kept = tuple(arranged_state(*each) for each in zip(states, runs, strict=True))

    def body(number: Array, loop: tuple[tuple[KVState, ...], tuple[Array, ...], tuple[Array, ...]]) -> Any:
        caches, now, made = loop
        # [B]
        active = number < counts
        made = tuple(
            each.at[:, number].set(jnp.where(active, new, jnp.zeros((), new.dtype)))
            for each, new in zip(made, _compared(*now), strict=True)
        )
        after = []
        for decoder, kv, phase in zip(decoders, caches, phases, strict=True):
            # [B, 1]; the last token is not fed
            position = jnp.where(number + 1 < counts, kv.length, -1)[:, None]
            block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
            x, kv = decoder.hidden(tokens[:, number][:, None], kv, block, phase)
            after.append((kv, decoder.logits(x[:, 0])))
        return tuple(kv for kv, _ in after), tuple(x for _, x in after), made

    empty = jnp.zeros(tokens.shape, jnp.float32)
    loop = (kept, tuple(logits), (empty.astype(bool), empty, empty))
    made: tuple[Array, Array, Array] = jax.lax.fori_loop(0, most, body, loop)[2]
    return made


def _compared(target: Array, draft: Array) -> tuple[Array, Array, Array]:
    """Returns whether the largest of logits [B, V] agree, their overlap Σ min(p, q), and KL(p ‖ q), [B] each."""
    p, q = (jax.nn.log_softmax(each, axis=-1) for each in (target, draft))
    overlap = jnp.sum(jnp.exp(jnp.minimum(p, q)), axis=-1)
    divergence = jnp.sum(jnp.where(p > -jnp.inf, jnp.exp(p) * (p - q), 0.0), axis=-1)
    return jnp.argmax(target, axis=-1) == jnp.argmax(draft, axis=-1), overlap, divergence
