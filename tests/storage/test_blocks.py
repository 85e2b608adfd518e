"""Blocks of consecutive tokens: KIVI against the worked case and a float64 reference, its bytes, what it refuses."""

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, selection, storage
from kvjax.cache import Block, CacheSpec, LayerKV
from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import Lowered, lower
from kvjax.cache.state import EMPTY
from kvjax.cache.step.step import step
from kvjax.errors import StorageError
from kvjax.models.config import DecoderConfig
from kvjax.storage import Channels, Storage
from kvjax.storage.gradient import differentiable
from tests.laws import CLEAR, TIE, live, read, replay, streams
from tests.reference import blocks as law
from tests.reference import policies as reference
from tests.reference import replay as rows_of
from tests.reference.base import Policy

DIM, WIDTH, STEPS, THETA = 6, 13, 11, 10_000.0
BITS, GROUP, RESIDUAL = 2, 2, 4
LENGTHS = np.array([13, 3, 8])  # a row shorter than a block, and one of whole blocks
HELD = storage.kivi(BITS, GROUP, RESIDUAL)
pytestmark = pytest.mark.filterwarnings("ignore:storage kivi.*takes:UserWarning")  # small groups
SEED = 0


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: `test_codecs` has what optimisations could change."""


def value_codec() -> rows_of.Codec:
    return rows_of.integer(BITS, GROUP)


@functools.cache
def random(kv_heads: int) -> tuple[rows_of.Triple, rows_of.Triple]:
    return streams(SEED, (4, kv_heads), DIM, LENGTHS, STEPS, [value_codec()])


class Case(NamedTuple):
    policy: str
    kv_heads: int
    block: int | None

    @functools.cache  # noqa: B019
    def run(self) -> tuple[jax.Array, LayerKV]:
        return replay(HELD, *random(self.kv_heads), LENGTHS, OURS[self.policy], prefill_block=self.block)

    def expected(self, **mistake: Any) -> tuple[law.Kivi, list[rows_of.Row]]:
        stored = law.Kivi(**{"bits": BITS, "group": GROUP, "residual": RESIDUAL, "value": value_codec()} | mistake)
        given = *random(self.kv_heads), LENGTHS, THEIRS[self.policy]
        return stored, rows_of.replay(stored, *given, block=self.block)


def named(package: Any) -> dict[str, Any]:
    return {
        "full": package.full(),
        "knorm": package.knorm(budget=0.7),  # drops new tokens too, and keeps 2 to 9
    }


OURS: dict[str, policies.Policy] = named(policies)
THEIRS: dict[str, Policy] = named(reference)
#: Blocks of the prompt that fill several blocks of keys at once, and part of one.
CASES = [Case("full", 2, None), Case("full", 4, 9), Case("knorm", 1, 5)]


def compare(output: jax.Array, layer: LayerKV, stored: law.Kivi, rows: list[rows_of.Row]) -> None:
    gap, near = (min(getattr(row, name) for row in rows) for name in ("gap", "near"))
    assert gap > CLEAR and near > TIE, f"a choice or a code of the reference is close ({gap:.1e}, {near:.1e})"
    key, value, position = read(HELD, layer)
    store = jax.tree.map(np.asarray, layer.stores[0])
    for row, expected in enumerate(rows):
        np.testing.assert_allclose(output[row], expected.output, atol=1e-4, err_msg=f"{row=}")
        for head, slots in enumerate(expected.heads):
            about, own, count = f"{row=} {head=}", stored.coded[id(slots)], len(slots.head.position)
            # A token's slot is its place in the order of positions.
            np.testing.assert_array_equal(position[row, head, :count], slots.head.position, about)
            assert np.all(position[row, head, count:] == EMPTY), about
            np.testing.assert_allclose(key[row, head, :count], slots.head.key, atol=1e-5, err_msg=about)
            np.testing.assert_allclose(value[row, head, :count], slots.head.value, atol=1e-5, err_msg=about)
            for side, coded in (("key", own.key), ("value", own.value)):
                assert int(layer.marks[side][row, head]) == len(coded), about
                parts = store[side]["codes"][row, head]
                codes = parts.reshape(-1, parts.shape[-1])[: len(coded)]
                np.testing.assert_array_equal(codes, np.reshape(list(coded.values()), codes.shape), about)
            for name, numbers in (("scale", own.scale), ("zero", own.zero)):
                got = store["key"][name][row, head].reshape(-1, DIM)[: len(numbers)]
                np.testing.assert_allclose(got, np.reshape(numbers, got.shape), rtol=1e-5, atol=1e-6)


def describe(case: Case) -> str:
    return f"{case.policy}-{case.kv_heads}-{case.block}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [pytest.param(each, marks=pytest.mark.thorough) for each in CASES], ids=describe)
def test_a_step_is_one_on_what_was_stored(case):
    compare(*case.run(), *case.expected())


@pytest.mark.parametrize(
    "mistake",
    [
        {"residual": RESIDUAL + GROUP}, {"group": RESIDUAL}, {"value": rows_of.integer(BITS, 3)},
        {"whole": lambda tokens: max(tokens - RESIDUAL, 0) // RESIDUAL * RESIDUAL}, {"whole": lambda tokens: 0},
    ],
    ids=["residual", "group", "groups of values", "flushed late", "never flushed"],
)  # fmt: skip
def test_mistakes_are_noticed(mistake):
    with pytest.raises(AssertionError) as caught:
        compare(*CASES[0].run(), *CASES[0].expected(**mistake))
    assert "is close" not in str(caught.value)


def test_the_worked_case(shared_data):
    case, examples = 10, np.load(shared_data / "examples" / "storage_cases.npz")
    about = json.loads(bytes(examples["cases"]))[case]
    held = storage.kivi(about["bits"], about["group"], about["residual"])
    prompt, decode = (
        tuple(examples[f"{case}_{name}_{phase}"] for name in ("query", "key", "value"))
        for phase in ("prompt", "decode")
    )
    lengths, steps = examples[f"{case}_lengths"], decode[0].shape[2]
    output, layer = storage.replay(held, prompt, decode, lengths)
    np.testing.assert_allclose(output, examples[f"{case}_out"], atol=1e-4)
    key, value, _ = read(held, layer)
    for row, length in enumerate(lengths):
        own = {name: examples[f"{case}_{name}_{row}_0"] for name in KIVI_ARRAYS}
        for side, decoded in (("key", key), ("value", value)):
            coded = len(own[f"{side}_codes"])
            assert int(layer.marks[side][row, 0]) == coded
            np.testing.assert_array_equal(decoded[row, 0, coded : length + steps], own[f"{side}_tail"])
            for name in ("codes", "scale", "zero"):
                expected = own[f"{side}_{name}"]
                got = np.asarray(layer.stores[0][side][name])[row, 0].reshape(-1, expected.shape[-1])
                np.testing.assert_allclose(got[: len(expected)], expected, rtol=1e-6 if name != "codes" else 0)
        # Alone, a row has arrays of the least size.
        layout = lowered(held, policies.full(), length[None], steps, dim=prompt[1].shape[3]).layout
        assert layout.bytes() == about["bytes_per_head"][row]
    assert storage.nbytes(layer) == 3 * about["bytes_per_head"][0]


KIVI_ARRAYS = [f"{side}_{name}" for side in ("key", "value") for name in ("codes", "scale", "zero", "tail")]


def lowered(
    held: Storage, policy: Any, lengths: np.ndarray, steps: int, *, dim: int = DIM, block: int | None = None,
    layers: int = 1, heads: int = 1, dtype: str = "float32",
) -> Lowered:  # fmt: skip
    config = DecoderConfig(
        family="llama", vocab_size=1, hidden_size=dim, num_layers=layers, num_heads=heads, num_kv_heads=heads,
        head_dim=dim, mlp_size=1, max_positions=4096, rope=None,
    )  # fmt: skip
    width = int(lengths.max())
    limits = Limits(width, max(steps, 1), shortest=int(lengths.min()))
    sizes = sizes_for(lengths, steps, width=width, block=block, limits=limits, last_fed=True)
    spec = policy if isinstance(policy, CacheSpec) else CacheSpec(policy, held)
    return lower(spec, config, sizes, lengths, dtype=dtype)


@pytest.mark.parametrize(("dim", "residual"), [(6, 4), (7, 4), (6, 8), (128, 128)])
def test_bytes_are_those_of_the_definition(dim, residual):
    held = storage.kivi(2, 4, residual)
    for total in (2, residual - 1, residual, residual + 1, 5 * residual - 1, 5 * residual):
        layout = lowered(held, policies.full(), np.array([total - 1]), 1, dim=dim).layout
        assert [layout.bytes()] == law.formula([total], dim, 2, 4, residual)
    # A compressor that may drop its newest tokens leaves all that it keeps to be encoded.
    kept, steps = 2 * residual + 1, 3
    after = lowered(held, policies.knorm(kept), np.array([4 * residual]), steps, dim=dim).layout
    whole = law.formula([kept + steps], dim, 2, 4, residual)[0]
    more = max(kept, kept + steps - residual) - (kept + steps - residual)
    assert after.bytes() == whole + more * held.bytes_of("value", dim, "float32")


def test_what_is_never_full_is_a_dense_cache():
    lengths, steps = np.array([7, 4]), 5
    dense = lowered(storage.dense(), policies.full(), lengths, steps).layout
    assert lowered(storage.kivi(2, 1, 13), policies.full(), lengths, steps).layout == dense
    filled = lowered(storage.kivi(2, 1, 12), policies.full(), lengths, steps).layout
    assert filled != dense and filled.groups[0].capacity == 12


def test_bytes_of_a_token_at_a_size_that_is_used():
    """Bytes of 128 channels in bfloat16, without the exact tokens: 2 bits and two parameters per 32 numbers."""
    assert storage.kivi().bytes_per_slot(128, jnp.bfloat16) == 96
    assert storage.kivi(4).bytes_per_slot(128, jnp.bfloat16) == 160


@pytest.mark.thorough
def test_slots_that_are_hidden_are_the_same_ones():
    """A policy that hides tokens keeps numbers of each: with 8 bits it hides those that it hides of a dense cache."""
    policy, given = policies.h2o(0.5, variant="masked"), (*random(2), LENGTHS)
    (output, layer), (plain, dense) = (
        replay(held, *given, policy) for held in (storage.kivi(8, 2, 4), storage.dense())
    )
    np.testing.assert_allclose(output, plain, atol=0.05)
    assert layer.index.keys() == dense.index.keys() == {"allowed", "mass"}
    for row, head in itertools.product(range(3), range(2)):
        for position, slot in live(dense, row, head).items():
            assert layer.index["allowed"][row, head, position] == dense.index["allowed"][row, head, slot]
            np.testing.assert_allclose(layer.index["mass"][row, head, position], dense.index["mass"][row, head, slot],
                                       atol=0.05)  # fmt: skip


@functools.cache
def stepwise(spoiled: bool, only: int | None = None) -> tuple[np.ndarray, LayerKV]:
    """The steps of some rows; `spoiled`: with rubbish wherever nothing is held, before each of them."""
    prompt, decode = random(2)
    lengths = LENGTHS if only is None else LENGTHS[only : only + 1]
    if only is not None:
        prompt = tuple(x[only : only + 1, :, : lengths[0]] for x in prompt)
        decode = tuple(x[only : only + 1] for x in decode)
    layout, budgets = lowered(HELD, policies.full(), lengths, STEPS)
    ((before,),), ((after,),) = layout.prompt, layout.decode
    n = jnp.asarray(lengths, jnp.int32)
    about = {"prompt": n, "total": n + STEPS, "budget": budgets.decode}
    position = np.where(np.arange(lengths.max()) < lengths[:, None], np.arange(lengths.max()), EMPTY)

    @jax.jit
    def run(prompt: Any, decode: Any) -> Any:
        block = Block(position=jnp.asarray(position, jnp.int32), **about)
        _, layer, _ = step(None, *prompt, block=block, group=before)

        def one(layer: LayerKV, inputs: Any) -> Any:
            number, *own = inputs
            layer = spoil(layer) if spoiled else layer
            block = Block(position=(n + number)[:, None], **about)
            output, layer, _ = step(layer, *(x[:, :, None] for x in own), block=block, group=after)
            return layer, output[:, :, 0]

        inputs = jnp.arange(STEPS, dtype=jnp.int32), *(jnp.moveaxis(x, 2, 0) for x in decode)
        layer, output = jax.lax.scan(one, layer, inputs)
        return jnp.moveaxis(output, 0, 2), layer

    return jax.tree.map(np.asarray, run(prompt, decode))


def spoil(layer: LayerKV) -> LayerKV:
    """The layer with 255 and large numbers in units that are not encoded, and in exact entries that hold no token."""
    held = jnp.sum(layer.position >= 0, axis=2, keepdims=True)
    store: dict[str, Any] = {}
    for side, parts in layer.stores[0].items():
        mark, unit = layer.marks[side][..., None], {"key": RESIDUAL, "value": 1}[side]
        entries = parts["exact"].shape[2]
        slots = mark + (jnp.arange(entries) - mark) % entries
        empty = {name: jnp.arange(part.shape[2]) >= mark // unit for name, part in parts.items()} | {
            "exact": slots >= held
        }
        store[side] = {
            name: jnp.where(
                empty[name].reshape(*empty[name].shape, *(1,) * (part.ndim - 3)),
                jnp.asarray(255 if part.dtype == jnp.uint8 else 1e30, part.dtype),
                part,
            )
            for name, part in parts.items()
        }
    return layer.replace(stores=(store,))


def held_bytes(layer: LayerKV, row: int, head: int) -> list[bytes]:
    """All that is encoded of a head, and its exact tokens in order."""
    found = []
    count = int((layer.position[row, head] >= 0).sum())
    for side, parts in layer.stores[0].items():
        mark, unit = int(layer.marks[side][row, head]), {"key": RESIDUAL, "value": 1}[side]
        entries = parts["exact"][row, head]
        found += [part[row, head, : mark // unit].tobytes() for name, part in parts.items() if name != "exact"]
        found += [entries[slot % len(entries)].tobytes() for slot in range(mark, count)]
    return found


@pytest.mark.sampled(0)
def test_a_row_alone_is_the_row_in_a_batch():
    """Byte for byte, though other rows fill their blocks at other steps."""
    row = 1
    output, layer = stepwise(False)
    own_output, own = stepwise(False, row)
    np.testing.assert_allclose(own_output[0], output[row], atol=1e-6)
    for head in range(2):
        assert held_bytes(own, 0, head) == held_bytes(layer, row, head)


def test_what_is_not_held_does_not_matter():
    (output, layer), (spoiled, other) = stepwise(False), stepwise(True)
    np.testing.assert_array_equal(output, spoiled)
    for row, head in itertools.product(range(3), range(2)):
        assert held_bytes(layer, row, head) == held_bytes(other, row, head)
        assert list(live(layer, row, head)) == list(range(LENGTHS[row] + STEPS))


@pytest.mark.parametrize(("bits", "group", "dim", "dtype"), [(2, 4, 7, "float32"), (3, 2, 8, "bfloat16")])
def test_channels_are_the_reference(bits, group, dim, dtype):
    """Channels that are constant or zero, and an odd number of them."""
    codec, x = Channels(bits, group), np.random.default_rng(3).normal(size=(5, 8, dim)).astype(np.float32)
    x[1, :, 0], x[2], x[3, :, 1] = 0.7, 0, x[3, :, 1] + 60
    parts = jax.tree.map(np.asarray, codec.encode(jnp.asarray(x), None, jnp.dtype(dtype)))
    back = np.asarray(codec.decode(parts, None, 8, dim))
    assert {name: (part.shape[1:], part.dtype) for name, part in parts.items()} == codec.parts(8, dim, dtype)
    for block, (start, end) in itertools.product(range(5), itertools.pairwise(range(0, 9, group))):
        codes, scale, zero, decoded, near = law.channels(x[block, start:end].astype(np.float64), bits, dtype)
        assert near > TIE, "use another seed"
        np.testing.assert_array_equal(parts["codes"][block, start:end], codes)
        np.testing.assert_allclose(parts["scale"][block, start // group].astype(float), scale, rtol=1e-6)
        np.testing.assert_allclose(parts["zero"][block, start // group].astype(float), zero, rtol=1e-6)
        np.testing.assert_allclose(back[block, start:end], decoded, atol=1e-4)
    if dtype == "float32":
        np.testing.assert_array_equal(back[1, :, 0], np.float32(0.7))
    np.testing.assert_array_equal(back[2], 0)


@pytest.mark.sampled(0)
def test_gradients_pass_straight_through():
    """The same outputs, and gradients of all that is read: the prompt's keys and values in blocks too."""
    prompt, decode = random(1)
    own = differentiable(HELD)

    def loss(prompt: Any) -> Any:
        output, _ = storage.replay(own, prompt, decode, LENGTHS)
        return jnp.sum(output**2), output

    (_, output), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(prompt)
    np.testing.assert_allclose(output, replay(HELD, prompt, decode, LENGTHS)[0], atol=1e-5)
    for slope in gradient[1:]:
        real = np.arange(WIDTH) < LENGTHS[:, None]
        size = np.abs(slope).max(axis=(1, 3))
        assert np.all(size[real] > 0) and np.all(size[~real] == 0) and np.all(np.isfinite(slope))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (policies.h2o(0.5), "storage kivi2 with policy h2o: it evicts .* use full, a prompt compressor such as snapkv"),
        (
            policies.window(0.5, merge=policies.d2o()),
            "storage kivi2 with policy window: a merge .* without a merge",
        ),
        (policies.after_prefill(policies.knorm(0.5), then=policies.roco(0.4)), "evicts tokens of blocks"),
    ],
)
def test_what_does_not_compose_is_refused(spec, match):
    with pytest.raises(StorageError, match=match):
        lowered(HELD, spec, LENGTHS, STEPS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "look", [selection.optimal(3), selection.quest(2, 8, first_layer=0)], ids=lambda look: look.name
)
def test_a_selection_reads_slots_of_blocks(look):
    """The last step reads what numpy chooses from the cache before it."""
    prompt, decode = random(2)
    output, _ = replay(HELD, prompt, decode, LENGTHS, selection=look)
    earlier = tuple(x[:, :, :-1] for x in decode)
    key, value, position = (
        np.asarray(x, np.float64) for x in storage.read(HELD, replay(HELD, prompt, earlier, LENGTHS)[1])
    )
    for row, head in np.ndindex(3, 2):
        count = LENGTHS[row] + STEPS - 1
        own = [
            np.concatenate([x[row, head, :count], new[row, head, -1:]])
            for x, new in ((key, decode[1]), (value, decode[2]))
        ]
        exact = np.concatenate([prompt[1][row, head, : LENGTHS[row]], decode[1][row, head]])
        assert position[row, head, :count].tolist() == list(range(count))
        query = decode[0][row, 2 * head : 2 * head + 2, -1]
        logits = query @ own[0].T / np.sqrt(DIM)
        if look.name == "optimal":
            share = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            chosen = np.argsort(share.mean(axis=0)[:-1])[-look.n :]
        else:
            # Bounds of each page's exact keys, and the page of the new token.
            pages = [
                exact[:count][start : start + look.page]
                for start in range(0, count // look.page * look.page, look.page)
            ]
            bound = np.array([[np.maximum(q * page.min(0), q * page.max(0)).sum() for page in pages] for q in query])
            best = np.argsort((bound - bound.max(axis=1, keepdims=True)).max(axis=0))[-(max(3, 8 // look.page) - 1) :]
            chosen = np.concatenate([np.arange(page * look.page, (page + 1) * look.page) for page in best])
            chosen = np.union1d(chosen, np.arange(count // look.page * look.page, count))
        read = np.append(chosen, count).astype(int)
        weight = np.exp(logits[:, read])
        expected = weight / weight.sum(axis=1, keepdims=True) @ own[1][read]
        np.testing.assert_allclose(
            output[row, 2 * head : 2 * head + 2, -1], expected, atol=1e-4, err_msg=f"{row=} {head=}"
        )


@pytest.mark.parametrize(
    "policy",
    [policies.full(), policies.full(positions="cache"), policies.snapkv(0.9, window=1), policies.knorm(0.5),
     policies.after_prefill(policies.knorm(0.5), then=policies.full()), policies.h2o(0.5, variant="masked")],
)  # fmt: skip
def test_what_composes_is_lowered(policy):
    for block in (None, 5):
        assert lowered(HELD, policy, LENGTHS, STEPS, block=block).layout.groups[0].storage == HELD


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: storage.kivi(2, 32, 100), "residual=100 must be a multiple of group=32; use 128"),
        (lambda: storage.kivi(9), "bits must be a whole number from 1 to 8; got 9"),
        (lambda: storage.kivi(residual=0), "storage kivi: residual must be a whole number of at least 1; got 0"),
        (lambda: storage.blocks(0), "blocks: size must be a whole number of at least 1; got 0"),
        (lambda: Storage(key=Channels(2, 4), value=storage.Exact()), "of blocks only with layout=blocks"),
        (
            lambda: Storage(key=storage.Integer(2), value=storage.Exact(), layout=storage.blocks(4)),
            "layout=Blocks\\(size=4\\) needs a BlockCodec; use layout='slots'",
        ),
        (
            lambda: Storage(key=Channels(2, 4), value=Channels(2, 4), layout=storage.blocks(4), residual=4),
            "residual=4 is for single vectors",
        ),
        (
            lambda: Storage(key=Channels(2, 3), value=Channels(2, 4), layout=storage.blocks(4)),
            "blocks of 4 tokens cannot be divided into groups of 3",
        ),
        (
            lambda: Storage(key=Channels(2, 4), value=storage.Exact(), layout=storage.blocks(4), memory="host"),
            "memory='host' and sinks=0 are not valid with layout=Blocks",
        ),
        (lambda: storage.BlockCodec(len, len, 3), "decode=3 must be a function"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(build: Callable[[], Any], match: str):
    with pytest.raises(StorageError, match=match):
        build()
