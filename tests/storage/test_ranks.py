"""Heads of a layer that hold keys and values in different numbers of directions (MatryoshkaKV, Palu)."""

import numpy as np
import pytest

from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec
from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import budgets_of, lower
from kvjax.errors import StorageError
from kvjax.numerics.rope import Rope
from kvjax.storage import Calibration, Integer, Samples
from tests.laws import replay
from tests.storage import every

pytestmark = pytest.mark.thorough

DIM, LENGTHS, STEPS, RESIDUAL, SLOTS = 8, np.array([12, 7]), 5, 2, 6
ROPE = Rope(dim=DIM)
KEY, VALUE = (3, 5), (6, 6)  # ranks of both heads
HELD = storage.low_rank((KEY,), (VALUE,), RESIDUAL)


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: programs are many, and small."""


def calibration() -> Calibration:
    key, value = np.random.default_rng(1).normal(size=(2, 60, 2, DIM)).astype(np.float32)
    return Calibration.of(HELD, [Samples(own=key, query=None, key=key, value=value)], ROPE)


def vectors(seed: int = 0) -> list[tuple[np.ndarray, ...]]:
    """Queries, keys and values of prompts and of decoding steps."""
    rng = np.random.default_rng(seed)
    return [
        tuple(rng.normal(size=(2, heads, n, DIM)).astype(np.float32) for heads in (4, 2, 2)) for n in (12, STEPS)
    ]  # fmt: skip


@pytest.mark.sampled(0)
def test_each_head_is_one_alone_of_its_own_rank():
    """A step of each is that of the float64 reference in `test_shared_law`."""
    triples, made, policy = vectors(), calibration(), policies.h2o(SLOTS)
    output, groups = replay(HELD, *triples, LENGTHS, policy, ROPE, prefill_block=5, calibration=made)
    assert len(groups) == 2
    for head, layer in enumerate(groups):
        own = storage.low_rank(KEY[head], VALUE[head], RESIDUAL)
        sides = {
            name: {"mean": parts["mean"][head : head + 1], "basis": parts["basis"][head : head + 1, :, :rank]}
            for (name, parts), rank in zip(made.layers[0].items(), (KEY[head], VALUE[head]), strict=True)
        }
        alone = [
            (query[:, 2 * head : 2 * head + 2], *(x[:, head : head + 1] for x in rest)) for query, *rest in triples
        ]
        shared = Calibration((sides,), rope=ROPE)
        expected, other = replay(own, *alone, LENGTHS, policy, ROPE, prefill_block=5, calibration=shared)
        np.testing.assert_allclose(output[:, 2 * head : 2 * head + 2], expected, atol=1e-6)
        for one, two in zip(
            storage.read(HELD, layer, made, heads=(head,)), storage.read(own, other, shared), strict=True
        ):  # fmt: skip
            np.testing.assert_allclose(one, two, atol=1e-6)
        coded = layer.position.shape[2] - RESIDUAL
        held = 2 * (coded * (KEY[head] + VALUE[head]) + RESIDUAL * 2 * DIM) * 4
        assert storage.nbytes(layer) == storage.nbytes(other) == held, "two rows of float32 numbers"


def lowered(policy, held, **more):
    spec = CacheSpec(policy, held, **more)
    sizes = sizes_for(LENGTHS, STEPS, width=12, block=None, limits=Limits(12, STEPS), last_fed=True)
    return lower(spec, every.CONFIG, sizes, LENGTHS, implementation="xla"), spec


def test_heads_of_one_rank_share_arrays():
    """In each layer those that are alike are one group, and bytes are those of every head's own rank."""
    held = storage.low_rank((KEY, 4), VALUE, RESIDUAL)
    made, spec = lowered(policies.h2o(SLOTS), held)
    assert [[group.heads for group in layer] for layer in made.layout.decode] == [[(0,), (1,)], [(0, 1)]]
    coded = made.layout.decode[0][0].slots[0]
    numbers = sum(KEY) + 2 * VALUE[0] + 2 * (4 + VALUE[1])
    assert made.layout.bytes() == 4 * (coded * numbers + 4 * RESIDUAL * 2 * DIM)
    # As many directions of each head as the head that uses most of them, and a mean.
    columns = 2 * (max(KEY) + VALUE[0]) + 2 * (4 + VALUE[1])
    assert made.layout.calibration_bytes() == 4 * DIM * (columns + 2 * 4)
    totals = LENGTHS + STEPS
    again = budgets_of(spec, every.CONFIG, LENGTHS, totals)
    assert [len(layer) for layer in again.decode] == [len(layer) for layer in made.budgets.decode] == [2, 1]
    # Heads of one rank need no group of their own, nor do those of a policy that divides them already.
    assert len(lowered(policies.h2o(SLOTS), storage.low_rank(((3, 3), 4), 6))[0].layout.decode[0]) == 1
    split = policies.split_heads([[1, 0], [0, 1]], policies.full(), policies.h2o(SLOTS))
    assert [len(layer) for layer in lowered(split, held)[0].layout.decode] == [2, 2]


@pytest.mark.parametrize(
    ("policy", "more", "match"),
    [
        (policies.tova(SLOTS), {}, "with policy tova: .* the policy ranks them together; use the same rank"),
        (policies.adakv(policies.snapkv(SLOTS, window=2)), {}, "the policy ranks them together; use the same rank"),
        (policies.full(), {"selection": selection.quest(8, 4)}, "with selection=Quest.* a selection chooses for all"),
        (policies.h2o(SLOTS, positions="cache"), {}, "use positions='original'"),
    ],
)
def test_refused_with_what_is_valid(policy, more, match):
    held = storage.low_rank((KEY, 4), 4, key_codec=Integer(8, 1))
    with pytest.raises(StorageError, match=match):
        lowered(policy, held, **more)
