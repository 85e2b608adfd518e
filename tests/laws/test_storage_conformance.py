"""The codec law: a step over coded slots is a step of the float64 reference that stores what they decode to."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, products, storage
from kvjax.cache import Block, CacheSpec, LayerKV
from kvjax.cache.state import EMPTY
from kvjax.cache.step.step import step
from kvjax.kernels.decode import coded
from kvjax.products import codes, native
from kvjax.storage import (
    Bfp,
    Codec,
    Exact,
    Fp8,
    Fp16,
    Integer,
    Levels,
    Mxfp4,
    Nvfp4,
    Permuted,
    Rotated,
    Sparse,
    Storage,
    TurboQuant,
)
from tests import layers
from tests.laws import assert_same, covering, held_in, live, pairs, replay, streams
from tests.policies.test_merge import REFERENCES as MERGES
from tests.reference import policies as reference
from tests.reference import replay as law
from tests.reference.base import Policy
from tests.storage.against import of_reference

HEADS = {"mha": 4, "gqa": 2, "mqa": 1}  # KV heads of four query heads
DIM, WIDTH, STEPS, BLOCK, SEED = 8, 12, 10, 6, 0
LENGTHS = np.array([12, 6, 9])  # row 1 has no token in the second block
TOTAL = WIDTH + STEPS
FIXED = 0.005  # a scale that some numbers exceed 448 times

CODECS = {
    "int8": (Integer(8), law.integer(8)),
    "int4": (Integer(4), law.integer(4)),
    "int2": (Integer(2), law.integer(2)),
    "fp8": (Fp8(), law.fp8()),
    "fp8 fixed": (Fp8(FIXED), law.fp8(FIXED)),
    "dense": (Exact(), law.exact),
} | {
    name: (codec, of_reference(codec))
    for name, codec in {
        "fp16": Fp16(),
        "bfp": Bfp(6, 4),
        "mxfp4": Mxfp4(4),
        "nvfp4": Nvfp4(8),
        "levels": Levels(3),
        "turboquant": TurboQuant(4, 1),
        "rotated": Rotated(Integer(4), 1),
        "sparse": Sparse(Integer(3, 4), 1),
        "permuted": Permuted(Sparse(Levels(4), 1), (3, 0, 7, 5, 1, 2, 6, 4)),
    }.items()
}  # fmt: skip


@functools.cache
def random() -> tuple[law.Triple, law.Triple]:
    """Returns the inputs of prompts and of decoding steps, for four heads."""
    return streams(SEED, (4, 4), DIM, LENGTHS, STEPS, [codec for _, codec in CODECS.values()])


def of_heads(heads: str) -> list[law.Triple]:
    count = HEADS[heads]
    return [(query, key[:, :count], value[:, :count]) for query, key, value in random()]


def by_name(package: Any) -> dict[str, Any]:
    return {
        "full": package.full(),
        "window": package.window(budget=0.5, sinks=1),
        "h2o": package.h2o(budget=0.5),
        "roco": package.roco(budget=0.5, guard=2),
        "value_norm(tova)": package.COMBINATORS["value_norm"](package.tova(budget=0.5, share_heads=False)),
        "knorm": package.knorm(budget=0.5),
    }


OURS, THEIRS = by_name(policies), by_name(reference)


class Case(NamedTuple):
    """A program has two codecs, one of keys and one of values."""

    policy: str
    codecs: tuple[str, str]
    residual: int
    block: int | None
    heads: str

    def covers(self) -> set:
        own = [("policy", self.policy), ("residual", self.residual), ("block", self.block), ("heads", self.heads)]
        return set().union(*(pairs([*own, ("codec", name)]) for name in self.codecs))

    @property
    def held(self) -> Storage:
        key, value = (CODECS[name][0] for name in self.codecs)
        return Storage(key=key, value=value, residual=self.residual, name="|".join(self.codecs))

    @property
    def stored(self) -> law.Storage:
        return law.Storage(*(CODECS[name][1] for name in self.codecs), self.residual)

    @functools.cache  # noqa: B019
    def run(self) -> tuple[jax.Array, LayerKV]:
        return replay(self.held, *of_heads(self.heads), LENGTHS, OURS[self.policy], prefill_block=self.block)

    def expected(self, stored: law.Storage | None = None, policy: Policy | None = None) -> list[law.Row]:
        given = *of_heads(self.heads), LENGTHS, policy or THEIRS[self.policy]
        return law.replay(stored or self.stored, *given, block=self.block)


MIXED = (("int8", "fp8"), ("fp8 fixed", "int4"), ("int2", "dense"))
CASES = covering(
    [Case(*each) for each in itertools.product(OURS, MIXED, (0, 3, TOTAL), (None, BLOCK), HEADS)], Case.covers
)
# A step does not know the codec: with the others, policies of three kinds are enough.
MORE = (("fp16", "levels"), ("turboquant", "mxfp4"), ("bfp", "permuted"), ("sparse", "levels"), ("rotated", "nvfp4"))
CASES += covering(
    [
        Case(*each)
        for each in itertools.product(("full", "h2o", "value_norm(tova)"), MORE, (0, 3), (None, BLOCK), HEADS)
    ],
    Case.covers,
)


def describe(case: Case) -> str:
    return f"{case.policy}-{'|'.join(case.codecs)}-{case.residual}-{case.block}-{case.heads}".replace(" ", "_")


@pytest.mark.sampled(1)
@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=describe)
def test_a_step_is_one_on_what_was_stored(case):
    output, layer = case.run()
    assert_same(output, layer, case.expected(), case.held)
    # Bytes are what the codecs say of all slots; those of a residual, or of one that covers everything, are exact.
    ways = [case.held, storage.dense()] if case.residual < TOTAL else [storage.dense()]
    expected = 0
    for held, store in zip(ways, layer.stores, strict=False):
        slots = math.prod(jax.tree.leaves(store)[0].shape[:3])
        for codec in (held.key, held.value):
            parts = codec.parts(DIM, jnp.dtype("float32")).values()
            expected += slots * sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
    assert storage.nbytes(layer) == expected


@pytest.fixture
def by_codes():
    """Attention multiplies by codes where kvjax's own code can read them."""
    if reason := native.load():
        pytest.skip(reason)
    before = products.setting()
    products.use("native")
    yield
    products.use(before)


#: Of keys and values, codecs whose codes are read.
READ = (
    Case("full", ("int8", "fp8"), 0, None, "gqa"),
    Case("h2o", ("turboquant", "int4"), 3, None, "mqa"),
    Case("value_norm(tova)", ("int4", "mxfp4"), 0, BLOCK, "mha"),
    Case("roco", ("fp8 fixed", "int8"), 3, BLOCK, "gqa"),
    Case("full", ("rotated", "nvfp4"), 0, BLOCK, "gqa"),
    Case("h2o", ("nvfp4", "rotated"), 3, None, "mha"),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", READ, ids=describe)
def test_a_step_that_multiplies_by_codes_is_the_same(case, by_codes, monkeypatch):
    read, calls = codes.codes_product, []
    monkeypatch.setattr(codes, "codes_product", lambda *given, **more: calls.append(0) or read(*given, **more))
    given = *of_heads(case.heads), LENGTHS, OURS[case.policy]
    assert_same(*replay(case.held, *given, prefill_block=case.block), case.expected(), case.held)
    assert calls


@pytest.mark.parametrize("case", [READ[0], READ[1]], ids=describe)
def test_a_step_that_decodes_some_slots_at_a_time_is_the_same(case, monkeypatch):
    monkeypatch.setitem(coded.CHUNKS, "cpu", 4)
    jax.clear_caches()
    given = *of_heads(case.heads), LENGTHS, OURS[case.policy]
    assert_same(*replay(case.held, *given, prefill_block=case.block), case.expected(), case.held)
    jax.clear_caches()


ONE = Case("window", ("fp8 fixed", "int4"), 3, None, "mha")


def wrong() -> Iterator[tuple[str, law.Storage, law.Triple]]:
    """Mistakes that one could make."""
    prompt, decode = of_heads(ONE.heads)
    key, value, residual, *_ = ONE.stored

    def rounded(given: law.Triple) -> law.Triple:
        query, *others = given
        trips = (np.apply_along_axis(lambda x: codec(x).decoded, -1, x.astype(np.float64))  # noqa: B023
                 for codec, x in zip((key, value), others, strict=True))  # fmt: skip
        return query, *trips

    yield "a step's own token is rounded before it is attended to", ONE.stored, prompt, rounded(decode)
    yield "so are the prompt's", ONE.stored, rounded(prompt), decode
    yield "a token is coded too late", law.Storage(key, value, residual + 1), prompt, decode
    yield "or too early", law.Storage(key, value, residual - 1), prompt, decode
    yield "it is never coded", law.Storage(key, value, None), prompt, decode
    yield "values are in the codec of keys", law.Storage(key, key, residual), prompt, decode


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(6))
def test_mistakes_are_noticed(number):
    assert ONE in CASES
    _, stored, prompt, decode = list(wrong())[number]
    rows = law.replay(stored, prompt, decode, LENGTHS, THEIRS[ONE.policy])
    with pytest.raises(AssertionError) as caught:
        assert_same(*ONE.run(), rows, ONE.held)
    assert "another seed" not in str(caught.value)


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_a_residual_of_everything_is_a_dense_cache_to_the_bit(policy):
    given = *of_heads("gqa"), LENGTHS, OURS[policy]
    plain, dense = storage.replay(storage.dense(), *given)
    for held in (storage.int4(residual=TOTAL), storage.fp8(residual=10**6)):
        output, layer = storage.replay(held, *given)
        np.testing.assert_array_equal(output, plain)
        for row, head in itertools.product(range(3), range(2)):
            slots = live(layer, row, head)
            assert list(slots) == list(live(dense, row, head))
            for position, slot in live(dense, row, head).items():
                for got, expected in zip(storage.read(held, layer)[:2], (dense.key, dense.value), strict=True):
                    np.testing.assert_array_equal(got[row, head, slots[position]], expected[row, head, slot])


def assert_same_bytes(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, parts in one.items():
        assert {part: x.tobytes() for part, x in parts.items()} == {
            part: x.tobytes() for part, x in other[name].items()
        }


def test_a_row_alone_is_the_row_in_a_batch():
    """Byte for byte, in arrays of another size."""
    held, row = storage.int4(residual=3), 1
    prompt, decode = of_heads("gqa")
    output, layer = replay(held, prompt, decode, LENGTHS, OURS["h2o"])
    alone = [tuple(x[row : row + 1] for x in each) for each in (prompt, decode)]
    alone[0] = tuple(x[:, :, : LENGTHS[row]] for x in alone[0])
    own_output, own = replay(held, *alone, LENGTHS[row : row + 1], OURS["h2o"])
    np.testing.assert_allclose(own_output[0], output[row], atol=1e-6)
    for head in range(2):
        slots, own_slots = live(layer, row, head), live(own, 0, head)
        assert list(slots) == list(own_slots)
        for position, slot in slots.items():
            assert_same_bytes(held_in(layer, row, head, slot), held_in(own, 0, head, own_slots[position]))


def spoil(layer: LayerKV) -> LayerKV:
    """The layer with bytes of 255 in the codes of empty slots, and large numbers elsewhere: they must be finite."""
    sizes = [jax.tree.leaves(store)[0].shape[2] for store in layer.stores]
    starts = np.cumsum([0, *sizes])

    def filled(leaf: jax.Array, position: jax.Array) -> jax.Array:
        empty = (position < 0).reshape(*position.shape, *(1,) * (leaf.ndim - 3))
        return jnp.where(empty, jnp.asarray(255 if leaf.dtype == jnp.uint8 else 1e30, leaf.dtype), leaf)

    stores = tuple(
        jax.tree.map(lambda leaf: filled(leaf, layer.position[:, :, start : start + size]), store)  # noqa: B023
        for start, size, store in zip(starts, sizes, layer.stores, strict=False)
    )
    return layer.replace(stores=stores)


class Steps(NamedTuple):
    output: np.ndarray  # [B, H, steps, D]
    layers: list[LayerKV]  # after the prompt, and after each step


def stepwise(held: Storage, policy: policies.Policy) -> tuple[Steps, Steps]:
    """The steps as they are, and with everything spoiled that is in empty slots."""
    prompt, decode = of_heads("gqa")
    whole = [np.concatenate(each, axis=2) for each in zip(prompt, decode, strict=True)]
    case = layers.Case(layers.Streams(*whole), LENGTHS, LENGTHS + STEPS)
    layout, budgets = layers.lowered(CacheSpec(policy, held), case)
    ((before,),), ((after,),) = layout.prompt, layout.decode
    lengths = jnp.asarray(LENGTHS, jnp.int32)

    @jax.jit
    def run(prompt: Any, decode: Any, spoiled: jax.Array) -> Any:
        position = jnp.arange(WIDTH, dtype=jnp.int32)
        position = jnp.where(position < lengths[:, None], position, EMPTY)
        block = Block(position=position, prompt=lengths, total=lengths + STEPS, budget=budgets.prompt)
        _, first, _ = step(None, *prompt, block=block, group=before, budget=jnp.asarray(budgets.prompt[0][0]))

        def one(layer: LayerKV, inputs: Any) -> Any:
            number, *own = inputs
            layer = jax.tree.map(functools.partial(jnp.where, spoiled), spoil(layer), layer)
            block = Block(
                position=(lengths + number)[:, None], prompt=lengths, total=lengths + STEPS, budget=budgets.decode
            )
            own = [x[:, :, None] for x in own]
            output, layer, _ = step(layer, *own, block=block, group=after, budget=jnp.asarray(budgets.decode[0][0]))
            return layer, (output[:, :, 0], layer)

        own = [jnp.moveaxis(x, 2, 0) for x in decode]
        _, (outputs, then) = jax.lax.scan(one, first, (jnp.arange(STEPS, dtype=jnp.int32), *own))
        return jnp.moveaxis(outputs, 0, 2), first, then

    found = []
    for spoiled in (False, True):
        output, first, then = jax.tree.map(np.asarray, run(prompt, decode, jnp.asarray(spoiled)))
        each = [jax.tree.map(lambda leaf: leaf[number], then) for number in range(STEPS)]  # noqa: B023
        found.append(Steps(output, [first, *each]))
    return found[0], found[1]


def test_what_an_empty_slot_holds_does_not_matter():
    """Byte for byte; `test_spoiled` has all storages."""
    plain, spoiled = stepwise(Storage(key=TurboQuant(3), value=Sparse(Bfp(4), 1)), OURS["h2o"])
    np.testing.assert_array_equal(plain.output, spoiled.output)
    for one, other in zip(plain.layers, spoiled.layers, strict=True):
        np.testing.assert_array_equal(one.position, other.position)
        for row, head in itertools.product(range(3), range(2)):
            for slot in live(one, row, head).values():
                assert_same_bytes(held_in(one, row, head, slot), held_in(other, row, head, slot))


def changes(steps: Steps) -> Iterator[tuple[int, int, int, set[int], dict[int, int]]]:
    """(step, row, head, slots whose bytes changed, live positions and their slots afterwards)."""
    for number, (one, other) in enumerate(itertools.pairwise(steps.layers)):
        for row, head in itertools.product(range(3), range(2)):
            changed = {
                slot
                for slot in range(one.position.shape[2])
                if any(
                    x[row, head, slot].tobytes() != y[row, head, slot].tobytes()
                    for x, y in zip(jax.tree.leaves(one.stores), jax.tree.leaves(other.stores), strict=True)
                )
            }
            yield number, row, head, changed, live(other, row, head)


def test_an_evicted_newest_token_is_never_encoded():
    """Nor does any step write more than the slot of its own token."""
    steps, _ = stepwise(storage.int2(), policies.tova(budget=0.5, share_heads=False))
    evicted = 0
    for number, row, _, changed, slots in changes(steps):
        newest = int(LENGTHS[row]) + number
        assert changed == ({slots[newest]} if newest in slots else set())
        evicted += newest not in slots
    assert 5 < evicted < 55


def drifting() -> tuple[Codec, law.Codec]:
    """A codec that adds a quarter: what is encoded again without need is noticed."""

    def parts(dim: int, dtype: Any) -> dict:
        return {"number": ((dim,), jnp.dtype(jnp.float32))}

    ours = Codec(parts, lambda x, side, dtype: {"number": x + 0.25}, lambda parts, side, dim: parts["number"])
    return ours, lambda x: law.Held({"number": x + 0.25}, x + 0.25, math.inf)


def test_a_merge_encodes_only_what_took_something():
    ours, codec = drifting()
    held = Storage(key=ours, value=ours, name="drifting")
    steps, _ = stepwise(held, policies.window(budget=0.5, sinks=1, merge=policies.d2o()))
    policy = reference.window(budget=0.5, sinks=1)
    rows = law.replay(law.Storage(codec, codec), *of_heads("gqa"), LENGTHS, policy, fold=MERGES["d2o"][1])
    assert_same(steps.output, jax.tree.map(jnp.asarray, steps.layers[-1]), rows, held)
    merged = 0
    for number, row, head, changed, slots in changes(steps):
        took = rows[row].heads[head].merged[1 + number]  # the prompt is the first step
        assert changed == {slots[position] for position in {*took, int(LENGTHS[row]) + number}}
        merged += len(took)
    assert merged > 10


def test_parameters_and_exact_slots_are_in_the_models_dtype():
    """The policy looks at positions alone: probabilities of bfloat16 are others."""
    held, codec = storage.int4(residual=3), law.integer(4, dtype="bfloat16")
    prompt, decode = streams(SEED, (4, 2), DIM, LENGTHS, STEPS, [codec], dtype=jnp.bfloat16)
    output, layer = replay(held, prompt, decode, LENGTHS, OURS["window"])
    assert {leaf.dtype.name for leaf in jax.tree.leaves(layer.stores)} == {"uint8", "bfloat16"}
    rows = law.replay(law.Storage(codec, codec, 3), prompt, decode, LENGTHS, THEIRS["window"])
    assert_same(output, layer, rows, held, atol=5e-2)


def capacities(policy: policies.Policy, residual: int) -> tuple[int, ...]:
    """The least number of coded slots and of exact ones (STORAGE.md, "Capacities")."""
    budget = None if policy.budget is None else max(policy.budget.slots(int(n), 1)[0] for n in LENGTHS)
    evicts = budget is not None and policy.when == "step"
    most = TOTAL if budget is None else budget + (0 if evicts else STEPS)
    # The newest tokens that h2o and the window (which has a sink) never evict.
    newest = {"h2o": most // 2, "window": most - 1}.get(policy.name, 0) if evicts else 0
    if residual >= TOTAL:
        return (most + evicts,)  # a dense cache has room for the step's own token
    coded = most - (min(residual, most) if newest >= min(residual, most) else 0)
    if not evicts:
        coded = max(budget or 0, most - residual)
    return (coded, min(residual, most)) if residual else (coded,)


@pytest.mark.parametrize("residual", [0, 3, STEPS + 3, TOTAL])
@pytest.mark.parametrize("name", OURS)
def test_capacities_are_the_least(name, residual):
    case = layers.Case(layers.Streams(*random()[0]), LENGTHS, LENGTHS + STEPS)
    spec = CacheSpec(OURS[name], storage.int8(residual=residual))
    ((group,),) = layers.lowered(spec, case).layout.decode
    assert group.slots == capacities(OURS[name], residual)
