"""KVarN: blocks whose tokens and channels have equal deviations, against a float64 reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, storage
from kvjax.cache import LayerKV
from kvjax.errors import StorageError
from kvjax.storage import Channels, VarianceNormalized
from kvjax.storage.gradient import differentiable
from tests.laws import CLEAR, TIE, read, replay, streams
from tests.reference import blocks as law
from tests.reference import codecs
from tests.reference import policies as reference
from tests.reference import replay as rows_of
from tests.storage.test_blocks import lowered

DIM, WIDTH, STEPS = 12, 17, 9
LENGTHS = np.array([17, 3, 8])  # blocks of 8: two of them, none, and one
OWN = {"key_bits": 3, "value_bits": 2, "block": 8}
HELD = storage.kvarn(**OWN)
SEED = 36


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: `test_codecs` has what optimisations could change."""


pytestmark = pytest.mark.filterwarnings("ignore:storage kvarn.*takes:UserWarning")  # small blocks


@functools.cache
def random() -> tuple[rows_of.Triple, rows_of.Triple]:
    return streams(SEED, (4, 2), DIM, LENGTHS, STEPS, [])


@functools.cache
def run(name: str, block: int | None = None) -> tuple[jax.Array, LayerKV]:
    policy = {"full": policies.full(), "knorm": policies.knorm(0.7)}[name]
    return replay(HELD, *random(), LENGTHS, policy, prefill_block=block)


def expected(name: str, prefill_block: int | None = None, **mistake: Any) -> list[rows_of.Row]:
    policy = {"full": reference.full(), "knorm": reference.knorm(0.7)}[name]
    return rows_of.replay(law.Kvarn(**OWN | mistake), *random(), LENGTHS, policy, block=prefill_block)


def compare(output: jax.Array, layer: LayerKV, rows: list[rows_of.Row]) -> None:
    gap, near = (min(getattr(row, name) for row in rows) for name in ("gap", "near"))
    assert gap > CLEAR and near > TIE, f"a choice or a code of the reference is close ({gap:.1e}, {near:.1e})"
    key, value, position = read(HELD, layer)
    for row, own in enumerate(rows):
        for head, slots in enumerate(own.heads):
            count, about = len(slots.head.position), f"{row=} {head=}"
            np.testing.assert_array_equal(position[row, head, :count], slots.head.position, about)
            np.testing.assert_allclose(key[row, head, :count], slots.head.key, atol=2e-5, err_msg=about)
            np.testing.assert_allclose(value[row, head, :count], slots.head.value, atol=2e-5, err_msg=about)
        np.testing.assert_allclose(output[row], own.output, atol=1e-4, err_msg=f"{row=}")


@pytest.mark.sampled(1)
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "block"), [("full", None), ("full", 5), ("knorm", None)])
def test_a_step_is_one_on_what_was_stored(name, block):
    compare(*run(name, block), expected(name, block))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mistake", [{"iterations": 1}, {"swapped": True}, {"key_bits": 4}, {"block": 32}], ids=str)
def test_mistakes_are_noticed(mistake):
    with pytest.raises(AssertionError) as caught:
        compare(*run("full"), expected("full", **mistake))
    assert "is close" not in str(caught.value)


def uneven(tokens: int, dim: int, seed: int) -> np.ndarray:
    """[n, D]: tokens and channels of many magnitudes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, dim)) * np.exp(rng.normal(size=(tokens, 1))) * np.exp(rng.normal(size=dim))
    return x.astype(np.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize(("bits", "dim", "dtype"), [(4, 16, "float32"), (2, 12, "bfloat16"), (3, 7, "float16")])
def test_a_block_is_the_reference(by_channel, bits, dim, dtype):
    codec = VarianceNormalized(bits, by_channel)
    for seed in range(50):
        x = uneven(20, dim, seed)
        parts, decoded, near = law.normalized(x.astype(np.float64), bits, by_channel, codec.iterations, dtype)
        # Factors are rounded too: one near the middle of two numbers of 16 bits may be the other.
        if near > 2e-3 and (dtype == "float32" or not _near_a_tie(x, by_channel, dtype)):
            break
    else:
        raise AssertionError("no such numbers")
    got = jax.jit(lambda x: codec.encode(x, None, jnp.dtype(dtype)))(x)
    assert {name: (part.shape, part.dtype) for name, part in got.items()} == codec.parts(20, dim, dtype)
    np.testing.assert_array_equal(got["codes"], parts["codes"])
    for name in ("scale", "zero", "factor"):
        own = np.asarray(got[name], np.float64)
        np.testing.assert_allclose(own, parts[name], rtol=2e-5 if dtype == "float32" else 2e-2, atol=1e-6)
    back = jax.jit(lambda parts: codec.decode(parts, None, 20, dim))(got)
    size = np.abs(decoded).max()
    np.testing.assert_allclose(back, decoded, atol=(1e-5 if dtype == "float32" else 2e-2) * size)


def _near_a_tie(x: np.ndarray, by_channel: bool, dtype: str) -> bool:
    lines = x.astype(np.float64) @ law.formats.rotation(x.shape[1], None).T
    found, _ = law.balanced(lines.T if by_channel else lines, 16)
    return min(codecs.stored(float(each), dtype)[1] for each in found) < 1e-3


def test_a_large_token_does_not_widen_the_ranges_of_channels():
    x = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)
    x[17] *= 30

    def error(codec):
        back = jax.jit(lambda x: codec.decode(codec.encode(x, None, jnp.float32), None, 128, 64))(x)
        return float(np.sqrt(np.square(np.delete(np.asarray(back) - x, 17, axis=0)).mean()))

    assert error(VarianceNormalized(4, True)) < 0.2 * error(Channels(4, None))
    assert error(VarianceNormalized(4, True)) < 0.2 * error(VarianceNormalized(4, True, iterations=0))


@pytest.mark.parametrize("by_channel", [True, False])
def test_constants_zeros_and_rubbish_are_finite(by_channel):
    codec = VarianceNormalized(2, by_channel)
    x = np.stack([np.zeros((4, 8)), np.full((4, 8), 3.0), np.full((4, 8), 1e30)]).astype(np.float32)
    back = np.asarray(jax.jit(lambda x: codec.decode(codec.encode(x, None, jnp.float32), None, 4, 8))(x))
    np.testing.assert_array_equal(back[0], 0)
    np.testing.assert_allclose(back[1:], x[1:], rtol=1e-5)
    parts = {
        name: jnp.full(shape, 255 if kind == jnp.uint8 else 1e30, kind)
        for name, (shape, kind) in codec.parts(4, 8, jnp.float32).items()
    }
    assert np.isfinite(jax.jit(lambda parts: codec.decode(parts, None, 4, 8))(parts)).all()


def test_bytes_are_those_of_the_definition():
    """For 128 channels in bfloat16: codes, a scale and a zero per line, a factor per entry of a line."""
    assert VarianceNormalized(4, True).bytes(128, 128, "bfloat16") == 128 * 64 + 2 * (2 * 128 + 128)
    assert VarianceNormalized(2, False).bytes(64, 128, "bfloat16") == 64 * 32 + 2 * (2 * 64 + 128)
    assert storage.kvarn().bytes_per_slot(128, "bfloat16") == 70 + 38


@pytest.mark.sampled(0)
def test_a_row_alone_is_the_row_in_a_batch():
    for row in (1, 2):
        prompt = tuple(x[row : row + 1, :, : LENGTHS[row]] for x in random()[0])
        decode = tuple(x[row : row + 1] for x in random()[1])
        output, own = replay(HELD, prompt, decode, LENGTHS[row : row + 1], policies.full())
        whole, layer = run("full")
        np.testing.assert_allclose(output[0], whole[row], atol=1e-5)
        total = LENGTHS[row] + STEPS
        for one, other in zip(storage.read(HELD, own)[:2], storage.read(HELD, layer)[:2], strict=True):
            np.testing.assert_allclose(one[0, :, :total], other[row, :, :total], atol=1e-5)


@pytest.mark.sampled(0)
def test_gradients_pass_straight_through():
    prompt, decode = random()

    def loss(prompt: Any) -> Any:
        output, _ = storage.replay(differentiable(HELD), prompt, decode, LENGTHS)
        return jnp.sum(output**2), output

    (_, output), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(prompt)
    np.testing.assert_allclose(output, run("full")[0], atol=1e-5)
    for slope in gradient[1:]:
        size = np.abs(slope).max(axis=(1, 3))
        real = np.arange(WIDTH) < LENGTHS[:, None]
        assert np.all(size[real] > 0) and np.all(size[~real] == 0)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: VarianceNormalized(4, True).check(1), "blocks of 1 token have no standard deviation; use at least 2"),
        (lambda: VarianceNormalized(4, True).parts(8, 1, "float32"), "1 channel has no standard deviation"),
        (lambda: lowered(HELD, policies.h2o(0.5), LENGTHS, STEPS), "storage kvarn_k3v2 with policy h2o: it evicts"),
    ],
)
def test_what_is_refused(build, match):
    with pytest.raises(StorageError, match=match):
        build()
