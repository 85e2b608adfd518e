"""Segments in two tiers by salience: ZipCache against the worked case and a float64 reference."""

import dataclasses
import functools
import json
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, storage
from kvjax.cache import LayerKV
from kvjax.cache.arrangements.block_arrays import OF_PROMPT
from kvjax.errors import InputError, StorageError
from kvjax.generation import generate
from kvjax.generation.context import Context
from kvjax.storage.gradient import differentiable
from tests.laws import CLEAR, TIE, live, read, replay, streams
from tests.reference import policies as reference
from tests.reference import replay as rows_of
from tests.reference import tiers as law
from tests.reference.base import COUNT, MASS, Policy
from tests.storage.test_blocks import lowered

DIM, WIDTH, STEPS, WINDOW = 6, 13, 11, 4
LENGTHS = np.array([13, 1, 8])  # of a prompt of one token all go to the high tier
HELD = storage.zipcache(4, 2, 0.6, WINDOW)
SEED = 1
#: Segments whose values share nothing.
PLAIN = dataclasses.replace(
    HELD, value=storage.Integer(2),
    layout=dataclasses.replace(HELD.layout, high=dataclasses.replace(HELD.layout.high, value=storage.Integer(4))),
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:storage zipcache.*takes:UserWarning")


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: `test_codecs` has what optimisations could change."""


@functools.cache
def random() -> tuple[rows_of.Triple, rows_of.Triple]:
    return streams(SEED, (4, 2), DIM, LENGTHS, STEPS, [])


OURS = {"full": policies.full(), "knorm": policies.knorm(0.7)}


def theirs(name: str) -> Policy:
    """The reference's policy, which keeps what salience is made of."""
    stats = {"mass": MASS, "count": COUNT}
    full = dataclasses.replace(reference.full(), statistics=stats)
    return full if name == "full" else dataclasses.replace(reference.knorm(budget=0.7), statistics=stats, then=full)


@functools.cache
def run(name: str) -> tuple[jax.Array, LayerKV]:
    return replay(HELD, *random(), LENGTHS, OURS[name])


def expected(name: str, **mistake: Any) -> tuple[list[law.Zip], list[rows_of.Row]]:
    made: list[law.Zip] = []
    own = {"high": 4, "low": 2, "ratio": 0.6, "window": WINDOW} | mistake
    return made, rows_of.replay(law.zipped(made, **own), *random(), LENGTHS, theirs(name))


def compare(output: jax.Array, layer: LayerKV, made: list[law.Zip], rows: list[rows_of.Row]) -> None:
    gap, near = (min(getattr(row, name) for row in rows) for name in ("gap", "near"))
    assert gap > CLEAR and near > TIE, f"a choice or a code of the reference is close ({gap:.1e}, {near:.1e})"
    key, value, position = read(HELD, layer)
    size = layer.stores[0]["value"]["codes"].shape[2]
    for row, own in enumerate(rows):
        for head, slots in enumerate(own.heads):
            about, found = f"{row=} {head=}", live(layer, row, head)
            assert list(found) == slots.head.position.tolist(), about
            up = position[row, head, :size]
            assert up[up >= 0].tolist() == made[2 * row + head].salient, about
            for number, slot in enumerate(found.values()):
                np.testing.assert_allclose(key[row, head, slot], slots.head.key[number], atol=1e-5, err_msg=about)
                np.testing.assert_allclose(value[row, head, slot], slots.head.value[number], atol=1e-5, err_msg=about)
        np.testing.assert_allclose(output[row], own.output, atol=1e-4, err_msg=f"{row=}")


@pytest.mark.sampled(1)
@pytest.mark.thorough
@pytest.mark.parametrize("name", OURS)
def test_a_step_is_one_on_what_was_stored(name):
    compare(*run(name), *expected(name))


@pytest.mark.parametrize(
    "mistake", [{"by": "mass"}, {"ratio": 0.4}, {"window": 5}, {"low": 3}], ids=["mass", "ratio", "window", "bits"]
)
def test_mistakes_are_noticed(mistake):
    with pytest.raises(AssertionError) as caught:
        compare(*run("full"), *expected("full", **mistake))
    assert "is close" not in str(caught.value)


def test_the_worked_case(shared_data):
    case, examples = 15, np.load(shared_data / "examples" / "storage_cases.npz")
    about = json.loads(bytes(examples["cases"]))[case]
    held = storage.zipcache(**{name: about[name] for name in ("high", "low", "ratio", "window")})
    prompt, decode = (
        tuple(examples[f"{case}_{name}_{phase}"] for name in ("query", "key", "value"))
        for phase in ("prompt", "decode")
    )
    lengths, steps = examples[f"{case}_lengths"], decode[0].shape[2]
    output, layer = storage.replay(held, prompt, decode, lengths)
    np.testing.assert_allclose(output, examples[f"{case}_out"], atol=1e-4)
    key, value, position = read(held, layer)
    size = layer.stores[0]["value"]["codes"].shape[2]
    for row, length in enumerate(lengths):
        up = position[row, 0, :size]
        np.testing.assert_array_equal(up[up >= 0], examples[f"{case}_salient_{row}_0"])
        np.testing.assert_allclose(
            layer.sides["value"]["scale"][row, 0], examples[f"{case}_channel_{row}_0"], rtol=1e-6
        )
        slots = list(live(layer, row, 0).values())
        assert len(slots) == length + steps
        np.testing.assert_allclose(key[row, 0, slots], examples[f"{case}_key_{row}_0"], atol=1e-4)
        np.testing.assert_allclose(value[row, 0, slots], examples[f"{case}_value_{row}_0"], atol=1e-4)
        for tier, name in enumerate(("high", "low")):
            for part in ("zero", "scale"):
                own = layer.stores[tier]["key"]
                of_prompt = own[OF_PROMPT + part]
                got = np.concatenate([of_prompt[row], own[part][row, 0]])
                np.testing.assert_allclose(got, examples[f"{case}_{name}_{part}_{row}_0"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("prompt", "steps"), [(13, 11), (10, 3), (3, 8)])
def test_bytes_are_those_of_the_definition(prompt, steps):
    layout = lowered(HELD, policies.full(), np.array([prompt]), steps, dim=DIM).layout
    segments, width = steps // WINDOW, 4
    up = math.ceil(0.6 * prompt) + segments * math.ceil(0.6 * WINDOW)
    down = prompt + segments * WINDOW - up
    codes = [math.ceil(DIM * bits / 8) for bits in (4, 2)]
    slots = sum(count * (2 * own + 2 * width) for count, own in zip((up, down), codes, strict=True))
    sides = DIM * width + 4 * DIM * width * (1 + segments)
    assert layout.bytes() == slots + sides + 2 * WINDOW * DIM * width
    ((group,),) = layout.decode
    assert group.slots == (up, down, WINDOW) and group.unranked == up + down


@pytest.mark.sampled(0)
def test_a_row_alone_is_the_row_in_a_batch():
    row = 2
    prompt = tuple(x[row : row + 1, :, : LENGTHS[row]] for x in random()[0])
    decode = tuple(x[row : row + 1] for x in random()[1])
    output, own = replay(HELD, prompt, decode, LENGTHS[row : row + 1], OURS["full"])
    together, layer = run("full")
    np.testing.assert_allclose(output[0], together[row], atol=1e-6)
    key, value, _ = storage.read(HELD, layer)
    own_key, own_value, _ = storage.read(HELD, own)
    for head in range(2):
        mine, batch = live(own, 0, head), live(layer, row, head)
        assert list(mine) == list(batch)
        for at, slot in mine.items():
            np.testing.assert_array_equal(own_key[0, head, slot], key[row, head, batch[at]])
            np.testing.assert_array_equal(own_value[0, head, slot], value[row, head, batch[at]])


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_slots_that_are_hidden_are_the_same_ones():
    """A policy that hides tokens keeps numbers of each, which move with it from tier to tier."""
    policy, given = policies.h2o(0.5, variant="masked"), (*random(), LENGTHS)
    (output, layer), (plain, dense) = (
        replay(held, *given, policy) for held in (storage.zipcache(8, 8, 0.5, WINDOW), storage.dense())
    )
    np.testing.assert_allclose(output, plain, atol=0.05)
    for row, head in np.ndindex(3, 2):
        found = live(layer, row, head)
        for position, slot in live(dense, row, head).items():
            assert layer.index["allowed"][row, head, found[position]] == dense.index["allowed"][row, head, slot]


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


@pytest.mark.parametrize("held", [HELD, storage.mikv(), storage.gear(4, 4, rank=2)], ids=lambda held: held.name)
def test_more_tokens_than_there_is_room_for_are_refused(held):
    """Also by a row whose prompt is short: what follows a prompt has arrays of its own."""
    policy = policies.h2o(4) if held.name.startswith("mikv") else policies.full()
    layout = lowered(held, policy, LENGTHS, 5).layout
    state = types.SimpleNamespace(length=LENGTHS + np.array([0, 2, 0]), prompt=LENGTHS)
    generate.check_room(Context(None, state, layout), 4)
    with pytest.raises(InputError, match="2 tokens were decoded and 5 more are requested, but the cache is for 5"):
        generate.check_room(Context(None, state, layout), 5)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: storage.zipcache(ratio=0), "storage zipcache: ratio must be a number from 1e-06 to 1; got 0"),
        (lambda: storage.zipcache(window=0), "storage zipcache: window must be a whole number of at least 1; got 0"),
        (lambda: storage.zipcache(high=9), "storage zipcache: high must be a whole number from 1 to 8; got 9"),
        (lambda: lowered(HELD, policies.full(), LENGTHS, STEPS, block=4), "leave out prefill_block"),
        (lambda: lowered(PLAIN, policies.full(), LENGTHS, STEPS, block=4), "a prompt is one segment"),
        (lambda: lowered(HELD, policies.h2o(0.5), LENGTHS, STEPS), "storage zipcache4.2 with policy h2o: it evicts"),
        (
            lambda: storage.Storage(key=storage.Integer(2), value=storage.Integer(2), layout=HELD.layout),
            "a tier of segments stores keys in blocks and values individually",
        ),
    ],
)
def test_what_is_refused(build, match):
    with pytest.raises(StorageError, match=match):
        build()
