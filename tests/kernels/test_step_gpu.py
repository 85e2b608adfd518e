"""A decoding step in one kernel for GPUs: interpreted, races detected, or run by a GPU, against XLA and float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu import lowering  # its table of rules is not public

import kvjax
from kvjax import policies, storage
from kvjax.cache.empty import empty
from kvjax.cache.step import fused_kernel
from kvjax.kernels import registry
from kvjax.kernels.registry import Request
from kvjax.kernels.step import gpu as step_gpu
from kvjax.kernels.step.lines_gpu import Lines
from tests import reference
from tests.kernels.conftest import ON_GPU
from tests.kernels.steps import FUSED, Steps, build, decoding, one_step
from tests.laws.test_slots import assert_same
from tests.tiny import random_tokens, tiny

pytestmark = pytest.mark.newest  # whose interpreter takes kernels for GPUs

STEPS = [
    Steps("h2o", 136),
    Steps("roco", 72, dim=80, group=1),
    Steps("roco", 200, dim=128, dtype=jnp.bfloat16, budgets=(199, 100)),
    Steps("h2o", 328, window=120, policy=(("group_reduce", "max"),), group=3, dtype=jnp.bfloat16),
    Steps("scissorhands", 64, dim=256, budgets=(50, 63), dtype=jnp.bfloat16),
    Steps("h2o_decay", 104, budgets=(60, 103)),
    Steps("full", 72, window=40, budgets=(50, 68)),
    Steps("heavy", 80, dtype=jnp.bfloat16),
    Steps("mean_attention", 136, dim=96, budgets=(136, 120), dtype=jnp.bfloat16),  # nothing is free at last
]
# Codes of one group of channels and of two, in one tile and in two of which the last repeats slots.
CODED = [
    Steps("h2o", 64, held=storage.int8()),
    Steps("roco", 72, dim=128, group=1, dtype=jnp.bfloat16, held=storage.int4()),
    Steps("h2o", 64, dtype=jnp.bfloat16, policy=(("group_reduce", "max"),), held=storage.fp8()),
    Steps("full", 72, window=40, dtype=jnp.bfloat16, budgets=(50, 68), held=storage.turboquant(4)),
]
# So many rows that several programs need not share one's slots.
HARDWARE = [
    Steps("h2o", 824, 128, 1, jnp.bfloat16, batch=70),
    Steps("roco", 2048, 128, 4, jnp.bfloat16, batch=70),
    Steps("roco", 2048, 128, 4, jnp.bfloat16, held=storage.int4(), batch=70),
    Steps("h2o", 1024, 64, 8, jnp.bfloat16, held=storage.int8(), batch=70),
]


@pytest.mark.sampled(6)
# Rows of a product that are not read hold what was in the memory, here NaN.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_a_step_is_that_of_the_cache(machine, steps):
    steps.run(3, "pallas_gpu", machine)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("steps", CODED, ids=str)
def test_a_step_over_codes_is_that_of_the_cache(machine, steps):
    steps.run(2, "pallas_gpu", machine)


def bias(self, tiles, at, hidden=None, *, real=Lines.bias):
    """Reads the codes that are in the new token's slot."""
    return real(self, tiles, at)


def observe_and_evict(self, *args, real=Lines.observe_and_evict):
    """Leaves out the own token's probability."""
    real(self, *args[:-1])


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("mistake", [bias, observe_and_evict])
def test_a_mistake_with_codes_is_noticed(machine, monkeypatch, mistake):
    monkeypatch.setattr(Lines, mistake.__name__, mistake)
    with pytest.raises(AssertionError):
        CODED[0].run(1, "pallas_gpu")


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_a_step_on_a_mesh_is_that_of_the_cache(machine):
    """The kernel is that of one device, since the interpreter takes no more; the program around it is for many."""
    with jax.set_mesh(kvjax.make_mesh("data:1,model:1")):
        Steps("roco", 72).run(2, "pallas_gpu", machine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("machine", [ON_GPU], indirect=True)
@pytest.mark.parametrize("steps", HARDWARE, ids=str)
def test_many_rows_are_those_of_the_cache(machine, steps):
    steps.run(5, "pallas_gpu", machine)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(("name", "heads"), [("h2o", "gqa"), ("roco", "mqa")])
def test_slot_for_slot(machine, monkeypatch, name, heads):
    """A whole decoding, against the independent float64 reference."""
    own = tiny(heads, head_dim=64)
    prompts, ends = np.array([76, 70]), np.array([80, 75])
    tokens, steps = random_tokens(2, 80, seed=4), []
    monkeypatch.setattr(fused_kernel, "step", lambda *a, step=fused_kernel.step, **k: steps.append(1) or step(*a, **k))
    got = kvjax.log_likelihood(
        own.model, tokens, policies.by_name(name, budget=70), prompt_length=prompts, lengths=ends,
        implementation="pallas_gpu",
    )  # fmt: skip
    policy = reference.policies.by_name(name, budget=70)
    # Heads of 64 make logits of up to 80.
    assert_same(got, reference.reference_run(own.params, own.config, tokens, policy, prompts, ends, None), rtol=1e-5)
    assert steps, "the kernel was traced"


def compiled_for_cuda(
    name: str, batch=64, kv_heads=32, group=1, slots=824, dim=128, dtype=jnp.bfloat16, held=None
) -> str:
    group_of = decoding(build(name, slots - 5), slots, "pallas_gpu", held)
    layer = jax.eval_shape(functools.partial(empty, group_of, batch, kv_heads, dim, dtype))
    array = jax.ShapeDtypeStruct
    query, one = array((batch, kv_heads * group, 1, dim), dtype), array((batch, kv_heads, 1, dim), dtype)
    run = jax.jit(functools.partial(one_step, group_of), donate_argnums=0)
    traced = run.trace(layer, query, one, one, array((batch, 1), jnp.int32), array((batch,), jnp.int32))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*(name for name in FUSED if name != "tova"), "ring", "heavy", "full"])
def test_it_lowers_for_cuda(name):
    text = compiled_for_cuda(name)
    (kernel,) = re.findall(r"stablehlo.custom_call @mosaic_gpu.*", text)
    # Keys, values, positions, and what the policy notes are written where they were.
    lines = 3 + len(build(name, 819).needs)
    assert kernel.count("#stablehlo.output_operand_alias<") == lines
    whole = re.compile(r"tensor<(64x32|2048)x824x128x")
    touching = [line for line in text.splitlines() if whole.search(line) and "func.func" not in line]
    moving = [line for line in touching if not re.search("stablehlo.reshape|@mosaic_gpu|return", line)]
    assert not moving, "read and written by the kernel alone"


#: Primitives whose result depends on whether integers are signed.
ORDERING = (lax.lt_p, lax.le_p, lax.gt_p, lax.ge_p, lax.min_p, lax.max_p, lax.reduce_min_p, lax.reduce_max_p, lax.rem_p)
ORDERING += (lax.div_p, lax.convert_element_type_p)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("steps", [*STEPS, *CODED, Steps("strided", 72), Steps("fixed", 72)], ids=str)
def test_every_case_lowers_for_cuda_and_integers_are_compared_as_signed(monkeypatch, steps):
    """Mosaic takes what some operations return for unsigned, which the interpreter does not; see `rank1.signed`."""
    compared = []

    def checked(rule, context, *operands, **parameters):
        for operand, aval in zip(operands, context.avals_in, strict=True):
            if jnp.issubdtype(aval.dtype, jnp.signedinteger) and hasattr(operand, "is_signed"):
                assert operand.is_signed, context.prim
                compared.append(aval)
        return rule(context, *operands, **parameters)

    for rules in lowering.mosaic_lowering_rules.values():
        for primitive in ORDERING:
            if primitive in rules:
                monkeypatch.setitem(rules, primitive, functools.partial(checked, rules[primitive]))
    compiled_for_cuda(steps.name, 64, 32, steps.group, steps.slots, steps.dim, steps.dtype, steps.held)
    assert any(aval.shape for aval in compared), "positions were compared"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", HARDWARE, ids=str)
def test_cases_of_many_rows_lower_for_cuda(steps):
    text = compiled_for_cuda(steps.name, 64, 32, steps.group, steps.slots, steps.dim, steps.dtype, steps.held)
    if steps.held is None:
        return
    (kernel,) = re.findall(r"stablehlo.custom_call @mosaic_gpu.*", text)
    parts = steps.held.key.parts(steps.dim, steps.dtype)
    written = 2 * len(parts) + 1 + len(build(steps.name, steps.slots - 5).needs)
    assert kernel.count("#stablehlo.output_operand_alias<") == written
    whole = re.compile(rf"tensor<(64x32|2048)x({steps.slots}|{steps.slots * 2})x(\d+x)?(ui8|bf16|f32)>")
    touching = [line for line in text.splitlines() if whole.search(line) and "func.func" not in line]
    moving = [line for line in touching if not re.search("stablehlo.reshape|@mosaic_gpu|return", line)]
    assert touching and not moving, "codes, scales and zeros are read and written by the kernel alone"


@pytest.mark.parametrize(("name", "group", "dtype"), [("roco", 1, jnp.bfloat16), ("h2o", 3, jnp.float32)])
def test_what_is_said_to_fit_into_a_program_does(name, group, dtype):
    """Mosaic refuses what exceeds a processor's shared memory."""

    def fits(slots: int) -> bool:
        try:
            step_gpu.launch_of(2048, group, slots, 128, dtype, len(build(name, 4095).needs))
        except ValueError:
            return False
        return True

    most = max(slots for slots in range(64, step_gpu.MAX_SLOTS + 1, 8) if fits(slots))
    assert fits(1024)
    compiled_for_cuda(name, group=group, slots=most, dtype=dtype)


def test_what_one_program_does_not_hold_goes_through_the_cache():
    def taken(name="h2o", batch=64, kv_heads=32, slots=824, dim=128) -> bool:
        group = decoding(build(name, slots - 4), slots)
        request = Request(
            batch=batch, kv_heads=kv_heads, group=1, tokens=1, slots=slots, dim=dim, dtype="bfloat16",
            statistics=tuple(sorted(group.needs, key=lambda s: s.name)),
            trace=functools.partial(fused_kernel.observe_and_evict, group),
        )  # fmt: skip
        return registry.find("step", "pallas_gpu").refuses(request) is None

    assert taken()
    assert taken("roco", slots=step_gpu.MAX_SLOTS)
    assert not taken(slots=step_gpu.MAX_SLOTS + 8)
    assert not taken(slots=830), "copies move eight slots"
    assert not taken(slots=56), "less than a tile"
    assert not taken(dim=72)
    assert not taken(batch=1), "too few rows to fill a GPU: several programs share one's slots"
    assert not taken("tova"), "heads that share a ranking are in several programs"
    assert taken("tova", kv_heads=1, batch=2048)


def test_a_step_that_no_program_holds_says_so():
    steps = Steps("h2o", 72)
    group = decoding(build("h2o", 71), 70)
    layer = empty(group, 1, 1, steps.dim, jnp.float32)
    one = jnp.zeros((1, 1, 1, steps.dim))
    with pytest.raises(ValueError, match="a program takes 64 to 4096 slots, a multiple of 8, not 70"):
        step_gpu.step(
            one, one, one, layer.key, layer.value, layer.position, layer.stats, newest=jnp.zeros(1, jnp.int32),
            budget=jnp.ones(1, jnp.int32), observe_and_evict=functools.partial(fused_kernel.observe_and_evict, group),
            transforms=("identity",), scale=1.0, window=None, group_reduce="mean",
        )  # fmt: skip
