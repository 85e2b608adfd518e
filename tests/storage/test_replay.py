"""Storages in the cache's own step: the worked cases, and the law that a step equals one on what was stored."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, storage
from kvjax.errors import InputError, KvjaxError


@pytest.fixture(scope="module")
def examples(shared_data):
    return np.load(shared_data / "examples" / "storage_cases.npz")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [11, 12])
def test_slots_under_a_policy(examples, case):
    about = json.loads(bytes(examples["cases"]))[case]
    arrays = {
        name: [jnp.asarray(examples[f"{case}_{kind}_{name}"]) for kind in ("query", "key", "value")]
        for name in ("prompt", "decode")
    }
    lengths = examples[f"{case}_lengths"]
    held = storage.integer(about["bits"], about["group"], residual=about["residual"])
    arguments = dict(about["policy"])
    policy = policies.by_name(arguments.pop("name"), **arguments)
    out, layer = storage.replay(held, arrays["prompt"], arrays["decode"], lengths, policy)
    np.testing.assert_allclose(out, examples[f"{case}_out"], atol=1e-4)
    position = np.asarray(layer.position)
    for row in range(position.shape[0]):
        for head in range(position.shape[1]):
            live = np.sort(position[row, head][position[row, head] >= 0])
            np.testing.assert_array_equal(live, examples[f"{case}_kept_{row}_{head}"])


def test_a_block_of_no_tokens_is_refused():
    given = (np.zeros((1, 2, 4, 8), np.float32),) * 3
    with pytest.raises(InputError, match="prefill_block must be a whole number of at least 1; got 0"):
        storage.replay(storage.int8(), given, given, np.array([4]), prefill_block=0)


def test_arguments_of_another_kind_are_refused():
    given = (np.zeros((1, 2, 4, 8), np.float32),) * 3
    with pytest.raises(KvjaxError, match=r"storage='int4' is not a Storage"):
        storage.replay("int4", given, given, np.array([4]))
    with pytest.raises(InputError, match=r"lengths must be whole numbers, one per row; got \[3.5\]"):
        storage.replay(storage.int8(), given, given, np.array([3.5]))
    with pytest.raises(InputError, match="prompt must be of floats; got int32"):
        storage.replay(storage.int8(), tuple(x.astype(np.int32) for x in given), given, np.array([4]))


@pytest.mark.parametrize("held", [storage.kivi(2, 4, 16), storage.gear(4, 16, rank=2)], ids=lambda held: held.name)
def test_a_layer_without_a_full_block_is_read_as_it_is(held):
    rng = np.random.default_rng(1)
    prompt, new = (tuple(rng.normal(size=(1, 2, n, 8)).astype(np.float32) for _ in range(3)) for n in (6, 3))
    _, layer = storage.replay(held, prompt, new, np.array([6]))
    for got, given in zip(storage.read(held, layer), zip(prompt[1:], new[1:], strict=True), strict=False):
        np.testing.assert_array_equal(got, np.concatenate(given, axis=2))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("held", [storage.kivi(2, 2, 4), storage.gear(4, 4, rank=2), storage.sparse(storage.int4(), 1)])
def test_the_largest_numbers_of_float16_stay_finite(held):
    """Decoded values may exceed float16's largest number by an error of rounding, and are limited."""
    rng = np.random.default_rng(2)
    signs = [rng.choice([-65504.0, 65504.0, 1.0], size=(1, 2, 12, 8)) for _ in range(2)]
    prompt, new = (
        tuple(jnp.asarray(x[:, :, own], jnp.float16) for x in (0 * signs[0], *signs))
        for own in (slice(9), slice(9, 12))
    )
    output, _ = storage.replay(held, prompt, new, np.array([9]))
    assert np.isfinite(np.asarray(output, np.float32)).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("sinks", "residual"), [(8, 0), (1, 7), (3, 6)])
def test_sinks_and_the_newest_may_be_all_there_is(sinks, residual):
    """Then nothing is coded, and a step is one on exact slots."""
    held = storage.Storage(key=storage.Integer(4), value=storage.Integer(4), sinks=sinks, residual=residual)
    rng = np.random.default_rng(0)
    prompt, new = (tuple(rng.normal(size=(1, 2, n, 8)).astype(np.float32) for _ in range(3)) for n in (6, 2))
    exact, coded = (storage.replay(each, prompt, new, np.array([6]))[0] for each in (storage.dense(), held))
    np.testing.assert_array_equal(coded, exact)
