"""Wrong ranks, shapes and dtypes are refused where attention and kernels begin, while a program is traced."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kvjax import attention
from kvjax.attention import Attended
from kvjax.kernels import registry
from kvjax.kernels.problem import Problem, check
from kvjax.numerics.statistics import ABOVE, MASS, recent_above

BATCH, KV_HEADS, GROUP, SLOTS, DIM = 2, 3, 2, 72, 64
HISTORY = recent_above(20)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def given(n: int) -> Problem:
    """A problem of shapes alone, every attribute present."""
    cache, line = array(BATCH, KV_HEADS, SLOTS, DIM), (BATCH, KV_HEADS, SLOTS)
    return Problem(
        query=array(BATCH, KV_HEADS, GROUP, n, DIM), key=cache, value=cache,
        query_position=array(BATCH, n, dtype=jnp.int32), key_position=array(*line, dtype=jnp.int32),
        weights=(array(BATCH, n), array(BATCH, n, 2)), band=array(BATCH, dtype=jnp.int32),
        exempt=array(*line, dtype=jnp.bool_), log_weight=array(*line), statistics=(ABOVE, HISTORY), scale=1.0,
    )  # fmt: skip


WRONG = [
    {"query": lambda x: array(BATCH, KV_HEADS * GROUP, 1, DIM)},
    {"query": lambda x: array(*x.shape, dtype=jnp.int32)},
    {"query": lambda x: array(BATCH, KV_HEADS + 1, *x.shape[2:])},
    {"query": lambda x: array(*x.shape[:4], DIM + 1)},
    {"key": lambda x: array(BATCH, SLOTS, DIM)},
    {"key": lambda x: array(*x.shape, dtype=jnp.int8)},
    {"key": lambda x: array(BATCH, KV_HEADS, SLOTS + 1, DIM)},
    {"value": lambda x: array(*x.shape[:3], DIM + 1)},
    {"value": lambda x: array(*x.shape, dtype=jnp.uint8)},
    {"query_position": lambda x: array(BATCH, x.shape[1] + 1, dtype=jnp.int32)},
    {"query_position": lambda x: array(*x.shape)},
    {"key_position": lambda x: array(BATCH, SLOTS, dtype=jnp.int32)},
    {"key_position": lambda x: array(*x.shape, dtype=jnp.int16)},
    {"weights": lambda x: x[:1]},
    {"weights": lambda x: x[::-1]},
    {"weights": lambda x: (array(*x[0].shape, dtype=jnp.int32), x[1])},
    {"band": lambda x: array(BATCH, 1, dtype=jnp.int32)},
    {"band": lambda x: array(BATCH)},
    {"exempt": lambda x: array(BATCH, 1, SLOTS, dtype=jnp.bool_)},
    {"exempt": lambda x: array(*x.shape, dtype=jnp.int32)},
    {"log_weight": lambda x: array(BATCH, KV_HEADS, SLOTS - 1)},
    {"log_weight": lambda x: array(*x.shape, dtype=jnp.bfloat16)},
    {"causal": lambda x: True},
]


def changed(problem, change):
    return problem.replace(**{name: edit(getattr(problem, name)) for name, edit in change.items()})


@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.parametrize("change", WRONG, ids=lambda change: next(iter(change)))
def test_a_wrong_problem_is_refused(change, n):
    check(given(n))
    with pytest.raises(AssertionError):
        check(changed(given(n), change))


OPS = {
    "attend": attention.attend,
    "attend_and_reduce": functools.partial(attention.attend_and_reduce, implementation="xla"),
    "attend_parts": lambda problem: attention.attend_parts([problem]),
    "attend_parts of two": lambda problem: attention.attend_parts([problem, problem]),
    "column_sums": lambda problem: attention.column_sums(problem, jnp.zeros(given(9).query.shape[:4])),
    "count_queries": attention.count_queries,
    "count_seen": attention.count_seen,
}
KERNELS = [kernel for kernel in registry.KERNELS if kernel.op in ("decode", "prefill")]


@pytest.mark.parametrize("op", OPS)
def test_every_op_checks_its_problem(op):
    jax.eval_shape(OPS[op], given(9))
    with pytest.raises(AssertionError):
        jax.eval_shape(OPS[op], changed(given(9), {"log_weight": lambda x: array(BATCH, 1, SLOTS)}))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.op}-{kernel.implementation}")
def test_every_kernel_checks_its_problem(kernel):
    problem = given(1 if kernel.op == "decode" else 9).replace(band=None)
    with pytest.raises(AssertionError):
        jax.eval_shape(kernel.load(), changed(problem, {"log_weight": lambda x: array(BATCH, 1, SLOTS)}))


def test_what_is_joined_has_one_shape():
    output, lse = jnp.zeros((BATCH, KV_HEADS, GROUP, 9, DIM)), jnp.zeros((BATCH, KV_HEADS, GROUP, 9))
    whole = Attended(output, lse)
    attention.combine(whole, whole)
    with pytest.raises(AssertionError):
        attention.combine(whole, Attended(output[:, :, :1], lse[:, :, :1]))
    problem = given(9).replace(band=None)
    for shape, seen in (((BATCH, KV_HEADS, GROUP, 1), None), (lse.shape, (BATCH, KV_HEADS, 1))):
        with pytest.raises(AssertionError):
            jax.eval_shape(attention.column_sums, problem, array(*shape), seen and array(*seen))


def test_a_part_of_a_causal_block_is_not_causal():
    """The slots of a part are not exactly its queries' own; see `Problem.causal`."""
    whole = given(SLOTS).replace(causal=True)
    check(whole)
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), whole)
    for part in (arrays.only_queries(8, 24), arrays.only_slots(40)):
        assert not part.causal
        check(part)


def slots_of_a_step(**changes):
    """Arguments of the kernels of a whole step, as shapes."""
    one, cache = array(BATCH, KV_HEADS, 1, DIM), array(BATCH, KV_HEADS, SLOTS, DIM)
    row = array(BATCH, dtype=jnp.int32)
    return {
        "query": array(BATCH, KV_HEADS, GROUP, DIM), "new_key": one, "new_value": one, "key": cache, "value": cache,
        "position": array(BATCH, KV_HEADS, SLOTS, dtype=jnp.int32),
        "stats": {MASS.name: array(BATCH, KV_HEADS, SLOTS)}, "newest": row, "budget": row,
    } | changes  # fmt: skip


@pytest.mark.parametrize("backend", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize(
    "change",
    [
        {"query": array(BATCH, KV_HEADS, GROUP, 1, DIM)},
        {"query": array(BATCH, KV_HEADS + 1, GROUP, DIM)},
        {"new_key": array(BATCH, KV_HEADS, 2, DIM)},
        {"new_key": array(BATCH, KV_HEADS, 1, DIM, dtype=jnp.bfloat16)},
        {"new_value": array(BATCH, KV_HEADS, DIM)},
        {"key": array(BATCH, KV_HEADS, SLOTS + 8, DIM)},
        {"value": array(BATCH, KV_HEADS, SLOTS, DIM, dtype=jnp.bfloat16)},
        {"position": array(BATCH, KV_HEADS, SLOTS + 8, dtype=jnp.int32)},
        {"position": array(BATCH, KV_HEADS, SLOTS)},
        {"stats": {MASS.name: array(BATCH, SLOTS)}},
        {"stats": {MASS.name: array(BATCH, KV_HEADS, SLOTS, dtype=jnp.uint16)}},
        {"newest": array(BATCH, 1, dtype=jnp.int32)},
        {"budget": array(dtype=jnp.int32)},
        {"budget": array(BATCH)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_step_is_refused(backend, change):
    kernel = functools.partial(
        registry.find("step", backend).load(), observe_and_evict=lambda stats, position, *_: (stats, position),
        transforms=("identity",), scale=1.0, window=None, group_reduce="mean",
    )  # fmt: skip
    with pytest.raises(AssertionError):
        jax.eval_shape(lambda arguments: kernel(**arguments), slots_of_a_step(**change))


@pytest.mark.parametrize("n", [1, 9])
def test_checking_adds_nothing_to_a_program(n, monkeypatch):
    problem = given(n)
    checked = str(jax.make_jaxpr(attention.attend_and_reduce)(problem))
    monkeypatch.setattr("chex.assert_shape", lambda *_: None)
    monkeypatch.setattr("chex.assert_type", lambda *_: None)
    monkeypatch.setattr("chex.assert_rank", lambda *_: None)
    jax.clear_caches()
    assert str(jax.make_jaxpr(attention.attend_and_reduce)(problem)) == checked
