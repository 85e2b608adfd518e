"""Whole numbers beyond int32 in every argument of generation, serving and limits: refused before anything is traced."""

import numpy as np
import pytest

import kvjax
from kvjax import policies, selection, storage
from kvjax.errors import InputError, KvjaxError
from kvjax.generation.prefill import prefill
from kvjax.inputs import LARGEST_COUNT
from kvjax.serve import Request, Runner

TOKENS = np.arange(3, 13)[None]
FULL = policies.full()
LIMITS = kvjax.Limits(32, 8)


@pytest.fixture(scope="module")
def model():
    return kvjax.load("kvjax-tiny")


def generate(model, policy=FULL, **options):
    return kvjax.generate(model, TOKENS, policy, **{"max_new_tokens": 1} | options)


def runner(model, limits=LIMITS, **options):
    return Runner(model, FULL, limits=limits, **{"rows": 1} | options)


def submit(model, **options):
    return runner(model).submit(Request(**{"tokens": [1, 2], "max_new_tokens": 2} | options))


#: Arguments that are refused as InputError.
ARGUMENTS = {
    "max_new_tokens": lambda m, v: generate(m, max_new_tokens=v),
    "max_new_tokens of a window": lambda m, v: generate(m, policies.window(32), max_new_tokens=v),
    "max_new_tokens of texts": lambda m, v: kvjax.generate_text(m, "One", FULL, max_new_tokens=v),
    "max_new_tokens of prefill": lambda m, v: prefill(m, TOKENS, FULL, max_new_tokens=v),
    "prefill_block": lambda m, v: generate(m, prefill_block=v),
    "stop": lambda m, v: generate(m, stop=v),
    "stop, several": lambda m, v: generate(m, stop=[3, v]),
    "requests": lambda m, v: generate(m, requests=[v]),
    "lengths": lambda m, v: generate(m, lengths=[v]),
    "tokens": lambda m, v: kvjax.generate(m, [[1, v]], FULL, max_new_tokens=1),
    "top_k": lambda m, v: kvjax.Sample(top_k=v),
    "limits.prompt": lambda m, v: kvjax.Limits(v, 8),
    "limits.new_tokens": lambda m, v: kvjax.Limits(32, v),
    "limits.shortest": lambda m, v: kvjax.Limits(32, 8, v),
    "prompt_length": lambda m, v: kvjax.log_likelihood(m, TOKENS, FULL, prompt_length=v),
    "prefill_block of scoring": lambda m, v: kvjax.log_likelihood(m, TOKENS, FULL, prompt_length=5, prefill_block=v),
    "rows": lambda m, v: runner(m, rows=v),
    "chunk": lambda m, v: runner(m, chunk=v),
    "refill": lambda m, v: runner(m, refill=v),
    "turn_tokens": lambda m, v: runner(m, turn_tokens=v),
    "prefill_block of a runner": lambda m, v: runner(m, prefill_block=v),
    "stop of a runner": lambda m, v: runner(m, stop=[v]),
    "max_new_tokens of a request": lambda m, v: submit(m, max_new_tokens=v),
    "tokens of a request": lambda m, v: submit(m, tokens=[1, v]),
    "stop of a request": lambda m, v: submit(m, stop=[v]),
    "number of a request": lambda m, v: submit(m, number=v),
}
#: Those of what a policy, storage or selection is made of, which have errors of their own.
PARTS = {
    "slots": lambda v: policies.h2o(v),
    "sinks": lambda v: policies.window(8, sinks=v),
    "recent": lambda v: policies.h2o(8, recent=v),
    "window": lambda v: policies.snapkv(8, window=v),
    "residual": lambda v: storage.int8(residual=v),
    "group": lambda v: storage.int4(group=v),
    "budget": lambda v: selection.quest(16, v),
    "page": lambda v: selection.quest(v, 64),
}
TOO_LARGE = [2**31, np.int64(2**31), 2**32, 2**63, 10**30, 10**5000]


@pytest.mark.sampled(52)
@pytest.mark.parametrize("value", TOO_LARGE, ids=lambda value: f"about 2^{int(value).bit_length() - 1}")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name, value, model):
    with pytest.raises(InputError) as caught:
        ARGUMENTS[name](model, value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("value", TOO_LARGE, ids=lambda value: f"about 2^{int(value).bit_length() - 1}")
@pytest.mark.parametrize("name", PARTS)
def test_parts(name, value):
    with pytest.raises(KvjaxError) as caught:
        PARTS[name](value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("seed", [2**32, 2**63, 10**5000, -1], ids=["2^32", "2^63", "10^5000", "-1"])
def test_seeds(seed, model):
    with pytest.raises(InputError, match=r"seed must be a whole number from 0 to 4294967295"):
        submit(model, seed=seed)


def test_sizes_that_are_rounded_up_fit_too(model):
    """The largest number of tokens is a power of two, so that sizes which are rounded up to one are still int32."""
    assert LARGEST_COUNT & (LARGEST_COUNT - 1) == 0 and np.iinfo(np.int32).max >= 2 * LARGEST_COUNT - 1
    with pytest.raises(InputError, match=f"max_new_tokens must be at most {LARGEST_COUNT}; got 2147483647"):
        generate(model, max_new_tokens=2**31 - 1)
    kvjax.Limits(LARGEST_COUNT, LARGEST_COUNT)
