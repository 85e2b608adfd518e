"""Numbers of slots and of heads that policies remember from one eviction to the next, and what ladders make of them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache.context_parallel import refusals
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import as_spec
from kvjax.errors import PolicyError
from kvjax.numerics.rope import Rope
from kvjax.policies import RoundMemory
from tests import layers

BUDGET, EVERY = 8, 3
#: Rows that are due in different steps; row 2 never is, and row 1 ends before the others.
CASE = layers.Case(
    layers.random_streams(range(3), 30), prompts=np.array([14, 9, 3]), ends=np.array([30, 19, 10]), rope=None
)


@dataclasses.dataclass(frozen=True)
class Survived(RoundMemory):
    """Counts the rounds that a slot has survived."""

    def after(self, stats, view, victim):
        return self.before(stats, view) + 1


@dataclasses.dataclass(frozen=True)
class Evicted(RoundMemory):
    """Counts the slots that a head has evicted."""

    per_slot = False

    def after(self, stats, view, victim):
        return self.before(stats, view) + jnp.sum(victim, axis=2, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Counting(policies.Importance):
    """Evicts the oldest slots, and counts."""

    memories: tuple[RoundMemory, ...] = (Survived(), Evicted())
    needs = frozenset()

    @property
    def memory(self):
        return self.memories

    def score(self, stats, view):
        return view.position.astype(jnp.float32)


def counting(**more):
    return policies.evict(importance=Counting(**more), budget=BUDGET, every=EVERY, name="counting")


def simulated(row, step, block):
    """The rounds that each live slot has survived, and the number of evicted slots, `step` steps after the prompt."""
    prompt, end = int(CASE.prompts[row]), int(CASE.ends[row])
    starts = [*range(0, prompt, block or prompt), *range(prompt, min(prompt + step, end))]
    survived, evicted = {}, 0
    for start, stop in zip(starts, [*starts[1:], min(prompt + step, end)], strict=True):
        survived |= dict.fromkeys(range(start, stop), 0)
        if len(survived) >= BUDGET + EVERY:
            evicted += len(survived) - BUDGET
            survived = {p: survived[p] + 1 for p in sorted(survived)[-BUDGET:]}
    return survived, evicted


@pytest.mark.sampled(1)
@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("storage", [kvjax.storage.dense(), kvjax.storage.int8(residual=2)], ids=["dense", "int8"])
def test_numbers_are_written_when_a_head_evicts(storage, block):
    run = layers.run(kvjax.CacheSpec(counting(), storage), CASE._replace(block=block))
    (group,) = run.layers
    number, heads = group.stats[Survived().name], group.memory[Evicted().name]["number"]
    for step in range(CASE.room[1] + 1):
        for row, head in np.ndindex(3, 2):
            survived, evicted = simulated(row, step, block)
            position = group.position[step, row, head]
            live = position >= 0
            assert dict(zip(position[live], number[step, row, head, live], strict=True)) == survived
            assert heads[step, row, head] == evicted and not number[step, row, head, ~live].any()


def test_a_memory_of_another_shape_is_refused():
    class Wrong(Evicted):
        def after(self, stats, view, victim):
            return super().after(stats, view, victim)[:, :1]

    with pytest.raises(PolicyError, match=r"counting: its Wrong.after returned a jax array of int32 .*1\]"):
        layers.lowered(counting(memories=(Wrong(),)), CASE)


def test_kernels_and_divided_slots_say_that_they_have_no_memory_of_rounds():
    (group,) = layers.lowered(counting(memories=(Survived(),)), CASE).layout.decode[-1]
    assert not group.memory and group.remembers == (Survived().name,)
    alone = dataclasses.replace(group, policy=dataclasses.replace(group.policy, every=1))
    assert refusals.refuses(alone, 2, 8) == "policy counting remembers earlier evictions"
    sizes = Sizes(2, 64, 64, 64, 64, None, rounded=False)
    config = dataclasses.replace(layers.config(CASE), head_dim=128)
    for memories, kernel in (((), "pallas_tpu"), ((Survived(),), None)):
        policy = dataclasses.replace(counting(memories=memories), every=1)
        layout = lower(as_spec(policy), config, sizes, np.array([64, 64]), platform="tpu").layout
        ((group,),) = layout.decode
        assert group.step_implementation == kernel
    assert any("a memory of earlier evictions" in reason for reason in group.reasons)


def test_a_ladder_is_laid_over_the_layers_of_the_model():
    """In two layers, of each two slots after the sinks, the first stays in one layer and the second in the other."""
    case = layers.Case(layers.random_streams([0], 31), prompts=np.array([30]), ends=np.array([31]), rope=Rope(dim=8))
    for layer, of_model, thinned in ((0, 2, range(5, 24, 2)), (1, None, range(4, 23, 2))):
        run = layers.run(policies.ladder(20, span=1, every=4, layers=of_model), case._replace(layer=layer))
        assert run.live(0, 0, 0) == [position for position in range(30) if position not in thinned]


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (
            lambda: policies.phases(policies.full(), policies.ladder(64, span=1, layers=2)),
            "counts slots from the beginning",
        ),
        (lambda: policies.ladder(64, span=4, overlap=4), "overlap=4 is not less than span=4"),
        (lambda: policies.ladder(64, span=4, layers=4), "span=4 with overlap=0 and 4 layers thins nothing"),
        (lambda: layers.lowered(policies.ladder(8, span=1), CASE), "and 1 layers thins nothing: a unit has 1 slots"),
        (lambda: policies.caote(policies.ladder(64, span=1)), "is not an amount of attention"),
    ],
)
def test_ladders_that_cannot_work_are_refused(made, match):
    with pytest.raises(PolicyError, match=match):
        made()
