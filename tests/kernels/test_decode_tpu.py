"""The decode kernel for TPUs: interpreted, races detected, against float64."""

import bisect
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import attention
from kvjax.devices import topology_devices
from kvjax.errors import ConfigError
from kvjax.kernels import forms, registry
from kvjax.kernels.coded import Coded
from kvjax.kernels.decode import append_tpu, coded_tpu, codes_tpu, pallas_tpu
from kvjax.kernels.registry import Request
from kvjax.numerics.statistics import ABOVE, MASS
from kvjax.storage import Fp8, Integer, TurboQuant
from tests.kernels.cases import DECODE, Case, DecodeCases
from tests.kernels.codes import CODED
from tests.kernels.conftest import needs_libtpu


@pytest.fixture
def machine(interpreted):
    return 2e-6


class TestDecode(DecodeCases):
    implementation = "pallas_tpu"

    def small_tiles(self, monkeypatch, case):
        monkeypatch.setattr(pallas_tpu, "TILE_BYTES", 1 << 16)  # of 128 slots at D = 128 in float32: several tiles


def test_slots_are_cut_into_tiles():
    assert pallas_tpu.tiling(8, 37, 64, 4) == (37, 8), "few slots: a program takes several pairs"
    tile, pairs = pallas_tpu.tiling(8, 1 << 16, 128, 2)
    assert (tile % 128, pairs) == (0, 1)


def test_what_cannot_run_says_so():
    problem = DECODE[-1].problem(*DECODE[-1].arrays())
    with pytest.raises(ValueError, match="interpret mode"):
        attention.attend_and_reduce(problem, "pallas_tpu")[0].output.block_until_ready()
    two = Case((2,), 1, 1, 2, 8, 64, jnp.float32)
    with pytest.raises(ConfigError, match="decode/pallas_tpu: it takes one query per head, not 2"):
        pallas_tpu.attend_and_reduce(two.problem(*two.arrays()))


def small_chunks(monkeypatch):
    monkeypatch.setattr(coded_tpu, "CHUNK", 128)
    monkeypatch.setattr(coded_tpu, "TILE_BYTES", 1 << 14)  # of 128 slots of 128 bytes, and of 256 of 64


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CODED, ids=str)
def test_of_codes_it_is_that_of_what_they_decode_to(interpreted, monkeypatch, case):
    small_chunks(monkeypatch)
    case.check("pallas_tpu", 2e-6, rounded=False)


def lines(self, refs, pair, here, group, *, real=codes_tpu.Side.lines):
    """Takes the zero of integers that are not centred."""
    scale, zero = real(self, refs, pair, here, group)
    return scale, zero - scale


def in_planes(self, x, planes):
    """Takes channels in their own order."""
    return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("of", "mistake"), [(codes_tpu.Side, lines), (forms.Form, in_planes)])
def test_a_mistake_with_codes_is_noticed(interpreted, monkeypatch, of, mistake):
    small_chunks(monkeypatch)
    monkeypatch.setattr(of, mistake.__name__, mistake)
    with pytest.raises(AssertionError):
        CODED[1].check("pallas_tpu", 2e-6, rounded=False)


BATCH, KV_HEADS, GROUP, SLOTS, DIM = 8, 8, 4, 8192, 128


@needs_libtpu
@pytest.mark.parametrize(("group", "dim", "codec"), [(71, 64, Integer(4)), (1, 128, Integer(8, 32))], ids=str)
def test_what_is_said_to_fit_into_a_core_does(group, dim, codec):
    """The largest number of slots that the registry takes."""
    request = functools.partial(
        Request, batch=1, kv_heads=1, group=group, tokens=1, dim=dim, dtype="bfloat16", statistics=(ABOVE, MASS),
        parts=2, codecs=(codec, codec),
    )  # fmt: skip
    sizes = range(128, 1 << 20, 128)
    refuses = registry.find("decode", "pallas_tpu").refuses
    most = sizes[bisect.bisect_left(sizes, True, key=lambda slots: refuses(request(slots=slots)) is not None) - 1]
    assert "MiB of a TPU core's memory, more than 14 MiB" in refuses(request(slots=most + 128))
    mesh = Mesh(np.array(topology_devices("v5e:1x1")[:1]), ("x",))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    parts = {name: array((1, 1, most, *shape), dtype) for name, (shape, dtype) in codec.parts(dim, "bfloat16").items()}
    held = Coded(parts=parts, codec=codec, dim=dim, dtype=jnp.dtype("bfloat16"))

    def run(query, held, position, at):
        problem = attention.problem(
            query, held, held, query_position=at, key_position=position, needs=frozenset({ABOVE, MASS})
        )
        return attention.attend_and_reduce(problem, "pallas_tpu")

    with jax.set_mesh(mesh):
        query = array((1, group, 1, dim), jnp.bfloat16)
        jax.jit(run).lower(query, held, array((1, 1, most), jnp.int32), array((1, 1), jnp.int32)).compile()


def compiled(topology, codec):
    """One query over 8,192 slots and its own token, which is then written to a slot."""
    mesh = Mesh(np.array(topology_devices(topology)[:1]), ("x",))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    held = {
        name: array((BATCH, KV_HEADS, SLOTS, *shape), dtype)
        for name, (shape, dtype) in codec.parts(DIM, jnp.bfloat16).items()
    }
    query, own = (array((BATCH, heads, 1, DIM), jnp.bfloat16) for heads in (KV_HEADS * GROUP, KV_HEADS))

    def run(held, query, own, position, at, slot):
        about = {"query_position": at, "needs": frozenset({MASS})}
        first, last = (
            attention.problem(query, key, value, key_position=where, **about)
            for (key, value), where in (
                ([Coded(parts=x, codec=codec, dim=DIM, dtype=jnp.dtype(jnp.bfloat16)) for x in held], position),
                ((own, own), jnp.broadcast_to(at[:, None], (BATCH, KV_HEADS, 1))),
            )
        )
        output, columns = attention.attend_parts([first, last], "pallas_tpu")
        slot = jnp.where(output[:, :, 0, :, 0] > 0, slot, slot + 1)  # written after it was read
        made = codec.encode(own.astype(jnp.float32), None, jnp.bfloat16)
        return output, columns, [
            dict(zip(x, append_tpu.write(list(x.values()), slot, [made[name] for name in x]), strict=True))
            for x in held
        ]  # fmt: skip

    with jax.set_mesh(mesh):
        return jax.jit(run, donate_argnums=0).lower(
            [held, held], query, own, array((BATCH, KV_HEADS, SLOTS), jnp.int32), array((BATCH, 1), jnp.int32),
            array((BATCH, KV_HEADS, 1), jnp.int32),
        ).compile()  # fmt: skip


@pytest.mark.sampled(1)
@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "codec", "share"),
    [
        ("v5e:1x1", Integer(8), 0.56),
        ("v5e:1x1", Integer(4), 0.33),
        ("v6e:1x1", Integer(8), 0.56),
        ("v6e:1x1", Integer(4), 0.33),
        ("v5e:1x1", Fp8(), 0.56),
        ("v6e:1x1", TurboQuant(4), 0.33),
    ],
    ids=str,
)
def test_the_tpu_compiler_keeps_codes_where_they_are(topology, codec, share):
    """Codes take their bytes of memory and no more, in tiles too; they are read once, and written in place."""
    program = compiled(topology, codec)
    memory, exact = program.memory_analysis(), 2 * BATCH * KV_HEADS * SLOTS * DIM * 2
    held = sum(math.prod(shape) * dtype.itemsize for shape, dtype in codec.parts(DIM, jnp.bfloat16).values())
    assert memory.alias_size_in_bytes == 2 * BATCH * KV_HEADS * SLOTS * held, "donated, and tiles have no padding"
    assert memory.alias_size_in_bytes < share * exact
    codes = re.compile(r"= u8\[8,8,8192,\d+\]\S* (copy|transpose|fusion|scatter|pad|copy-start)\(")
    assert not codes.findall(program.as_text()), "no operation but the kernels has codes as its result"
    assert memory.temp_size_in_bytes < exact // 32
