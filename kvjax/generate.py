"""Generation: one jitted decode loop whose state is donated, traced once however many tokens follow."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from kvjax.attention import Implementation
from kvjax.cache.limits import Limits
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Block, KVState
from kvjax.errors import InputError
from kvjax.inputs import check_stop
from kvjax.models.model import Model
from kvjax.policies.base import Policy
from kvjax.prefill import Prefilled, bind, prefill
from kvjax.sampling import Greedy, Sampler, check_sampling
from kvjax.selection.base import Selection
from kvjax.storage.base import Storage

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
    policy: Policy | CacheSpec,
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
    storage: Storage | None = None,
    selection: Selection | None = None,
    limits: Limits | None = None,
    requests: Any = None,
) -> Generation:
    """Continues prompts under a policy.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int prompt tokens, rows padded at the end.
      policy: what the cache keeps, or a `CacheSpec`.
      max_new_tokens: at least 1.
      lengths: [B] real tokens of each row; None = all T.
      sampler: how a token is chosen.
      key: random key for a sampler that samples; None = `jax.random.key(0)`.
      prefill_block: the prompt goes in blocks of so many tokens; None = in one shot.
      stop: token ids that end a row; the stop token itself is returned.
      stream: called with [B] int32 after every token, `PAD` for rows that have ended.
      progress: show a progress bar.
      implementation: of attention and eviction; see `kvjax.attention`.
      storage: how slots are held, such as ``kvjax.storage.int8()``; None = in the model's dtype.
      selection: which slots a query reads, such as ``kvjax.selection.quest(budget=512)``; None = all.
      limits: the sizes that programs are compiled for; None = buckets, see `kvjax.cache.limits`.
      requests: [B] int id of each row, which a sampler's draws depend on with the token's position, and on nothing else
        of the batch; None = the rows' numbers.

    Raises:
      InputError, PolicyError: before anything is traced.
    """
    prefilled = prefill(
        model, tokens, policy, max_new_tokens=max_new_tokens, lengths=lengths, prefill_block=prefill_block,
        implementation=implementation, storage=storage, selection=selection, limits=limits,
    )  # fmt: skip
    return decode(
        model, prefilled, max_new_tokens=max_new_tokens, sampler=sampler, key=key, stop=stop, stream=stream,
        progress=progress, requests=requests,
    )  # fmt: skip


def decode(
    model: Model,
    prefilled: Prefilled,
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: Array | None = None,
    stop: Sequence[int] = (),
    stream: Callable[[np.ndarray], None] | None = None,
    progress: bool = False,
    requests: Any = None,
) -> Generation:
    """Generates from a prefilled prompt, whose state is consumed (donated); arguments as in `generate`."""
    check_sampling(sampler, key)
    key = jax.random.key(0) if key is None else key
    stop_ids = check_stop(stop)
    request = _check_requests(requests, prefilled.logits.shape[0])
    produced: list[tuple[np.ndarray, np.ndarray]] = []
    done = 1
    with model.on_mesh(), tqdm(total=max_new_tokens, desc="decode", unit="tok", disable=not progress) as bar:
        carry, first, logprob = first_token(
            prefilled.logits, prefilled.state, model.place(request), key, stop_ids, sampler=sampler
        )
        produced.append((np.asarray(first)[:, None], np.asarray(logprob)[:, None]))
        bar.update()
        if stream:
            stream(produced[0][0][:, 0])
        while done < max_new_tokens and (not len(stop_ids) or bool(carry.active.any())):
            steps = min(1 if stream else CHUNK, max_new_tokens - done)
            carry, ids, logprobs = decode_steps(
                model.params, carry, stop_ids, steps, config=model.config, phase=prefilled.layout.decode,
                sampler=sampler,
            )  # fmt: skip
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
    """What the decode loop carries; every leaf but the key has the batch first.

    Attributes:
      state: the cache.
      token: [B] int32, chosen and not yet fed.
      active: [B] bool, whether a row goes on.
      request: [B] int32 id of each row's request.
      key: the random key of all requests.
    """

    state: KVState
    token: Array
    active: Array
    request: Array
    key: Array


@functools.partial(jax.jit, static_argnames=("sampler",), donate_argnames=("state",))
def first_token(logits, state, request, key, stop, *, sampler):
    """Chooses each row's first new token; returns the carry, the token [B] and its logprob [B]."""
    token, logprob = _choose(logits, state.length, request, key, sampler)
    return Carry(state, token, _unstopped(token, stop), request, key), token, logprob


@functools.partial(jax.jit, static_argnames=("config", "phase", "sampler"), donate_argnames=("carry",))
def decode_steps(params, carry, stop, steps, *, config, phase, sampler):
    """Up to `CHUNK` tokens, fewer if `steps` says so or every row has stopped.

    A loop whose length is data: one trace serves any number of tokens, and stopped batches end early.

    Args:
      stop: [n] int32 token ids that end a row.
      steps: the number of tokens, int32.
      phase: the groups of each layer.

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
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
        x, kv = decoder.hidden(jnp.maximum(carry.token, 0)[:, None], kv, block, phase)
        logits = decoder.logits(x[:, 0])
        token, logprob = _choose(logits, kv.length, carry.request, carry.key, sampler)
        token, logprob = jnp.where(active, token, PAD), jnp.where(active, logprob, 0.0)
        ids, logprobs = ids.at[:, i].set(token), logprobs.at[:, i].set(logprob)
        carry = carry._replace(state=kv, token=token, active=active & _unstopped(token, stop))
        return i + 1, carry, ids, logprobs

    ids = jnp.full((rows, CHUNK), PAD, jnp.int32)
    loop = (jnp.int32(0), carry, ids, jnp.zeros((rows, CHUNK), jnp.float32))
    return jax.lax.while_loop(unfinished, body, loop)[1:]


def _choose(logits: Array, length: Array, request: Array, key: Array, sampler: Sampler) -> tuple[Array, Array]:
    """A token and its log-probability per row: [B, V] -> [B], [B]. Keys depend on request and position alone."""
    keys = jax.vmap(lambda own, n: jax.random.fold_in(jax.random.fold_in(key, own), n))(request, length)
    token = sampler(logits, keys)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)


def _unstopped(token: Array, stop: Array) -> Array:
    return ~jnp.any(token[:, None] == stop[None], axis=1)


def _check_requests(requests: Any, rows: int) -> np.ndarray:
    """[B] int32 ids of the rows' requests."""
    if requests is None:
        return np.arange(rows, dtype=np.int32)
    ids = np.asarray(requests)
    if ids.shape != (rows,) or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
        raise InputError(f"requests must be {rows} whole numbers from 0, one per row; got {requests!r}.")
    return ids.astype(np.int32)
