"""Which kernel is chosen, why the others refuse, and that a policy's jaxpr decides whether a kernel traces it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import policies
from kvjax.devices import topology_devices
from kvjax.errors import ConfigError
from kvjax.kernels import rank1, registry
from kvjax.kernels.registry import Choice, Request, choose
from kvjax.kernels.step import trace as tracing
from kvjax.numerics.statistics import MASS, prompt_tail, recent_above, recurrence
from kvjax.storage import Fp8, Integer, Levels, Rotated, TurboQuant
from tests.kernels.conftest import needs_libtpu
from tests.kernels.traces import EVERY_PRIMITIVE, TRACED, policy, trace_of

BACKENDS = ("pallas_tpu", "pallas_gpu")


def request(name="h2o", **changes) -> Request:
    """A step of a policy that every kernel takes, if it can trace the policy."""
    own = policy(name)
    facts = {
        "batch": 2048, "kv_heads": 4, "group": 1, "tokens": 1, "slots": 64, "dim": 64, "dtype": "float32",
        "statistics": tuple(sorted(own.needs, key=lambda s: s.name)),
        "trace": trace_of(own),
    }  # fmt: skip
    return Request(**facts | changes)


def test_every_registered_policy_has_a_verdict():
    """A step with statistics of what a selection chose is no kernel's, whatever the policy's trace."""
    assert set(policies.POLICIES) <= {*TRACED, "lru", "counter", "lazy"}
    for name in ("lru", "counter"):
        assert all(each.of_selection for each in policy(name).needs)
        extras = ("statistics of what a selection chose",)
        assert choose("step", "pallas_tpu", request(name, extras=extras)).op == "decode"


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hits_and_gaps_are_of_xla_alone(backend, tokens):
    chosen = choose("step", backend, request("lazy", tokens=tokens))
    assert chosen.implementation == "xla"
    assert "statistic recurrence(0.1) depends on their positions" in chosen.reasons[-1]


@pytest.mark.sampled(28)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TRACED)
def test_the_jaxpr_decides_as_the_flags_did(name, backend):
    traced = TRACED[name] and not (name == "tova" and backend == "pallas_gpu")
    chosen = choose("step", backend, request(name))
    assert chosen.op == ("step" if traced else "decode")
    assert len(chosen.reasons) == (not traced)


@pytest.mark.parametrize(
    ("name", "backend", "reason"),
    [
        ("random", "pallas_tpu", "the policy cannot be traced from positions and statistics alone (TypeError: keys"),
        (
            "knorm",
            "pallas_gpu",
            "the policy cannot be traced from positions and statistics alone (AttributeError: keys",
        ),
        ("snapkv", "pallas_tpu", "statistic tail[2] is of the prompt's end, and the step is of decoding"),
        ("tova", "pallas_gpu", "the policy compares heads, which are on several programs"),
    ],
)
def test_a_policy_that_cannot_be_traced_is_named(name, backend, reason):
    (given,) = choose("step", backend, request(name)).reasons
    assert given.startswith(f"step/{backend}: {reason}")


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        ("pallas_tpu", {"tokens": 8}, "it takes one token per row, not 8"),
        (
            "pallas_gpu", {"extras": ("a merge", "storage int8")},
            "it does no more than append, attend, observe and evict, but the step has a merge, storage int8",
        ),
        ("pallas_tpu", {"statistics": (recent_above(20),)}, "statistic above[20] is 2 words per slot, not one float32"),
        ("pallas_tpu", {"statistics": (recurrence(0.5),)}, "statistic recurrence(0.5) is 2 numbers per slot, not one"),
        (
            "pallas_tpu", {"statistics": (prompt_tail(9),)},
            "statistic tail[9] is of the prompt's end, and the step is of decoding",
        ),
        ("pallas_tpu", {"parts": 2}, "it attends to one part, under one window for all rows"),
        ("pallas_tpu", {"soft_cap": True}, "it has no soft-cap of the logits"),
        ("pallas_gpu", {"soft_cap": True}, "it has no soft-cap of the logits"),
        ("pallas_tpu", {"trace": None}, "no policy was given that could be traced"),
        (
            "pallas_tpu", {"parts": 3, "codecs": (Integer(4), Integer(4))},
            "it attends to one part, under one window for all rows",
        ),
        (
            "pallas_tpu", {"parts": 2, "codecs": (Integer(4), Integer(4)), "slots": 192},
            "it takes codes of a multiple of 128 slots, not of 192",
        ),
        (
            "pallas_gpu", {"parts": 2, "codecs": (Integer(4, 32), Integer(4, 32))},
            "it reads codes whose groups have a multiple of 64 channels, not 32",
        ),
        (
            "pallas_gpu", {"parts": 3, "codecs": (Integer(4), Integer(4))},
            "it attends to one part, under one window for all rows",
        ),
        (
            "pallas_tpu", {"slots": 1 << 17},
            "131072 slots of 4 heads of 64 would hold 92.3 MiB of a TPU core's memory, more than 16 MiB",
        ),
        ("pallas_gpu", {"slots": 830}, "a program takes 64 to 4096 slots, a multiple of 8, not 830"),
        ("pallas_gpu", {"slots": 56}, "a program takes 64 to 4096 slots, a multiple of 8, not 56"),
        ("pallas_gpu", {"slots": 4104}, "a program takes 64 to 4096 slots, a multiple of 8, not 4104"),
        ("pallas_gpu", {"dim": 72}, "it takes head sizes of 64 to 256, a multiple of 16, not 72"),
        (
            "pallas_gpu", {"batch": 1, "slots": 1024},
            "4 (row, KV head) pairs do not fill a GPU with one program each, so that several share 1024 slots",
        ),
        (
            "pallas_gpu", {"group": 71, "slots": 4096, "dtype": "bfloat16"},
            "4096 slots of 71 x 64 in bfloat16 with 1 statistics exceed a program's memory",
        ),
        ("pallas_gpu", {"group": 71, "dim": 256}, "71 heads of 256 in float32 exceed the shared memory of a GPU"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_a_step_is_refused_with_a_reason(backend, changes, reason):
    chosen = choose("step", backend, request(**changes))
    assert chosen.reasons[0] == f"step/{backend}: {reason}"
    assert chosen.op == ("prefill" if "tokens" in changes else "decode")


@pytest.mark.parametrize(
    ("op", "backend", "changes", "reason"),
    [
        ("decode", "pallas_tpu", {"parts": 3}, "it attends to one part, not to several parts (3)"),
        (
            "decode", "pallas_tpu", {"parts": 2, "codecs": (Integer(4), Levels(4))},
            "it reads codes of int2, int4, int8, fp8, turboquant(2) and turboquant(4), not "
            "Levels(bits=4, table=None, qnorm=False)",
        ),
        (
            "decode", "pallas_tpu", {"parts": 2, "codecs": (Integer(8), None)},
            "it reads codes of int2, int4, int8, fp8, turboquant(2) and turboquant(4), not vectors in float32",
        ),
        (
            "decode", "pallas_tpu", {"dim": 80, "codecs": (Integer(4), Integer(4))},
            "it reads vectors of a multiple of 32 bytes of codes, not of 40",
        ),
        (
            "decode", "pallas_gpu", {"codecs": (Integer(4), Integer(8))},
            "it reads keys and values of one codec, not Integer(bits=4, group=64) and Integer(bits=8, group=64)",
        ),
        (
            "decode", "pallas_gpu", {"codecs": (Levels(4), Levels(4))},
            f"it reads codes of int2, int4, int8, fp8, turboquant(2) and turboquant(4), not {Levels(4)!r}",
        ),
        (
            "decode", "pallas_gpu", {"codecs": (Integer(4, 32), Integer(4, 32))},
            "it reads codes whose groups have a multiple of 64 channels, not 32",
        ),
        (
            "prefill", "pallas_tpu", {"tokens": 9, "codecs": (Integer(4), Integer(4))},
            "it reads keys and values in float32, not codes",
        ),
        ("prefill", "pallas_gpu", {"tokens": 9, "parts": 2}, "it attends to one part, not to several parts (2)"),
        ("prefill", "pallas_tpu", {"tokens": 9, "band": True}, "it takes one window for all rows, not a band per row"),
        ("decode", "pallas_gpu", {"dim": 32}, "it takes head sizes of 64 to 256, a multiple of 16, not 32"),
        (
            "prefill", "pallas_gpu", {"tokens": 9, "dim": 272},
            "it takes head sizes of 64 to 256, a multiple of 16, not 272",
        ),
        (
            "decode", "pallas_gpu", {"group": 71, "dim": 256},
            "71 heads of 256 in float32 exceed the shared memory of a GPU",
        ),
        (
            "prefill", "pallas_gpu", {"tokens": 9, "group": 300},
            "it copies at most 256 lines of queries; 300 heads need 302",
        ),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_attention_is_refused_with_a_reason(op, backend, changes, reason):
    assert choose(op, backend, request(**changes)) == Choice(op, "xla", (f"{op}/{backend}: {reason}",))


def test_the_first_kernel_that_takes_a_request_is_chosen():
    assert choose("step", "pallas_tpu", request()) == Choice("step", "pallas_tpu")
    assert choose("step", "xla", request()) == Choice("decode", "xla")
    assert choose("decode", "pallas_gpu", request()) == Choice("decode", "pallas_gpu")
    assert choose("prefill", "pallas_tpu", request(tokens=40)) == Choice("prefill", "pallas_tpu")
    several = choose("step", "pallas_gpu", request(extras=("storage int8",), parts=2))
    assert (several.op, several.implementation) == ("decode", "xla")
    assert [reason.split(":")[0] for reason in several.reasons] == ["step/pallas_gpu", "decode/pallas_gpu"]


@pytest.mark.parametrize("kernel", registry.KERNELS, ids=lambda kernel: f"{kernel.op}-{kernel.implementation}")
def test_every_kernel_loads(kernel):
    assert callable(kernel.load())
    assert kernel.refuses(request(tokens=9 if kernel.op == "prefill" else 1)) is None
    assert kernel is registry.find(kernel.op, kernel.implementation)


def test_a_kernel_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"there is no kernel step/xla; there are step/pallas_tpu, "):
        registry.find("step", "xla")


@pytest.mark.parametrize(
    "codec", [Integer(2), Integer(4), Integer(8), Fp8(), Fp8(0.5), TurboQuant(4), Rotated(Integer(4))], ids=str
)
def test_codes_are_read_by_attention_and_by_a_whole_step(codec):
    for backend in BACKENDS:
        of = request(parts=2, codecs=(codec, codec), dim=128, slots=128)
        assert choose("decode", backend, of) == Choice("decode", backend)
        assert choose("step", backend, of) == Choice("step", backend)


def test_slots_are_allocated_in_multiples():
    assert [registry.slot_multiple("pallas_tpu", itemsize) for itemsize in (1, 2, 4)] == [32, 16, 8]
    assert registry.slot_multiple("pallas_tpu", 2, coded=True) == 128
    assert registry.slot_multiple("pallas_gpu", 2) == registry.slot_multiple("pallas_gpu", 2, coded=True) == 8
    assert registry.slot_multiple("xla", 4) == 1


def test_a_request_is_compared_without_its_trace():
    assert request() == request(trace=None)
    assert hash(request()) == hash(request(trace=None))
    assert request(slots=72) != request()


def test_heads_on_several_devices_are_not_compared():
    whole, divided = request("tova"), request("tova", kv_heads=2, whole_heads=False)
    assert choose("step", "pallas_tpu", whole).op == "step"
    assert choose("step", "pallas_tpu", divided).reasons == (
        "step/pallas_tpu: the policy compares heads, which are on several devices",
    )
    assert choose("step", "pallas_tpu", dataclasses.replace(divided, trace=request("roco").trace)).op == "decode", (
        "its statistics are not roco's"
    )
    assert choose("step", "pallas_gpu", request("tova", kv_heads=1)).op == "step", "there is one head"
    for name in ("h2o", "roco"):
        assert choose("step", "pallas_tpu", request(name, kv_heads=1, whole_heads=False)).op == "step"


def test_heads_may_decide_how_long_a_loop_runs_but_not_what_it_finds():
    def at(observe_and_evict):
        return tracing.compares_heads(observe_and_evict, request(statistics=(MASS,)))

    def longest_search(stats, position, columns, newest, budget):
        def unfinished(state):
            return jnp.any(state[1] > state[0][..., None])  # over heads and slots

        return stats, lax.while_loop(
            unfinished, lambda state: (state[0] + 1, state[1]), (position[0, :, :1], position)
        )[1]

    def any_head(stats, position, columns, newest, budget):
        return stats, jnp.where(jnp.any(position > 9, axis=1, keepdims=True), -1, position)

    def flattened(stats, position, columns, newest, budget):
        return stats, jnp.where(position == jnp.max(position.reshape(1, -1)), -1, position)

    assert not at(longest_search)
    assert at(any_head)
    assert at(flattened)


def test_an_array_that_a_policy_holds_is_refused():
    table = jnp.arange(64, dtype=jnp.int32)
    held = request(trace=lambda stats, position, *_: (stats, position + table))
    for backend in BACKENDS:
        assert tracing.untraceable(held.trace, held, backend) == "the policy holds an array of shape (64,)"


@pytest.mark.parametrize(
    ("function", "tpu", "gpu"),
    [
        (lambda x: jnp.sort(x), "sort", "sort"),
        (lambda x: jnp.cumsum(x, axis=2), "cumsum", "cumsum"),
        (lambda x: jnp.argmax(x, axis=2, keepdims=True) + x, "argmax", "argmax"),
        (lambda x: x + jnp.take(x, 3, axis=2)[..., None], "", ""),
        (lambda x: jnp.where(jnp.any(x > 0, axis=2, keepdims=True), x, 0), None, "reduce_or over slots"),
        (lambda x: lax.cond(jnp.max(x) > 0, lambda: x, lambda: -x), None, "cond between slots"),
        (lambda x: lax.rem(x.astype(jnp.float32), x / 2), None, "rem of floats"),
        (lambda x: jnp.sqrt(x.astype(jnp.float32)), None, "sqrt"),
        (lambda x: x + jnp.sum(x.astype(jnp.uint32)).astype(jnp.int32), "reduce_sum of unsigned integers", None),
        (lambda x: jnp.max(x[..., None] + x[:, :, None], axis=3), "add to an array", "add to an array"),
        (lambda x: x + jnp.max(x.reshape(1, -1)), "reshape of (1, 4, 64) to (1, 256)", None),
    ],
    ids=["sort", "cumsum", "argmax", "take", "any", "cond", "rem", "sqrt", "unsigned", "pairs", "reshape"],
)  # fmt: skip
def test_what_a_backend_does_not_take_is_named(function, tpu, gpu):
    own = request(trace=lambda stats, position, *_: (stats, function(position).astype(jnp.int32)))
    for backend, name in zip(BACKENDS, (tpu, gpu), strict=True):
        reason = tracing.untraceable(own.trace, own, backend)
        assert (reason is None) if name is None else reason.startswith(f"the policy's ranking has {name}")


# What is accepted, the compilers take


def names(jaxpr):
    for equation in tracing._equations(jaxpr):
        yield equation.primitive.name


#: Made only in other versions of jax or on a mesh.
RARE = {
    "pvary",
    "reshard",
    "closed_call",
    "pjit",
    "jit",
    "custom_jvp_call",
    "custom_vjp_call",
    "squeeze",
    "expand_dims",
}


def arguments(kv_heads, slots, dim, dtype, sharding=None):
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    one, cache = array((64, kv_heads, 1, dim), dtype), array((64, kv_heads, slots, dim), dtype)
    line, row = array((64, kv_heads, slots), jnp.float32), array((64,), jnp.int32)
    return (one, one, one, cache, cache, array(line.shape, jnp.int32), {"mass": line}), row


def step(backend):
    run = functools.partial(
        registry.find("step", backend).load(), observe_and_evict=EVERY_PRIMITIVE[backend], transforms=("identity",),
        scale=1.0, window=None, group_reduce="mean",
    )  # fmt: skip
    return jax.jit(lambda given, row: run(*given, newest=row, budget=row))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_primitive_is_accepted(backend):
    trace = EVERY_PRIMITIVE[backend]
    own = request(trace=trace, statistics=(MASS,))
    traced = jax.make_jaxpr(trace)(*tracing._arguments(own, 4, 64))
    known = rank1.PRIMITIVES if backend == "pallas_gpu" else tracing.TPU_PRIMITIVES
    assert known - set(names(traced.jaxpr)) <= RARE
    assert tracing.untraceable(trace, own, backend) is None


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
def test_the_tpu_compiler_takes_every_primitive(topology):
    mesh = Mesh(np.array(topology_devices(topology)[:1]), ("x",))
    with jax.set_mesh(mesh):
        given = arguments(4, 256, 128, jnp.bfloat16, NamedSharding(mesh, PartitionSpec()))
        step("pallas_tpu").lower(*given).compile()


@pytest.mark.newest
def test_mosaic_lowers_every_primitive_for_cuda():
    given = arguments(32, 824, 128, jnp.bfloat16)
    assert "mosaic_gpu" in step("pallas_gpu").trace(*given).lower(lowering_platforms=("cuda",)).as_text()
