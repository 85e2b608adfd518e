"""KVTC: principal components in as few bits as a ratio allows, exact ends, and what is refused."""

import itertools

import jax
import numpy as np
import pytest

from kvjax import contexts, policies, transport
from kvjax.cache import CacheSpec
from kvjax.cache.layer_stack import arranged_state
from kvjax.errors import CheckpointError, InputError
from kvjax.transport import transform, vectors
from tests.tiny import random_tokens, tiny


def context_of(policy=None, lengths=(60, 47), layers=2):
    rows = [random_tokens(1, length, seed=length)[0] for length in lengths]
    return contexts.prefill(tiny(layers=layers).model, rows, policy or policies.full(), room=80)


@pytest.fixture(scope="module")
def fitted():
    """A transform that was computed from other texts."""
    return transport.fit_transform([context_of(lengths=(64, 50)), context_of(lengths=(55,))], ratio=4)


def test_bits_have_the_least_error():
    """Brute force over all ways to divide 16 · n / ratio bits."""
    rng = np.random.default_rng(0)
    for ratio in (4.0, 8.0, 20.0):
        errors = np.sort(rng.random((4, len(transform.BITS))), axis=1)[:, ::-1]
        budget = 16 * 4 / ratio
        least = min(
            sum(errors[number, place] for number, place in enumerate(each))
            for each in itertools.product(range(len(transform.BITS)), repeat=4)
            if sum(transform.BITS[place] for place in each) <= budget
        )
        found = transform.divide_bits(errors, ratio)
        assert sum(transform.BITS[place] for place in found) <= budget
        assert errors[np.arange(4), found].sum() == pytest.approx(least)


def test_a_transform_is_of_orthonormal_components_of_falling_variance(fitted):
    for own in itertools.chain(*fitted.layers):
        np.testing.assert_allclose(own.basis.T @ own.basis, np.eye(16), atol=1e-5)
    used = np.concatenate([own.bits for own in itertools.chain(*fitted.layers)])
    assert used.mean() <= 16 / fitted.ratio and used.max() > used.min()
    # Components of more variance have at least as many bits.
    for own in itertools.chain(*fitted.layers):
        assert (np.diff(own.bits) <= 0).mean() > 0.8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [None, policies.window(30, sinks=2), policies.full(positions="cache")])
def test_a_message_has_what_the_codes_say(fitted, policy):
    context = context_of(policy)
    model, codec = context.made.model, transport.KVTC(fitted, sinks=3, recent=7, chunk=25)
    data = transport.encode(context, codec=codec)
    found = transport.decode(data, model, codec=codec)
    read, other = vectors.by_token(context), vectors.by_token(found)
    for layer, (rows, decoded) in enumerate(zip(read, other, strict=True)):
        for own, made in zip(rows, decoded, strict=True):
            np.testing.assert_array_equal(made.position, own.position)
            for side in range(2):
                part = fitted.layers[layer][side]
                y = (own.sides[side] - part.mean) @ part.basis
                codes = transform.quantised(y, part.step, transform.limits_of(part.bits))
                expected = (codes * part.step) @ part.basis.T + part.mean
                expected[:3], expected[-7:] = own.sides[side][:3], own.sides[side][-7:]
                # Keys of the first and newest tokens are equal as they are held, and close before rotation.
                np.testing.assert_allclose(made.sides[side], expected, atol=1e-4)
    for one, two in zip(*(arranged_state(each.state, ()).layers[0] for each in (context, found)), strict=True):
        at = np.asarray(one.position)
        exact = (at >= 0) & ((at < 2) | (at >= np.max(at, axis=2, keepdims=True) - 6))
        np.testing.assert_array_equal(np.asarray(one.key)[exact], np.asarray(two.key)[exact])
    rest = (jax.tree.leaves(vectors.without_slots(vectors.read(each).state)) for each in (context, found))
    for one, two in zip(*rest, strict=True):
        np.testing.assert_array_equal(one, two)
    report = transport.report(data)
    assert report.total == len(data) and report.tables == 0 < report.ranges
    assert report.ratio > 2
    assert contexts.decode(model, found, max_new_tokens=3).tokens.shape == (2, 3)


def test_a_larger_ratio_is_fewer_bytes_and_a_larger_error():
    calibration, context = [context_of(lengths=(64, 50))], context_of()
    found = []
    for ratio in (3, 8, 20):
        codec = transport.KVTC(transport.fit_transform(calibration, ratio=ratio), sinks=0, recent=0)
        data = transport.encode(context, codec=codec)
        made = transport.decode(data, context.made.model, codec=codec)
        error = sum(
            float(np.square(one.sides[side] - two.sides[side]).sum())
            for pair in zip(vectors.by_token(context), vectors.by_token(made), strict=True)
            for one, two in zip(*pair, strict=True) for side in range(2)
        )  # fmt: skip
        found.append((transport.report(data).codes, -error))
    assert found == sorted(found, reverse=True)


def test_a_file_and_damage(fitted, tmp_path):
    fitted.save(tmp_path / "transform.npz")
    loaded = transport.Transform.load(tmp_path / "transform.npz")
    assert loaded.digest == fitted.digest
    context = context_of(lengths=(40,))
    model, data = context.made.model, transport.encode(context, codec=transport.KVTC(fitted, recent=5))
    one, two = (transport.decode(data, model, codec=transport.KVTC(each, recent=5)) for each in (fitted, loaded))
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(two.state), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(CheckpointError, match="give its codec="):
        transport.decode(data, model)
    with pytest.raises(CheckpointError, match="another codec"):
        transport.decode(data, model, codec=transport.KVTC(fitted, recent=6))
    with pytest.raises(CheckpointError, match="another codec"):
        transport.decode(transport.encode(context), model, codec=transport.KVTC(fitted))
    for place in np.random.default_rng(0).integers(0, len(data), 30):
        spoiled = bytearray(data)
        spoiled[place] ^= 16
        with pytest.raises(CheckpointError, match=r"damaged|no message|cut off"):
            transport.decode(bytes(spoiled), model, codec=transport.KVTC(fitted, recent=5))
    with pytest.raises(CheckpointError, match="has no transform"):
        transport.Transform.load(tmp_path / "nothing.npz")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["kvtc", "cachegen"])
def test_a_folder_in_codes(fitted, tmp_path, name):
    context = context_of()
    codec = transport.CacheGen(level=3) if name == "cachegen" else transport.KVTC(fitted, recent=9)
    contexts.save(tmp_path / "coded", context, codec=codec, wait=False).result()
    model = context.made.model
    found = contexts.load(tmp_path / "coded", model, codec=codec)
    expected = transport.decode(transport.encode(context, codec=codec), model, codec=codec)
    for one, two in zip(jax.tree.leaves(found.state), jax.tree.leaves(expected.state), strict=True):
        np.testing.assert_array_equal(one, two)
    assert found.boundaries == context.boundaries
    with pytest.raises(CheckpointError, match=f"with codec {name}; got no codec"):
        contexts.load(tmp_path / "coded", model)
    contexts.save(tmp_path / "plain", context)
    with pytest.raises(CheckpointError, match=f"with no codec; got codec {name}"):
        contexts.load(tmp_path / "plain", model, codec=codec)
    file = tmp_path / "coded" / "context.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not as it was saved"):
        contexts.load(tmp_path / "coded", model, codec=codec)


def test_what_is_refused(fitted):
    with pytest.raises(InputError, match="hold different positions"):
        transport.encode(context_of(policies.h2o(12)), codec=transport.KVTC(fitted))
    with pytest.raises(InputError, match="hold different positions"):
        transport.fit_transform([context_of(policies.h2o(12))])
    with pytest.raises(InputError, match="another model"):
        transport.encode(context_of(layers=1), codec=transport.KVTC(fitted))
    with pytest.raises(InputError, match="at least one context"):
        transport.fit_transform([])
    with pytest.raises(InputError, match="ratio must be"):
        transport.fit_transform([context_of()], ratio=1)
    for options in ({"sinks": -1}, {"recent": 1.5}, {"chunk": 0}):
        with pytest.raises(InputError, match=next(iter(options))):
            transport.KVTC(fitted, **options)
    with pytest.raises(InputError, match="transform must be"):
        transport.KVTC(CacheSpec(policies.full()))
