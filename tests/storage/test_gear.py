"""GEAR: blocks with exact outliers and low-rank corrections, against the worked case and a float64 reference."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, storage
from kvjax.cache import LayerKV
from kvjax.errors import StorageError
from kvjax.storage.gear import low_rank_factors
from kvjax.storage.gradient import differentiable
from tests.laws import CLEAR, TIE, read, replay, streams
from tests.reference import blocks as law
from tests.reference import policies as reference
from tests.reference import replay as rows_of
from tests.storage.test_blocks import lowered

DIM, WIDTH, STEPS = 10, 17, 9
LENGTHS = np.array([17, 3, 8])  # blocks of 8: two of them, none, and one
HELD = storage.gear(2, 8, 5, 1, 2, 1)
SEED = 1


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: `test_codecs` has what optimisations could change."""


pytestmark = pytest.mark.filterwarnings("ignore:storage gear.*takes:UserWarning")  # small blocks


@functools.cache
def random() -> tuple[rows_of.Triple, rows_of.Triple]:
    return streams(SEED, (4, 2), DIM, LENGTHS, STEPS, [])


@functools.cache
def run(name: str) -> tuple[jax.Array, LayerKV]:
    policy = {"full": policies.full(), "knorm": policies.knorm(0.7)}[name]
    return replay(HELD, *random(), LENGTHS, policy)


def expected(name: str, **mistake: Any) -> list[rows_of.Row]:
    policy = {"full": reference.full(), "knorm": reference.knorm(0.7)}[name]
    own = {"bits": 2, "block": 8, "group": 5, "outliers": 1, "rank": 2, "decode_rank": 1} | mistake
    return rows_of.replay(law.Gear(**own), *random(), LENGTHS, policy)


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
@pytest.mark.parametrize("name", ["full", "knorm"])
def test_a_step_is_one_on_what_was_stored(name):
    compare(*run(name), expected(name))


@pytest.mark.parametrize(
    "mistake",
    [{"together": False}, {"rank": 3}, {"decode_rank": 2}, {"group": 2}],
    ids=["prompt block by block", "rank", "rank of later blocks", "groups of values"],
)
def test_mistakes_are_noticed(mistake):
    with pytest.raises(AssertionError) as caught:
        compare(*run("full"), expected("full", **mistake))
    assert "is close" not in str(caught.value)


def test_the_worked_case(shared_data):
    case, examples = 16, np.load(shared_data / "examples" / "storage_cases.npz")
    about = json.loads(bytes(examples["cases"]))[case]
    own = {name: about[name] for name in ("bits", "block", "group", "outliers", "rank", "decode_rank")}
    prompt, decode = (
        tuple(examples[f"{case}_{name}_{phase}"] for name in ("query", "key", "value"))
        for phase in ("prompt", "decode")
    )
    lengths, steps, dim = examples[f"{case}_lengths"], decode[0].shape[2], prompt[0].shape[3]
    output, layer = storage.replay(storage.gear(**own), prompt, decode, lengths)
    np.testing.assert_allclose(output, examples[f"{case}_out"], atol=1e-4)
    for side, x in zip(("key", "value"), storage.read(storage.gear(**own), layer)[:2], strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(x[row, 0, : length + steps], examples[f"{case}_{side}_{row}_0"], atol=1e-4)
    # The first block of keys by itself, corrected by as many factors as a prompt.
    codec = storage.Gear(own["bits"], own["outliers"], own["rank"], own["rank"])
    parts = codec.encode(jnp.asarray(prompt[1][0, 0, : own["block"]]), None, jnp.float32)
    for name in ("codes", "index", "scale", "zero", "value"):
        expected = examples[f"{case}_block_{name}"].reshape(np.shape(parts[name]))
        np.testing.assert_allclose(parts[name], expected, rtol=0 if name in ("codes", "index") else 1e-6)
    back = codec.decode(parts, None, own["block"], dim)
    np.testing.assert_allclose(back, examples[f"{case}_block_decoded"], atol=1e-4)
    for length in lengths:
        layout = lowered(storage.gear(**own), policies.full(), length[None], steps, dim=dim).layout
        assert layout.bytes() == law.Gear(**own).bytes(int(length), int(length) + steps, dim)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (6, 6)])
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_factors_are_as_good_as_the_best(shape, rank):
    x = np.random.default_rng(1).normal(size=(2, *shape)).astype(np.float32) * 1e-3
    x[1] = np.outer(x[1, :, 0], x[1, 0])  # of rank 1
    left, right = (np.asarray(y, np.float64) for y in low_rank_factors(jnp.asarray(x), rank, "float32"))
    for each, made in zip(x.astype(np.float64), left @ right.swapaxes(1, 2), strict=True):
        best = np.linalg.norm(each - law.corrected(each, rank))
        assert np.linalg.norm(each - made) <= 1.01 * best + 1e-5 * np.linalg.norm(each)
    zeros = low_rank_factors(jnp.zeros((4, 4)), 2, "float32")
    assert np.all(np.asarray(zeros[0] @ zeros[1].T) == 0)


@pytest.mark.sampled(0)
def test_a_row_alone_is_the_row_in_a_batch():
    """Its blocks of the prompt and those after it lie in arrays of other sizes."""
    for row in (1, 2):
        prompt = tuple(x[row : row + 1, :, : LENGTHS[row]] for x in random()[0])
        decode = tuple(x[row : row + 1] for x in random()[1])
        output, own = replay(HELD, prompt, decode, LENGTHS[row : row + 1], policies.full())
        together, layer = run("full")
        np.testing.assert_allclose(output[0], together[row], atol=1e-5)
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
        (lambda: storage.gear(block=2), "outliers=1 leaves nothing of 2 numbers; use at most 0"),
        (lambda: storage.gear(block=8, rank=9), "rank=9 and decode_rank=2 must be at most 8"),
        (lambda: storage.gear(bits=9), "storage gear: bits must be a whole number from 1 to 8; got 9"),
        (lambda: lowered(storage.gear(4, 16, rank=11), policies.full(), LENGTHS, STEPS, dim=6), "rank=11 .* at most 6"),
        (lambda: lowered(HELD, policies.full(), LENGTHS, STEPS, block=4), "leave out prefill_block"),
        (lambda: lowered(HELD, policies.h2o(0.5), LENGTHS, STEPS), "storage gear2 with policy h2o: it evicts"),
    ],
)
def test_what_is_refused(build, match):
    with pytest.raises(StorageError, match=match):
        build()
