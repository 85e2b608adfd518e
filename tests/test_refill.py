"""Rows that are replaced in place: many requests through a few rows, each equal to the same request alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import memory, policies, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.generate import CHUNK, Carry, decode_steps, first_token, prefill, seen_tokens
from kvjax.sampling import Greedy, Sample
from tests.tiny import VOCAB, assert_same_state, kept, tiny

REQUESTS, ROWS, LONGEST = 64, 8, 40
STOP = np.array([3], np.int32)
LIMITS = Limits(prompt=LONGEST, new_tokens=24)


def requests() -> list[tuple[np.ndarray, int]]:
    """Prompts of 5 to 40 tokens, and how many tokens each of them wants."""
    rng = np.random.default_rng(5)
    return [
        (rng.integers(4, VOCAB, rng.integers(5, LONGEST + 1), dtype=np.int32), int(rng.integers(2, 24)))
        for _ in range(REQUESTS)
    ]


def model_for(spec) -> kvjax.Model:
    """Of two layers where these differ."""
    return tiny(layers=2 if spec.policy.name == "pyramidkv" else 1).model


def begin(spec, prompt, number, sampler):
    """One request alone in a row: its carry and its first token."""
    model = model_for(spec)
    begun = prefill(model, prompt[None], spec, max_new_tokens=LIMITS.new_tokens, limits=LIMITS)
    carry, token, _ = first_token(
        begun.logits, begun.state, jnp.array([number], jnp.int32), jax.random.key(9), STOP,
        model.place(seen_tokens(begun, sampler)), sampler=sampler,
    )  # fmt: skip
    return carry, int(token[0]), begun.layout


def many(x):
    """An array of one row with `ROWS` rows, in the same memory."""
    return jax.device_put(np.repeat(x, ROWS, axis=0), x.sharding)


@jax.jit
def put(carry: Carry, one: Carry, row) -> Carry:
    """The carry with one row replaced; the key is of all requests."""
    rest, new = carry._replace(key=()), one._replace(key=())
    joined = jax.tree.map(lambda whole, own: memory.put_row(whole, row, own), rest, new)
    return joined._replace(key=carry.key)


def serve(spec, sampler, asked) -> tuple[dict[int, list[int]], dict[int, kvjax.KVState]]:
    """All requests through `ROWS` rows, a row taking the next one when its own has ended."""
    model = model_for(spec)
    waiting = list(enumerate(asked))
    produced: dict[int, list[int]] = {}
    held: dict[int, kvjax.KVState] = {}
    running: list[int | None] = [None] * ROWS
    carry, layout = None, None
    while waiting or any(each is not None for each in running):
        for row in range(ROWS):
            if running[row] is None and waiting:
                number, (prompt, _) = waiting.pop(0)
                one, token, layout = begin(spec, prompt, number, sampler)
                produced[number] = [token]
                if carry is None:
                    carry = jax.tree.map(many, one._replace(key=()))
                    carry = carry._replace(key=one.key, active=jnp.zeros((ROWS,), bool))
                carry = put(carry, one, row)
                running[row] = number
        # Rows that have all their tokens rest.
        wanted = [each is not None and len(produced[each]) < asked[each][1] for each in running]
        carry = carry._replace(active=carry.active & jnp.asarray(wanted))
        if bool(carry.active.any()):
            steps = min(
                asked[each][1] - len(produced[each])
                for each, alive in zip(running, np.asarray(carry.active), strict=True)
                if alive
            )
            carry, ids, *_ = decode_steps(
                model.params, carry, STOP, jnp.int32(min(steps, CHUNK)), config=model.config, phase=layout.decode,
                sampler=sampler,
            )  # fmt: skip
            for row, each in enumerate(running):
                if each is not None:
                    produced[each] += [int(t) for t in np.asarray(ids)[row, :steps] if t >= 0]
        for row, each in enumerate(running):
            if each is not None and (len(produced[each]) >= asked[each][1] or not bool(carry.active[row])):
                held[each] = jax.tree.map(lambda x, row=row: np.asarray(x)[row : row + 1], carry.state)
                running[row] = None
    return produced, held


SAMPLED = Sample(temperature=1.3, top_k=30, repetition_penalty=1.5)


@pytest.mark.parametrize("sampler", [Greedy(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "spec",
    [
        CacheSpec(policies.h2o(0.5)),
        CacheSpec(policies.h2o(0.5), storage.int8()),
        CacheSpec(policies.window(9), storage.int8(memory="host")),
        # Its last layer keeps more of a short prompt than of a long one.
        CacheSpec(policies.pyramidkv(8, window=2)),
    ],
    ids=["h2o", "h2o-int8", "window-int8-host", "pyramidkv"],
)
def test_each_request_is_as_it_is_alone(spec, sampler):
    asked = requests()
    produced, held = serve(spec, sampler, asked)
    for number, (prompt, wanted) in enumerate(asked):
        # One program serves all of these, whatever their lengths.
        alone = kvjax.generate(
            model_for(spec), prompt, spec, max_new_tokens=wanted, sampler=sampler, key=jax.random.key(9), stop=STOP,
            limits=LIMITS, requests=[number],
        )  # fmt: skip
        np.testing.assert_array_equal(produced[number], alone.tokens[0, : alone.lengths[0]])
        assert kept(held[number], 0) == kept(alone.state, 0)
        if spec.storage.exact:
            assert_same_state(held[number], alone.state, 0, atol=1e-5)


def test_no_program_is_compiled_after_the_first_eight():
    asked, spec = requests(), CacheSpec(policies.h2o(0.5))
    serve(spec, Greedy(), asked[:ROWS])
    compiled = []
    listener = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        serve(spec, Greedy(), asked[ROWS:])
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled
