"""Products with the slots of a cache that are in use: the others are not read, and change no bit of a result."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, products, storage
from kvjax.cache import Limits
from kvjax.products import native
from kvjax.products.codes import codes_product
from kvjax.products.forms import CACHE_DTYPES, dot
from kvjax.products.used_slots import attend_slots, slots_product
from kvjax.serve import Request, Runner
from kvjax.storage import Fp8, Integer, TurboQuant
from tests.tiny import random_tokens, tiny

if native.load():
    pytest.skip(native.load(), allow_module_level=True)

SHAPES = [(1, 37, 24), (2, 960, 64), (7, 513, 80), (9, 600, 3)]  # rows, slots, features
IDS = ["values", "keys"]
TILE = 64  # slots of codes that are read together; see kTile in codes.cc


def operands(rows, count, dim, transposed, dtype="float32"):
    """Rows, three caches whose unused slots are NaN, and how many slots they use: none, some and all."""
    rng = np.random.default_rng(count)
    used = np.array([0, count // 2 + 1, count], np.int32)
    cache = rng.standard_normal((3, count, dim))
    cache[np.arange(count) >= used[:, None]] = np.nan
    x = rng.standard_normal((3, rows, dim if transposed else count))
    return jnp.asarray(x, jnp.float32), jnp.asarray(cache, dtype), jnp.asarray(used)


def run(x, cache, used, transposed):
    return np.asarray(slots_product(x, cache, used, transposed, jnp.float32))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transposed", [False, True], ids=IDS)
def test_the_first_slots_are_multiplied_and_no_others_are_read(transposed, width):
    for rows, count, dim in SHAPES:
        for dtype in CACHE_DTYPES:
            x, cache, used = operands(rows, count, dim, transposed, dtype)
            got = run(x, cache, used, transposed)
            for number, live in enumerate(np.asarray(used)):
                one, own = np.asarray(x[number], np.float64), np.asarray(cache[number, :live], np.float64)
                expected = one @ own.T if transposed else one[:, :live] @ own
                expected = np.pad(expected, ((0, 0), (0, count - live))) if transposed else expected
                np.testing.assert_allclose(got[number], expected, atol=1e-6 * count, err_msg=f"{rows} {count} {dim}")


@pytest.mark.parametrize("transposed", [False, True], ids=IDS)
@pytest.mark.parametrize("shape", [(16, 64, 64), (20, 52, 63)], ids=str)
def test_every_number_in_float16_is_read_as_it_is(shape, transposed, width):
    """Subnormal ones too, which a processor may be set to take for 0."""
    count, slots, dim = shape
    # [count, S, D]
    held = np.arange(np.prod(shape), dtype=np.uint16).view(np.float16).reshape(shape)
    held = np.where(np.isfinite(held), held, np.float16(0))
    rows = jnp.broadcast_to(jnp.eye(dim if transposed else slots), (count, *[dim if transposed else slots] * 2))
    got = run(rows, jnp.asarray(held), jnp.full(count, slots, jnp.int32), transposed)
    np.testing.assert_array_equal(np.swapaxes(got, 1, 2) if transposed else got, held)


@pytest.mark.parametrize("transposed", [False, True], ids=IDS)
def test_no_bit_depends_on_what_else_there_is(transposed, width):
    """On the number of slots that are allocated, of caches, and of rows."""
    x, cache, used = operands(7, 700, 80, transposed)
    whole = run(x, cache, used, transposed)
    live = int(used[1])
    np.testing.assert_array_equal(run(x[1:2], cache[1:2], used[1:2], transposed)[0], whole[1])
    np.testing.assert_array_equal(run(x[:, 2:5], cache, used, transposed), whole[:, 2:5])
    short = run(x if transposed else x[..., :live], cache[:, :live], jnp.minimum(used, live), transposed)[1]
    np.testing.assert_array_equal(short, whole[1, :, :live] if transposed else whole[1])


@pytest.mark.parametrize("transposed", [False, True], ids=IDS)
def test_gradients(transposed):
    x, cache, used = operands(2, 40, 16, transposed)
    cache = jnp.nan_to_num(cache)
    live = (jnp.arange(40) < used[:, None]).astype(jnp.float32)[:, None]

    def plain(x, cache):
        return dot(x, cache, True, jnp.float32) * live if transposed else dot(x * live, cache, False, jnp.float32)

    def gradient(function):
        return jax.grad(lambda x, cache: jnp.sum(jnp.sin(function(x, cache))), (0, 1))(x, cache)

    own = gradient(lambda x, cache: slots_product(x, cache, used, transposed, jnp.float32))
    for got, expected in zip(own, gradient(plain), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def attention(rows, count, dim, dtype="float32", queries=1):
    """Queries, keys and values whose unused slots are NaN, and the slots that are seen: none, some and the last one."""
    query, key, used = operands(rows, count, dim, True, dtype)
    seen = np.random.default_rng(dim).random((3, queries, count)) < 0.7
    seen[np.arange(3), -1, np.asarray(used) - 1] = True
    seen &= np.arange(count) < np.asarray(used)[:, None, None]
    return 3 * query, key, key[..., ::-1], jnp.asarray(seen), used


@pytest.mark.sampled(2)
@pytest.mark.parametrize("queries", [1, 5])
def test_attention_is_that_of_the_slots_that_are_seen(queries, width):
    for heads, count, dim in SHAPES:
        rows = heads if queries == 1 else heads % 4 * queries + queries
        for dtype in CACHE_DTYPES:
            query, key, value, seen, used = attention(rows, count, dim, dtype, queries)
            output, lse = attend_slots(query, key, value, seen, used, 0.5)
            np.testing.assert_array_equal(output[0], 0)
            np.testing.assert_array_equal(lse[0], -np.inf)
            for number, row in itertools.product((1, 2), range(rows)):
                own = np.asarray(seen[number, row % queries])
                keys, values = (np.asarray(x[number], np.float64)[own] for x in (key, value))
                logits = 0.5 * keys @ np.asarray(query[number, row], np.float64)
                top = logits.max(initial=-1e30)
                weight = np.exp(logits - top)
                if not own.any():
                    np.testing.assert_array_equal(output[number, row], 0)
                    np.testing.assert_array_equal(lse[number, row], -np.inf)
                    continue
                np.testing.assert_allclose(output[number, row], weight @ values / weight.sum(), atol=2e-5)
                np.testing.assert_allclose(lse[number, row], np.log(weight.sum()) + top, rtol=2e-6)


def test_no_bit_of_attention_depends_on_what_else_there_is(width):
    query, key, value, seen, used = attention(7, 700, 80)
    whole, live = attend_slots(query, key, value, seen, used, 0.1), int(used[1])
    short = attend_slots(
        query[1:2, 2:5], key[1:2, :live], value[1:2, :live], seen[1:2, :, :live], used[1:2], 0.1
    )  # fmt: skip
    for one, other in zip(whole, short, strict=True):
        np.testing.assert_array_equal(one[1, 2:5], other[0])


@pytest.mark.parametrize("dim", [64, 80, 20])
def test_a_query_of_a_block_gets_the_bits_that_it_gets_alone(dim, width):
    queries = 5
    query, key, value, seen, used = attention(3 * queries, 700, dim, queries=queries)
    whole = attend_slots(query, key, value, seen, used, 0.1)
    for place in range(queries):
        own = seen[:, place : place + 1]
        last = jnp.max(jnp.where(own, jnp.arange(1, 701), 0), axis=(1, 2)).astype(jnp.int32)
        alone = attend_slots(query[:, place::queries], key, value, own, last, 0.1)
        for one, other in zip(whole, alone, strict=True):
            np.testing.assert_array_equal(one[:, place::queries], other)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_of_attention(queries, dtype):
    query, key, value, seen, used = attention(4, 40, 16, dtype, queries=queries)
    key, value = jnp.nan_to_num(key), jnp.nan_to_num(value)
    # [3, 4, 40]
    mask = jnp.tile(seen, (1, 4 // queries, 1))

    def plain(query, key, value):
        key, value = key.astype(jnp.float32), value.astype(jnp.float32)
        logits = jnp.where(mask, 0.5 * dot(query, key, True, jnp.float32), -1e30)
        return dot(jnp.where(mask, jax.nn.softmax(logits), 0.0), value, False, jnp.float32)

    def gradient(function):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2))(query, key, value)

    own = gradient(lambda *x: attend_slots(*x, seen, used, 0.5)[0])
    atol = 1e-5 if dtype == "float32" else 2e-3
    for got, expected in zip(own, gradient(plain), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, atol=atol)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transposed", [False, True], ids=IDS)
@pytest.mark.parametrize("codec", [Integer(8, 64), Integer(4, 16), Fp8(), TurboQuant(2)], ids=repr)
def test_codes_of_the_slots_in_use_are_multiplied_and_no_others_are_read(codec, transposed, width):
    """Slots of another tile than those in use may hold anything, and change no bit, whatever is allocated."""
    rng, rows, count, dim = np.random.default_rng(1), 5, 2100, 64
    used = np.array([0, 130, 2049, count], np.int32)
    vectors = rng.standard_normal((4, count, dim))
    # [4, 1, S]
    live = (np.arange(count) < used[:, None])[:, None]
    x = rng.standard_normal((4, rows, dim)) if transposed else np.where(live, rng.standard_normal((4, rows, count)), 0)
    parts = codec.encode(jnp.asarray(vectors, jnp.float32), None, jnp.float32)
    # [4, S]
    read = np.arange(count) < -(-used // TILE)[:, None] * TILE

    def spoiled(part):
        known = read.reshape(*read.shape, *(1,) * (part.ndim - 2))
        return jnp.where(known, part, 255 if part.dtype == jnp.uint8 else jnp.nan)

    def run(x, parts, used):
        own = codec.affine(parts, None, dim)
        return np.asarray(codes_product(jnp.asarray(x, jnp.float32), own, transposed=transposed, used=used))

    whole = run(x, parts, None)
    got = run(x, jax.tree.map(spoiled, parts), jnp.asarray(used))
    np.testing.assert_array_equal(got, np.where(read[:, None], whole, 0) if transposed else whole)
    # One cache and three rows, of which no more is allocated than is used.
    short = run(
        x[1:2, 1:4] if transposed else x[1:2, 1:4, :130], {n: each[1:2, :130] for n, each in parts.items()}, None
    )
    np.testing.assert_array_equal(short[0], got[1, 1:4, :130] if transposed else got[1, 1:4])


PROMPT, NEW = random_tokens(1, 9, seed=1)[0], 6


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "held", [storage.dense(), storage.fp16(), storage.int8(), storage.turboquant(4)], ids=lambda held: held.name
)
def test_attention_does_not_depend_on_the_allocated_slots(native_attention, held):
    """Nor on the batch: the same tokens and log-probabilities, bit for bit."""
    model = tiny(layers=1).model
    # Other products are of other numbers of rows, and rounded by them.
    batch = np.stack([PROMPT, random_tokens(1, 9, seed=2)[0]])
    few, many = (
        kvjax.generate(
            model, batch, policies.full(), storage=held, max_new_tokens=NEW, limits=Limits(prompt=9, new_tokens=room)
        )
        for room in (NEW, 400)
    )
    np.testing.assert_array_equal(few.tokens, many.tokens)
    np.testing.assert_array_equal(few.logprobs, many.logprobs)
    products.use("fixed")
    plain = kvjax.generate(model, batch, policies.full(), storage=held, max_new_tokens=NEW)
    np.testing.assert_array_equal(plain.tokens, few.tokens)
    np.testing.assert_allclose(plain.logprobs, few.logprobs, atol=1e-5)


def test_a_request_does_not_depend_on_its_neighbours(native_attention):
    """A short request has the same bits alone and beside a long one, by one program."""
    limits, found, compiled = Limits(prompt=40, new_tokens=60), [], []
    listener = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    for others in ([60], [], [17, 33]):
        runner = Runner(tiny(layers=1).model, policies.full(), rows=4, limits=limits)
        number = runner.submit(Request(tokens=PROMPT, max_new_tokens=NEW))
        for tokens in others:
            runner.submit(Request(tokens=random_tokens(1, 30, seed=tokens)[0], max_new_tokens=tokens))
        found += [result for result in runner if result.id == number]
        if len(found) == 1:
            jax.monitoring.register_event_duration_secs_listener(listener)
    jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].tokens, other.tokens)
        np.testing.assert_array_equal(found[0].logprobs, other.logprobs)
