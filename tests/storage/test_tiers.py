"""Tiers: what MiKV's policies evict is coded, against the worked case and a float64 reference; what it refuses."""

import functools
import itertools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec, LayerKV
from kvjax.cache.arrangements.tiers import max_evicted
from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import Lowered, lower
from kvjax.errors import PolicyError, StorageError
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.storage import Codec, Storage
from kvjax.storage.gradient import differentiable
from tests.laws import CLEAR, TIE, read, replay, streams
from tests.reference import policies as reference
from tests.reference import replay as rows_of
from tests.reference import tiers as law

DIM, WIDTH, STEPS, THETA = 6, 12, 9, 10_000.0
LENGTHS = np.array([12, 4, 9])
SEED = 0


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: `test_codecs` has what optimisations could change."""


@functools.cache
def random(kv_heads: int) -> tuple[rows_of.Triple, rows_of.Triple]:
    return streams(SEED, (4, kv_heads), DIM, LENGTHS, STEPS, [rows_of.integer(2, 3)])


class Case(NamedTuple):
    held: str
    policy: str
    kv_heads: int
    block: int | None = None

    @property
    def rope(self) -> Rope | None:
        return Rope(dim=DIM, theta=THETA) if self.policy == "window@cache" else None

    @functools.cache  # noqa: B019
    def run(self) -> tuple[jax.Array, LayerKV]:
        own, given = HELD[self.held], (*random(self.kv_heads), LENGTHS, OURS[self.policy], self.rope)
        return replay(own, *given, prefill_block=self.block)

    def expected(self, **mistake: Any) -> list[law.Row]:
        given = *random(self.kv_heads), LENGTHS, THEIRS[self.policy]
        theta = None if self.rope is None else THETA
        return law.replay(STORED[self.held]._replace(**mistake), *given, block=self.block, theta=theta)


def drifting() -> tuple[Storage, rows_of.Codec]:
    """A high tier that adds a quarter: multiples of a scale could be ties when they are coded again."""

    def parts(dim: int, dtype: Any) -> dict:
        return {"number": ((dim,), jnp.dtype(jnp.float32))}

    codec = Codec(parts, lambda x, side, dtype: {"number": x + 0.25}, lambda parts, side, dim: parts["number"])
    own = Storage(key=codec, value=codec, name="drifting")
    return own, lambda x: rows_of.Held({"number": x + 0.25}, x + 0.25, math.inf)


DRIFTING = drifting()
HELD = {
    "balanced": storage.mikv(2, 3),
    "queue": storage.mikv(2, 3, balance=False, low_capacity=4),
    "coded": storage.mikv(2, 3, high=DRIFTING[0], balance=False),
}
STORED = {
    "balanced": law.Mikv(rows_of.integer(2, 3)),
    "queue": law.Mikv(rows_of.integer(2, 3), balance=False, capacity=4),
    "coded": law.Mikv(rows_of.integer(2, 3), high=DRIFTING[1], balance=False),
}


def named(package: Any) -> dict[str, Any]:
    return {
        "h2o": package.h2o(budget=0.5),
        "scissorhands": package.scissorhands(budget=0.5, history=4),
        "knorm": package.knorm(budget=0.5),
        "value_norm(tova)": package.COMBINATORS["value_norm"](package.tova(budget=0.5, share_heads=False)),
        "window@cache": package.window(budget=4, sinks=1, positions="cache"),
    }


OURS, THEIRS = named(policies), named(reference)
CASES = [
    Case("balanced", "h2o", 2), Case("queue", "scissorhands", 2, 5), Case("coded", "value_norm(tova)", 1),
    Case("coded", "knorm", 4, 5), Case("balanced", "window@cache", 2),
]  # fmt: skip


def compare(output: jax.Array, layer: LayerKV, rows: list[law.Row], held: Storage) -> None:
    gap, near = (min(getattr(row, name) for row in rows) for name in ("gap", "near"))
    assert gap > CLEAR and near > TIE, f"a choice or a code of the reference is close ({gap:.1e}, {near:.1e})"
    key, value, position = read(held, layer)
    size = jax.tree.leaves(layer.stores[0])[0].shape[2]
    assert all(leaf.shape[2] == position.shape[2] - size for leaf in jax.tree.leaves(layer.stats))
    for row, expected in enumerate(rows):
        np.testing.assert_allclose(output[row], expected.output, atol=1e-4, err_msg=f"{row=}")
        for index, own in enumerate(expected.heads):
            about = f"{row=} head={index}"
            tiers = position[row, index, :size], position[row, index, size:]
            low, high = ({int(at): slot for slot, at in enumerate(tier) if at >= 0} for tier in tiers)
            assert sorted(high) == own.high.position.tolist(), about
            # In order of eviction, from the first slot on; a queue goes on where its oldest entry was.
            entries = [each.position for each in own.low]
            assert sorted(low) == sorted(entries), about
            first = low[entries[0]] if entries else 0
            assert [(low[each] - first) % size for each in entries] == list(range(len(entries))), about
            for at, slot in high.items():
                place = own.high.position.tolist().index(at)
                np.testing.assert_allclose(key[row, index, size + slot], own.high.key[place], atol=1e-5)
                np.testing.assert_allclose(value[row, index, size + slot], own.high.value[place], atol=1e-5)
                for name, stat in own.high.stats.items():
                    got = np.asarray(_statistic(layer, name)[row, index, slot])
                    np.testing.assert_allclose(
                        got, np.sum(stat[place]), rtol=1e-4, atol=1e-5, err_msg=f"{about} {name}"
                    )
            for each in own.low:
                slot = low[each.position]
                np.testing.assert_allclose(key[row, index, slot], each.key, atol=1e-5, err_msg=about)
                np.testing.assert_allclose(value[row, index, slot], each.value, atol=1e-5, err_msg=about)
                for side, made in zip(("key", "value"), each.held, strict=True):
                    got = np.asarray(layer.stores[0][side]["codes"][row, index, slot])
                    np.testing.assert_array_equal(got, made.parts["codes"], about)
            if own.balancer is not None:
                np.testing.assert_allclose(layer.sides["key"]["scale"][row, index], own.balancer, rtol=1e-6)


def _statistic(layer: LayerKV, name: str) -> np.ndarray:
    (found,) = (leaf for own, leaf in layer.stats.items() if own.split("[")[0] == name)
    return np.asarray(jnp.sum(jax.lax.population_count(found), axis=-1) if found.ndim == 4 else found)


def describe(case: Case) -> str:
    return f"{case.held}-{case.policy}-{case.kv_heads}-{case.block}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [pytest.param(each, marks=pytest.mark.thorough) for each in CASES], ids=describe)
def test_a_step_is_one_on_what_was_stored(case):
    compare(*case.run(), case.expected(), HELD[case.held])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("number", "mistake"),
    [
        (0, {"balance": False}), (0, {"attends_low": False}), (0, {"low": rows_of.integer(2, 2)}),
        (1, {"capacity": 5}), (1, {"observes_low": False}), (2, {"rounds_victims": True}), (2, {"high": None}),
    ],
    ids=["unbalanced", "evicted", "groups", "a longer queue", "above counts one tier", "rounded twice", "exact"],
)  # fmt: skip
def test_mistakes_are_noticed(number, mistake):
    case = CASES[number]
    with pytest.raises(AssertionError) as caught:
        compare(*case.run(), case.expected(**mistake), HELD[case.held])
    assert "is close" not in str(caught.value)


def test_victims_of_a_coded_tier_are_not_rounded_to_the_dtype_of_the_model():
    """The high tier decodes to x + 0.25, of which bfloat16 has fewer digits than codes of 8 bits tell apart."""
    tokens = np.random.default_rng(3).normal(size=(3, 1, 1, 64, 8)).astype(jnp.bfloat16)
    prompt, decode = (tuple(jnp.asarray(tokens[:, :, :, part])) for part in (slice(0, 32), slice(32, 64)))
    held = storage.mikv(8, 8, high=DRIFTING[0], balance=False)
    _, layer = storage.replay(held, prompt, decode, lengths=np.array([32]), policy=policies.window(32, sinks=0))
    low = layer.stores[0]["key"]["codes"]
    slots = [np.flatnonzero(layer.position[0, 0, : low.shape[2]] == at).item() for at in range(32)]
    exact = jnp.asarray(tokens[1, 0, 0, :32]).astype(jnp.float32) + 0.25
    codes, rounded = (
        storage.Integer(8, 8).encode(x.astype(jnp.float32), None, jnp.bfloat16)["codes"]
        for x in (exact, exact.astype(jnp.bfloat16))
    )
    assert (codes != rounded).any(), "the case tells them apart"
    np.testing.assert_array_equal(low[0, 0, slots], codes)


def test_the_worked_case(shared_data):
    case, examples = 14, np.load(shared_data / "examples" / "storage_cases.npz")
    about = json.loads(bytes(examples["cases"]))[case]
    held = storage.mikv(about["bits"], about["group"])
    prompt, decode = (
        tuple(examples[f"{case}_{name}_{phase}"] for name in ("query", "key", "value"))
        for phase in ("prompt", "decode")
    )
    policy = policies.h2o(about["policy"]["budget"])
    output, layer = storage.replay(held, prompt, decode, examples[f"{case}_lengths"], policy)
    np.testing.assert_allclose(output, examples[f"{case}_out"], atol=1e-4)
    size = layer.stores[0]["key"]["codes"].shape[2]
    for row in range(2):
        own = {name: examples[f"{case}_{name}_{row}_0"] for name in ("high", "low", "balancer")}
        low, high = np.split(np.asarray(layer.position)[row, 0], [size])
        np.testing.assert_array_equal(np.sort(high[high >= 0]), own["high"])
        np.testing.assert_array_equal(np.sort(low[low >= 0]), own["low"])
        np.testing.assert_allclose(layer.sides["key"]["scale"][row, 0], own["balancer"], rtol=1e-6)
        slots = [int(np.flatnonzero(low == at)[0]) for at in own["low"]]
        for side, name in itertools.product(("key", "value"), ("codes", "scale", "zero")):
            got = np.asarray(layer.stores[0][side][name])[row, 0, slots]
            expected = examples[f"{case}_low_{side}_{name}_{row}_0"]
            np.testing.assert_allclose(got, expected, rtol=0 if name == "codes" else 1e-5)
    assert storage.breakdown(layer)["sides"] == 2 * 8 * 4
    # The low tier has room for all that is evicted: 27 - 8 slots.
    assert layer.position.shape[2] == 27 and size == 19


def lowered(held: Storage, policy: Any, lengths: np.ndarray, steps: int, *, block: int | None = None) -> Lowered:
    config = DecoderConfig(
        family="llama", vocab_size=1, hidden_size=DIM, num_layers=3, num_heads=2, num_kv_heads=2, head_dim=DIM,
        mlp_size=1, max_positions=4096, rope=None,
    )  # fmt: skip
    width = int(lengths.max())
    limits = Limits(width, max(steps, 1), shortest=int(lengths.min()))
    sizes = sizes_for(lengths, steps, width=width, block=block, limits=limits, last_fed=True)
    spec = policy if isinstance(policy, CacheSpec) else CacheSpec(policy, held)
    return lower(spec, config, sizes, lengths)


@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        (policies.h2o(5), (16, 5)), (policies.h2o(0.25), (18, 3)), (policies.h2o(30), (21,)),
        (policies.snapkv(6, window=2), (6, 15)), (policies.adakv(policies.snapkv(6, window=2)), (11, 19)),
        (policies.after_prefill(policies.knorm(6), then=policies.roco(4, guard=1)), (17, 6)),
        (policies.h2o((21, 4, 3)), [(21,), (17, 4), (18, 3)]), (policies.window(0.2, sinks=1), (19, 2)),
    ],
)  # fmt: skip
def test_capacities(policy, slots):
    """Slots of a row of 12 tokens, which 9 follow: the low tier has the slots that the policy's budget does not."""
    layout = lowered(HELD["balanced"], policy, np.array([12, 4, 9]), 9).layout
    found = [group.slots for (group,) in layout.decode]
    assert found == (slots if isinstance(slots, list) else [slots] * 3)
    side = DIM * 4
    own, exact = HELD["balanced"].bytes_per_slot(DIM, "float32"), 2 * DIM * 4
    expected = sum(
        2 * ((low[0] * own + side) + low[1] * exact) if len(low) == 2 else 2 * low[0] * exact for low in found
    )
    assert layout.bytes() == expected


def test_most_that_is_evicted():
    """Slots of every length of a prompt: a share that falls as prompts grow is largest in the middle."""
    pyramid = policies.pyramidkv(12, window=2)
    most = max_evicted(pyramid, policies.full(), range(1, 41), 5, 3)
    by_hand = [
        max(n - min(n, slots) for n in range(1, 41) for slots in [pyramid.budget.slots(n, 3)[layer]])
        for layer in range(3)
    ]
    assert most == tuple(by_hand) and len(set(most)) > 1


@pytest.mark.sampled(0)
def test_gradients_pass_straight_through():
    prompt, decode = random(2)
    own = differentiable(HELD["coded"])

    def loss(prompt: Any) -> Any:
        output, _ = storage.replay(own, prompt, decode, LENGTHS, OURS["h2o"])
        return jnp.sum(output**2), output

    (_, output), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(prompt)
    np.testing.assert_allclose(output, replay(HELD["coded"], prompt, decode, LENGTHS, OURS["h2o"])[0], atol=1e-5)
    for slope in gradient[1:]:
        real = np.arange(WIDTH) < LENGTHS[:, None]
        size = np.abs(slope).max(axis=(1, 3))
        assert np.all(size[real] > 0) and np.all(size[~real] == 0), "what was evicted has a gradient too"


@pytest.mark.sampled(0)
def test_a_row_alone_is_the_row_in_a_batch():
    """Byte for byte, in tiers of other sizes."""
    row, held = 1, HELD["balanced"]
    prompt, decode = random(2)
    output, layer = replay(held, prompt, decode, LENGTHS, OURS["h2o"])
    own_prompt = tuple(x[row : row + 1, :, : LENGTHS[row]] for x in prompt)
    own_decode = tuple(x[row : row + 1] for x in decode)
    alone, own = replay(held, own_prompt, own_decode, LENGTHS[row : row + 1], OURS["h2o"])
    np.testing.assert_allclose(alone[0], output[row], atol=1e-6)
    for head in range(2):
        assert held_bytes(layer, row, head) == held_bytes(own, 0, head)


def held_bytes(layer: LayerKV, row: int, head: int) -> dict[int, list[bytes]]:
    """Position -> all bytes of its slot, and in which tier it is."""
    found, start = {}, 0
    for tier, store in enumerate(layer.stores):
        size = jax.tree.leaves(store)[0].shape[2]
        for slot, at in enumerate(np.asarray(layer.position)[row, head, start : start + size].tolist()):
            if at >= 0:
                found[at] = [bytes([tier]), *(np.asarray(x)[row, head, slot].tobytes() for x in jax.tree.leaves(store))]
        start += size
    return found


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (policies.full(), "storage mikv2 with policy full: it evicts nothing .* use a policy with a budget"),
        (
            policies.h2o(5, merge=policies.d2o()),
            "storage mikv2 with policy h2o: a merge folds .* without a merge",
        ),
        (policies.h2o(5, variant="masked"), "hides or chooses slots of one tier"),
        (CacheSpec(policies.snapkv(5, window=2), HELD["coded"], selection.optimal(3)), "selection=.*one tier"),
    ],
)
def test_what_does_not_compose_is_refused(spec, match):
    with pytest.raises((StorageError, PolicyError), match=match):
        lowered(HELD["balanced"], spec, LENGTHS, STEPS)


def test_prompts_in_blocks_need_no_balancer():
    with pytest.raises(StorageError, match="leave out prefill_block"):
        lowered(HELD["balanced"], policies.h2o(5), LENGTHS, STEPS, block=5)
    assert lowered(HELD["coded"], policies.h2o(5), LENGTHS, STEPS, block=5).layout.prompt[0][0].slots == (16, 5)


@pytest.mark.parametrize(("dtype", "query", "key"), [("float32", 1e-22, 1e18), ("float16", 1e-7, 6e4)])
def test_a_balance_of_very_small_queries_and_large_keys(dtype, query, key):
    """The quotient of both is no number of the dtype, or rounds to 0."""
    rng, width = np.random.default_rng(0), 12
    given = [rng.uniform(0.5, 1, size=(1, 2, width, 8)) for _ in range(3)]
    given[0][..., 0] *= query
    given[1][..., 0] *= key
    prompt, new = (tuple(jnp.asarray(x[:, :, own], dtype) for x in given) for own in (slice(9), slice(9, width)))
    output, layer = storage.replay(storage.mikv(4), prompt, new, np.array([9]), policies.h2o(4))
    assert np.isfinite(np.asarray(output, np.float32)).all()
    scale = np.asarray(layer.sides["key"]["scale"], np.float64)[..., 0]
    largest = [np.abs(np.asarray(x, np.float64)[..., 0]).max(axis=2) for x in prompt[:2]]
    np.testing.assert_allclose(scale, np.sqrt(largest[0] / largest[1]), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: storage.mikv(0), "bits must be a whole number from 1 to 8; got 0"),
        (lambda: storage.mikv(low_capacity=0), "low_capacity must be a whole number of at least 1; got 0"),
        (lambda: storage.tiers(storage.dense(), low_capacity=2.5), "low_capacity must be a whole number .* got 2.5"),
        (lambda: storage.mikv(balance=1), "balance=1 must be True or False"),
        (lambda: storage.mikv(high=storage.int8(residual=3)), "high=.* must be a storage of single slots on"),
        (lambda: storage.mikv(high=storage.kivi()), "high=.* must be a storage of single slots"),
        (lambda: storage.mikv(high=8), "high=8 must be a storage"),
        (
            lambda: Storage(key=storage.Exact(), value=storage.Exact(), layout=storage.tiers(storage.dense())),
            "other than Exact, for the low tier",
        ),
        (
            lambda: Storage(key=storage.Integer(2), value=storage.Integer(2), layout=storage.tiers(storage.dense()),
                            residual=3),
            "residual=3 and frame='any' are not valid with tiers",
        ),
        (
            lambda: Storage(key=storage.Integer(2), value=storage.Integer(2), layout=storage.tiers(storage.dense()),
                            memory="host"),
            "memory='host' and sinks=0 are not valid with layout=Tiers",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(build: Callable[[], Any], match: str):
    with pytest.raises(StorageError, match=match):
        build()
