"""Many requests through a few rows: each as it is alone, whatever its length, its row and its neighbours."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import policies, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.errors import InputError, PolicyError
from kvjax.generation.sampling import Greedy, Sample
from kvjax.serve import Request, Runner
from kvjax.serve.request import MAX_STOPS
from tests.tiny import VOCAB, tiny

REQUESTS, ROWS, LONGEST = 64, 8, 90
STOP = 3
LIMITS = Limits(prompt=LONGEST, new_tokens=24)
SAMPLERS = [Greedy(), Sample(temperature=1.3, top_k=30, repetition_penalty=1.5)]
SPECS = {
    "h2o": CacheSpec(policies.h2o(0.5)),
    "h2o-int8": CacheSpec(policies.h2o(0.5), storage.int8()),
    "window-int8-host": CacheSpec(policies.window(9), storage.int8(memory="host")),
    # Its last layer keeps more of a short prompt than of a long one.
    "pyramidkv": CacheSpec(policies.pyramidkv(8, window=2)),
}


def model_for(name):
    """Returns a model of one layer, or of two where the policy tells layers apart."""
    return tiny(layers=2 if name == "pyramidkv" else 1).model


@functools.cache
def requests() -> list[Request]:
    """Prompts of two buckets, 5 to 90 tokens, and how many tokens each of them wants; every second one is sampled."""
    rng = np.random.default_rng(5)
    return [
        Request(
            tokens=rng.integers(4, VOCAB, rng.integers(5, LONGEST + 1), dtype=np.int32),
            max_new_tokens=int(rng.integers(1, 24)),
            stop=[int(rng.integers(4, VOCAB))],
            sampler=SAMPLERS[number % 2],
            seed=number if number % 4 == 3 else None,
        )
        for number in range(REQUESTS)
    ]


def alone(name, number, request, **options):
    """The request in a batch of its own."""
    seeded = request.seed is not None
    return kvjax.generate(
        model_for(name), request.tokens, SPECS[name], max_new_tokens=request.max_new_tokens, sampler=request.sampler,
        key=jax.random.key(request.seed if seeded else 9), requests=[0 if seeded else number],
        stop=[STOP, *request.stop], limits=LIMITS, **options,
    )  # fmt: skip


def runner_for(name, **options):
    options = {"rows": ROWS, "limits": LIMITS, "stop": STOP, "key": jax.random.key(9)} | options
    return Runner(model_for(name), SPECS[name], **options)


def assert_same(result, expected):
    count = expected.lengths[0]
    np.testing.assert_array_equal(result.tokens, expected.tokens[0, :count])
    np.testing.assert_allclose(result.logprobs, expected.logprobs[0, :count], atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_each_request_is_as_it_is_alone(name):
    runner = runner_for(name)
    waiting = iter(requests())
    for _ in range(REQUESTS // 2):
        runner.submit(next(waiting))
    found = {}
    for result in runner:
        found[result.id] = result
        # Others come while these run.
        if (request := next(waiting, None)) is not None:
            runner.submit(request)
    assert len(found) == REQUESTS
    for number, result in sorted(found.items()):
        request = requests()[number]
        expected = alone(name, number, request)
        assert_same(result, expected)
        stopped = int(result.tokens[-1]) in (STOP, *request.stop)
        assert result.reason == ("stop" if stopped else "length") and result.prompt == len(request.tokens)
    assert runner.idle and runner.load.running == runner.load.waiting == 0


def test_prompts_in_blocks_do_not_keep_rows_waiting():
    """A prompt of six blocks goes in between the chunks of a request that runs, and is as it is alone in blocks."""
    long, short = requests()[0], Request(tokens=[5, 6, 7], max_new_tokens=24, sampler=Greedy())
    long = Request(tokens=np.resize(np.asarray(long.tokens), LONGEST), max_new_tokens=6, sampler=SAMPLERS[1])
    runner = runner_for("h2o", rows=2, prefill_block=16, chunk=4, turn_tokens=16, stop=())
    running = runner.submit(short)
    first = runner.step()
    assert [(progress.id, len(progress.tokens)) for progress in first] == [(running, 5)]
    waited = runner.submit(long)
    order = list(runner.stream())
    before = order[: [progress.id for progress in order].index(waited)]
    assert sum(len(progress.tokens) for progress in before) >= 4 * 4
    found = {progress.id: progress.result for progress in order if progress.result is not None}
    expected = kvjax.generate(
        model_for("h2o"), long.tokens, SPECS["h2o"], max_new_tokens=6, sampler=SAMPLERS[1], key=jax.random.key(9),
        requests=[waited], limits=LIMITS, prefill_block=16,
    )  # fmt: skip
    assert_same(found[waited], expected)
    assert "prompts: in blocks of 16 tokens" in runner.explain()


def test_blocks_are_only_where_they_change_nothing(monkeypatch):
    monkeypatch.setattr("kvjax.serve.prompts.AUTO_BLOCK", 16)
    assert runner_for("pyramidkv").prompts.block == 16
    for name, reason in (("h2o", "policy h2o evicts"), ("h2o-int8", "policy h2o evicts")):
        assert f"prompts: in one shot: {reason}" in runner_for(name).explain()
    model = model_for("h2o")
    coded = Runner(model, policies.full(), storage=storage.int8(), rows=1, limits=LIMITS)
    assert "reads the ones before it as storage int8 holds them" in coded.explain()
    # Where blocks are asked for, a storage that cannot have them says so.
    with pytest.raises(kvjax.KvjaxError, match="prefill_block"):
        Runner(model, policies.full(), storage=storage.gear(), rows=1, limits=LIMITS, prefill_block=16)


def test_no_program_is_compiled_after_the_first_requests():
    first, *others = requests()
    runner = runner_for("h2o")
    # A prompt of each bucket, and a sampled and a greedy request: also if no test before this one has compiled them.
    for length, sampler in zip((9, LONGEST), SAMPLERS, strict=True):
        runner.submit(Request(tokens=np.resize(first.tokens, length), max_new_tokens=3, sampler=sampler))
    assert len(list(runner)) == 2
    compiled = []
    listener = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for request in others:
            runner.submit(request)
        assert len(list(runner)) == REQUESTS - 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled


@pytest.mark.sampled(0)
def test_rows_are_used_and_the_host_seldom_reads():
    """Requests of all lengths are run as long as some wait, in the same memory at any time."""
    rng = np.random.default_rng(1)
    runner = runner_for("h2o", rows=16, stop=(), limits=Limits(prompt=64, new_tokens=120))
    held = []
    for _ in range(3):
        for _ in range(60):
            tokens = rng.integers(4, VOCAB, rng.integers(5, 64))
            runner.submit(Request(tokens=tokens, max_new_tokens=int(rng.integers(1, 121))))
        while runner.load.waiting > 16:
            runner.step()
        held.append(sum(array.nbytes for array in jax.live_arrays()))
    counts = runner.counts
    assert counts.requests > 100
    assert counts.useful_row_steps / counts.row_steps > 0.9
    assert counts.useful_row_steps / counts.reads > 64
    assert max(held) < 1.1 * held[0]


def test_cancelled_requests_leave_the_others_as_they_are():
    runner = runner_for("h2o", chunk=2, stop=())
    ids = [runner.submit(Request(tokens=request.tokens, max_new_tokens=20)) for request in requests()[:20]]
    runner.step()
    running, waiting = ids[1], ids[19]
    assert runner.cancel(running) and runner.cancel(waiting) and not runner.cancel(running) and not runner.cancel(99)
    found = {result.id: result for result in runner}
    assert found[running].reason == found[waiting].reason == "cancelled"
    assert 0 < len(found[running].tokens) < 20 and not len(found[waiting].tokens)
    again = runner_for("h2o", stop=())
    for request in requests()[:20]:
        again.submit(Request(tokens=request.tokens, max_new_tokens=20))
    whole = {result.id: result for result in again}
    for number in ids:
        tokens = found[number].tokens
        np.testing.assert_array_equal(tokens, whole[number].tokens[: len(tokens)])
        assert len(tokens) == 20 or number in (running, waiting)
    assert runner.idle and runner.load.running == 0


def test_the_host_may_end_a_request():
    seen = []

    def until(tokens):
        seen.extend(tokens)
        return 3 - (len(seen) - len(tokens)) if len(seen) >= 3 else None

    runner = runner_for("h2o", stop=(), chunk=2)
    number = runner.submit(Request(tokens=[5, 6, 7], max_new_tokens=20, until=until))
    (result,) = runner
    assert (result.id, result.reason) == (number, "stop")
    np.testing.assert_array_equal(result.tokens, seen[:3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "at least one token"),
        ({"tokens": [VOCAB]}, "outside the model's vocabulary"),
        ({"tokens": [1] * (LONGEST + 1)}, "prompts must have 1 to 90 tokens"),
        ({"max_new_tokens": 25}, "at most 24 new ones"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"stop": range(MAX_STOPS + 1)}, "at most 16 token ids"),
        ({"seed": 1 << 32}, "seed must be a whole number from 0 to 4294967295"),
        ({"number": -1}, "number must be"),
        ({"sampler": lambda logits, keys: logits}, "kvjax.Greedy or kvjax.Sample"),
    ],
)
def test_requests_that_cannot_work(change, message):
    runner = runner_for("h2o")
    with pytest.raises(InputError, match=message):
        runner.submit(Request(**({"tokens": [1, 2, 3, 4], "max_new_tokens": 2} | change)))
    assert runner.idle


def test_a_budget_that_cannot_work_is_refused_when_its_prompt_comes():
    spec = policies.roco(0.5, protect=4)
    runner = Runner(model_for("h2o"), spec, rows=1, limits=LIMITS)
    with pytest.raises(PolicyError, match="protect"):
        runner.submit(Request(tokens=[1, 2], max_new_tokens=1))


def test_the_first_tokens_of_an_early_request_come_before_a_whole_chunk():
    """Also of one that joins others; and they are the tokens that they are otherwise."""
    asked = dataclasses.replace(requests()[0], max_new_tokens=20, stop=(), seed=7)
    runner, sizes, tokens = runner_for("h2o", chunk=16), {}, []
    runner.submit(asked)
    runner.submit(dataclasses.replace(asked, early=True))
    while not runner.idle:
        for progress in runner.step():
            sizes.setdefault(progress.id, []).append(len(progress.tokens))
            tokens += [] if progress.result is None else [progress.result.tokens.tolist()]
        if len(sizes) == 2 and runner.load.running == 2 and 2 not in sizes:
            sizes[runner.submit(dataclasses.replace(asked, early=True))] = []
    assert sizes[1][0] == sizes[2][0] == 2 and max(map(max, sizes.values())) == 16
    assert len(tokens) == 3 and tokens[0] == tokens[1] == tokens[2]
