"""Generation: one jitted decode loop whose state is donated, traced once however many tokens follow."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from kvjax import attention
from kvjax.attention import Implementation
from kvjax.cache import Block, KVState
from kvjax.inputs import check_stop
from kvjax.models.model import Model
from kvjax.policies.base import Policy, check
from kvjax.prefill import Prefilled, bind, prefill
from kvjax.sampling import Greedy, Sampler, check_sampling

Array = jax.Array
PAD = -1  # generated tokens after a row's stop token
CHUNK = 64  # tokens of one call of the decode loop; between calls the host sees stops and moves the progress bar


class Generation(NamedTuple):
    """What `generate` returns.

    Attributes:
      tokens: [B, max_new_tokens] int32; `PAD` after a row's stop token.
      lengths: [B] int32 new tokens of each row, its stop token included.
      logprobs: [B, max_new_tokens] float32 log-probability of each under the model (before temperature), 0 for PAD.
      state: the cache after every token but each row's last, which was never fed back.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    state: KVState


def generate(
    model: Model,
    tokens: Any,
    policy: Policy,
    *,
    max_new_tokens: int,
    lengths: Any = None,
    sampler: Sampler = Greedy(),
    key: Array | None = None,
    prefill_block: int | None = None,
    stop: Sequence[int] = (),
    stream: Callable[[np.ndarray], None] | None = None,
    progress: bool = False,
    implementation: Implementation = "auto",
) -> Generation:
    """Continues prompts under a policy.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int prompt tokens, rows padded at the end.
      policy: what the cache keeps.
      max_new_tokens: at least 1.
      lengths: [B] real tokens of each row; None = all T.
      sampler: how a token is chosen.
      key: random key for a sampler that samples; None = `jax.random.key(0)`.
      prefill_block: the prompt goes in blocks of so many tokens; None = in one shot.
      stop: token ids that end a row; the stop token itself is returned.
      stream: called with [B] int32 after every token, `PAD` for rows that have ended.
      progress: show a progress bar.
      implementation: of attention and eviction; see `kvjax.attention.attend` and `kvjax.fused`.

    Raises:
      InputError, PolicyError: before anything is traced.
    """
    prefilled = prefill(
        model, tokens, policy, max_new_tokens=max_new_tokens, lengths=lengths, prefill_block=prefill_block,
        implementation=implementation,
    )  # fmt: skip
    return decode(
        model, prefilled, policy, max_new_tokens=max_new_tokens, sampler=sampler, key=key, stop=stop, stream=stream,
        progress=progress, implementation=implementation,
    )  # fmt: skip


def decode(
    model: Model,
    prefilled: Prefilled,
    policy: Policy,
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: Array | None = None,
    stop: Sequence[int] = (),
    stream: Callable[[np.ndarray], None] | None = None,
    progress: bool = False,
    implementation: Implementation = "auto",
) -> Generation:
    """Generates from a prefilled prompt, whose state is consumed (donated); arguments as in `generate`."""
    policy = check(policy)
    policy = policy.then or policy
    check_sampling(sampler, key)
    key = jax.random.key(0) if key is None else key
    stop_ids = check_stop(stop)
    implementation = attention.resolve(implementation, model.platform)
    produced: list[tuple[np.ndarray, np.ndarray]] = []
    done = 1
    with model.on_mesh(), tqdm(total=max_new_tokens, desc="decode", unit="tok", disable=not progress) as bar:
        carry, first, logprob = first_token(prefilled.logits, prefilled.state, key, stop_ids, sampler=sampler)
        produced.append((np.asarray(first)[:, None], np.asarray(logprob)[:, None]))
        bar.update()
        if stream:
            stream(produced[0][0][:, 0])
        while done < max_new_tokens and (not len(stop_ids) or bool(carry.active.any())):
            steps = min(1 if stream else CHUNK, max_new_tokens - done)
            carry, ids, logprobs = decode_steps(
                model.params,
                carry,
                prefilled.budget,
                stop_ids,
                steps,
                config=model.config,
                policy=policy,
                sampler=sampler,
                implementation=implementation,
            )
            produced.append((np.asarray(ids)[:, :steps], np.asarray(logprobs)[:, :steps]))
            if stream:
                stream(produced[-1][0][:, 0])
            done += steps
            bar.update(steps)
    pad = ((0, 0), (0, max_new_tokens - done))
    ids, logprobs = (np.concatenate(parts, axis=1) for parts in zip(*produced, strict=True))
    ids = np.pad(ids, pad, constant_values=PAD)
    return Generation(ids, np.asarray(np.sum(ids != PAD, axis=1), np.int32), np.pad(logprobs, pad), carry.state)


class Carry(NamedTuple):
    state: KVState
    token: Array  # [B] int32, chosen and not yet fed
    active: Array  # [B] bool
    key: Array


@functools.partial(jax.jit, static_argnames=("sampler",), donate_argnames=("state",))
def first_token(logits, state, key, stop, *, sampler):
    """Chooses each row's first new token; returns the carry, the token [B] and its logprob [B]."""
    token, logprob = _choose(logits, state.length, key, sampler)
    return Carry(state, token, _unstopped(token, stop), key), token, logprob


STATIC = ("config", "policy", "sampler", "implementation")


@functools.partial(jax.jit, static_argnames=STATIC, donate_argnames=("carry",))
def decode_steps(params, carry, budget, stop, steps, *, config, policy, sampler, implementation="xla"):
    """Up to `CHUNK` tokens, fewer if `steps` says so or every row has stopped.

    A `lax.scan` whose length is data: one trace serves any number of tokens, and stopped batches end early.

    Returns:
      The carry, tokens [B, CHUNK] and logprobs [B, CHUNK].
    """
    decoder = bind(config, params)
    rows = carry.token.shape[0]

    def unfinished(loop):
        i, carry, _, _ = loop
        return (i < steps) & jnp.any(carry.active)

    def body(loop):
        i, carry, ids, logprobs = loop
        kv, active = carry.state, carry.active
        # A row that has ended feeds padding, which leaves it unchanged.
        position = jnp.where(active, kv.length, -1)[:, None]
        block = Block(position=position, budget=budget, policy=policy, decoding=True, implementation=implementation)
        x, kv = decoder.hidden(jnp.maximum(carry.token, 0)[:, None], kv, block)
        logits = decoder.logits(x[:, 0])
        token, logprob = _choose(logits, kv.length, carry.key, sampler)
        token, logprob = jnp.where(active, token, PAD), jnp.where(active, logprob, 0.0)
        ids, logprobs = ids.at[:, i].set(token), logprobs.at[:, i].set(logprob)
        return i + 1, Carry(kv, token, active & _unstopped(token, stop), carry.key), ids, logprobs

    ids = jnp.full((rows, CHUNK), PAD, jnp.int32)
    loop = (jnp.int32(0), carry, ids, jnp.zeros((rows, CHUNK), jnp.float32))
    return jax.lax.while_loop(unfinished, body, loop)[1:]


def _choose(logits: Array, length: Array, key: Array, sampler: Sampler) -> tuple[Array, Array]:
    """A token and its log-probability per row: [B, V] -> [B], [B]. Keys depend on row and position alone."""
    rows = jnp.arange(logits.shape[0])
    keys = jax.vmap(lambda row, n: jax.random.fold_in(jax.random.fold_in(key, row), n))(rows, length)
    token = sampler(logits, keys)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)


def _unstopped(token: Array, stop: Array) -> Array:
    return ~jnp.any(token[:, None] == stop[None], axis=1)
