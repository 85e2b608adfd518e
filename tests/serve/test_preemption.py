"""Rows that others take: a request whose state waited in host memory goes on as if it had stayed."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import contexts, policies, selection, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.layer_stack import stacked_runs
from kvjax.errors import InputError
from kvjax.generation.sampling import Sample
from kvjax.serve import Request, Runner, decode_loop
from kvjax.serve.preemption import SwapSpace
from kvjax.serve.swap import row_bytes, swap_in, swap_out
from tests.tiny import VOCAB, in_stacks, tiny

STATES = {
    "stacked layers, row memory": CacheSpec(policies.rkv(8)),
    "blocks of codes": CacheSpec(policies.full(), storage.kivi()),
    "codes on the host": CacheSpec(policies.h2o(9), storage.int4(memory="host")),
    "index of pages": CacheSpec(policies.full(), selection=selection.quest(page=4, budget=8)),
}
PROMPT, NEW = 24, 20


@functools.cache
def prompts() -> np.ndarray:
    return np.random.default_rng(3).integers(4, VOCAB, (3, PROMPT))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STATES)
def test_a_row_in_another_place_is_equal_to_the_bit(name):
    """Every array of a cache moves, and so do random keys; the other rows stay as they are."""
    model = in_stacks(tiny(layers=2).model) if "stacked" in name else tiny(layers=2).model
    context = contexts.prefill(model, prompts(), STATES[name])
    assert bool(stacked_runs(context.state.layers)) == ("stacked" in name)
    batch = (context.state, jax.random.split(jax.random.key(0), 3))
    before = [_numbers(leaf) for leaf in jax.tree.leaves(batch)]
    held = swap_out(batch, 0)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(held)} == {"pinned_host"}
    assert row_bytes(batch) == sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    memories = [leaf.sharding for leaf in jax.tree.leaves(batch)]
    moved = swap_in(batch, 2, held)
    assert [leaf.sharding for leaf in jax.tree.leaves(moved)] == memories
    for leaf, old in zip(jax.tree.leaves(moved), before, strict=True):
        np.testing.assert_array_equal(_numbers(leaf), old[[0, 1, 0]])


def _numbers(leaf):
    keys = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if keys else leaf)


def runner_for(**options):
    spec = CacheSpec(policies.h2o(9), storage.int8())
    limits = Limits(prompt=PROMPT, new_tokens=NEW)
    return Runner(tiny(layers=1).model, spec, rows=2, limits=limits, chunk=4, key=jax.random.key(9), **options)


def requests(priorities):
    """A request for each priority, every second one sampled."""
    return [
        Request(
            tokens=prompts()[number % 3], max_new_tokens=NEW, number=number, priority=priority,
            sampler=Sample(temperature=1.3) if number % 2 else None,
        )
        for number, priority in enumerate(priorities)
    ]  # fmt: skip


@functools.cache
def undisturbed():
    """The results of six requests that never lose their rows."""
    runner = runner_for()
    for request in requests([0] * 6):
        runner.submit(request)
    return {result.id: result for result in runner}


def test_the_more_urgent_request_takes_a_row():
    """By priority, then in the order of arrival; and all results are those of requests that are not disturbed."""
    runner = runner_for()
    first = requests([0, 1, 0, 5, 1, 7])
    for request in first[:3]:
        runner.submit(request)
    runner.step()
    assert runner.load.running == 2 and runner.load.waiting == 1 and not runner.load.swapped
    programs = decode_loop.decode_chunk._cache_size()
    for request in first[3:]:
        runner.submit(request)
    ended, most = [], 0
    for progress in runner.stream():
        load = runner.load
        most = max(most, load.swapped)
        assert (load.swapped_bytes > 0) == (load.swapped > 0) and load.waiting >= load.swapped
        if progress.result is not None:
            ended.append(progress.result)
    # Of the first two, which had run, the one of higher priority goes on before request 4.
    ids = [result.id for result in ended]
    assert {*ids[:2]} == {3, 5} and ids[2:] == [1, 4, 0, 2] and most == 2
    assert runner.counts.preemptions == 2 and runner.load.swapped_bytes == 0
    assert runner.counts.swapped_bytes == 2 * row_bytes(runner._rows)
    assert decode_loop.decode_chunk._cache_size() == programs, "rows that have come back need no other program"
    for result in ended:
        own = undisturbed()[result.id]
        np.testing.assert_array_equal(result.tokens, own.tokens)
        np.testing.assert_array_equal(result.logprobs, own.logprobs)
        assert result.reason == own.reason


def test_slots_and_statistics_are_those_of_a_row_that_never_moved():
    """A request loses the second row, and comes back into the first one when the request there has ended."""
    first, second, urgent = requests([0, 0, 1])
    calm, disturbed = runner_for(), runner_for()
    for runner in (calm, disturbed):
        runner.submit(dataclasses.replace(first, max_new_tokens=10))
        runner.submit(second)
        runner.step()
    disturbed.submit(urgent)
    for runner, count in ((calm, 2), (disturbed, 3)):
        assert len([*runner]) == count
    assert disturbed.counts.preemptions == 1
    for one, two in zip(*(jax.tree.leaves(runner._rows.state) for runner in (calm, disturbed)), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[1], np.asarray(two)[0])


def test_no_row_is_taken_without_room_or_by_an_equal():
    for options, priorities in ({"swap_bytes": 0}, [0, 0, 9]), ({}, [3, 3, 3]):
        runner = runner_for(**options)
        for request in requests(priorities)[:2]:
            runner.submit(request)
        runner.step()
        runner.submit(requests(priorities)[2])
        assert [result.id for result in runner] == [0, 1, 2] and not runner.counts.preemptions


@pytest.mark.parametrize("fitting", [0, 1])
def test_states_that_are_ready_are_bounded(fitting):
    """However urgent those are that still wait, and however many rows they could take if there were room."""
    runner = runner_for(refill=1)
    for request in requests([0, 0]):
        runner.submit(request)
    runner.step()
    runner._swapped = SwapSpace(fitting * row_bytes(runner._rows))
    most = 0
    for priority in range(1, 7):
        runner.submit(requests([1 if fitting else priority])[0])
        runner._intake.begin_turn()
        runner._run_prompts()
        most = max(most, len(runner._intake._ready))
    # One to refill a row; and one for the row that is taken, or one that is more urgent than the first.
    assert most == 2
    assert len([*runner]) == 8 and runner.counts.preemptions == fitting


def test_a_request_without_its_row_can_be_cancelled():
    runner = runner_for()
    *lower, high = requests([0, 1, 2])
    for request in lower:
        runner.submit(request)
    runner.step()
    urgent = runner.submit(high)
    while not runner.load.swapped:
        runner.step()
    assert runner.cancel(0) and not runner.load.swapped and not runner.load.swapped_bytes
    found = {result.id: result for result in runner}
    assert found[0].reason == "cancelled" and found[urgent].reason == "length"
    count = len(found[0].tokens)
    assert 0 < count < NEW
    np.testing.assert_array_equal(found[0].tokens, undisturbed()[0].tokens[:count])


def test_what_is_refused():
    with pytest.raises(InputError, match="swap_bytes must be a whole number of bytes"):
        runner_for(swap_bytes=-1)
    with pytest.raises(InputError, match="priority must be a whole number"):
        runner_for().submit(Request(tokens=[4], max_new_tokens=1, priority=0.5))
    runner = runner_for()
    for wrong, message in ({"namespace": ["a"]}, "namespace must be a value with"), ({"prefix": "a"}, "prefix must be"):
        with pytest.raises(InputError, match=message):
            runner.submit(Request(tokens=[4], max_new_tokens=1, **wrong))
    assert runner.idle
    with pytest.raises(InputError, match=r"prefix_store must be kvjax\.PrefixStore"):
        runner_for(prefix_store=1 << 30)
    assert kvjax.serve.Request(tokens=[4], max_new_tokens=1).priority == 0


@pytest.mark.sampled(0)
def test_a_more_urgent_prompt_overtakes_one_whose_blocks_are_run():
    """Its blocks come first, and those of the other one go on afterwards; no more than two prompts hold a cache."""
    options = {"prefill_block": 8, "turn_tokens": 8, "swap_bytes": 0}
    spec, limits = CacheSpec(policies.full()), Limits(prompt=PROMPT, new_tokens=NEW)
    asked = [dataclasses.replace(request, max_new_tokens=2) for request in requests([0, 0, 1, 2])]
    asked[0] = dataclasses.replace(asked[0], tokens=prompts()[0, :5], max_new_tokens=NEW)
    ended, results = [], []

    def step(runner):
        return [progress.result for progress in runner.step() if progress.result is not None]

    for overtaken in (False, True):
        runner = Runner(tiny(layers=1).model, spec, rows=3, limits=limits, chunk=1, **options)
        runner.submit(asked[0])
        runner.step()
        for request in asked[1:]:
            runner.submit(request)
            results += step(runner)  # a block of the prompt
            assert len(runner._intake._begun) <= 2
            if not overtaken:
                results += runner
        found = [*runner]
        ended.append([result.id for result in found])
        results += found
    assert [each for each in ended[1] if each] == [2, 3, 1], ended
    by_id = {number: [result for result in results if result.id == number] for number in range(4)}
    for one, two in by_id.values():
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.logprobs, two.logprobs)


@pytest.mark.sampled(0)
def test_a_prompt_that_has_begun_takes_a_row_when_it_ends():
    """Also where a less urgent one is ready and would be the next."""
    options = {"prefill_block": 8, "turn_tokens": 8}
    spec, limits = CacheSpec(policies.full()), Limits(prompt=PROMPT, new_tokens=NEW)
    runner = Runner(tiny(layers=1).model, spec, rows=1, limits=limits, chunk=1, **options)
    running, ready, urgent = requests([0, 0, 1])
    runner.submit(dataclasses.replace(running, tokens=prompts()[0, :5]))
    runner.step()
    runner.submit(dataclasses.replace(ready, tokens=prompts()[1, :5]))
    runner.step()
    runner.submit(dataclasses.replace(urgent, max_new_tokens=2))
    assert [result.id for result in runner] == [2, 0, 1] and runner.counts.preemptions == 1
