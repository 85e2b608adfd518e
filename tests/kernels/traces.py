"""Policies as kernels of a whole step trace them."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kvjax import policies
from kvjax.cache.planning.layout import Group
from kvjax.cache.step.fused_kernel import observe_and_evict
from tests import examples

#: Policies, and whether a kernel traces them: as a flag of each once said.
TRACED = {
    "full": True, "fifo": True, "window": True, "local_only": True,
    "streaming_llm": True, "strided": True, "fixed": True,
    "h2o": True, "ring": True, "heavy_only": True, "h2o_decay": True, "scissorhands": True, "tova": True,
    "mean_attention": True, "roco": True, "heavy_roco": True, "random": False, "heavy_random": False, "snapkv": False,
    "pyramidkv": False, "knorm": False, "keydiff": False, "value_norm": False, "lagkv": False, "leverage": False,
    "cur": False, "expected_attention": False, "rkv": False, "morphkv": False,
    "gkv": False, "ladder": False, "vase": False, "vase_dkv": False,
    "matched": False, "compactor": False, "ems": False,
    "kvzip": False, "kvgrad": False,
    "triattention": False, "qfilters": False, "learned": False,
}  # fmt: skip


def policy(name, budget=60):
    match name:
        case "full":
            return policies.full()
        case "ring":
            return policies.h2o(budget=budget + 1 - budget % 2, variant="ring")
        case "value_norm":
            return policies.value_norm(policies.h2o(budget=budget))
        case "heavy_roco" | "heavy_random":
            return policies.with_heavy_hitters(policy(name.removeprefix("heavy_"), budget))
    # A history is in bits, which kernels do not have.
    return examples.policy(name, budget, **({"history": None} if name == "scissorhands" else {}))


def trace_of(own):
    """Returns the part of a policy's step that follows attention."""
    return functools.partial(observe_and_evict, Group(policy=own, needs=own.needs, decoding=True))


def every_primitive(stats, position, columns, newest, budget):
    """A policy that has each of `rank1.PRIMITIVES`."""
    x, mass = columns["identity"], stats["mass"]
    line = jnp.abs(-x) + jnp.exp(-x) * jnp.log(x + 1.0) - x / (1.0 + jnp.square(x)) + x**3 + jnp.sign(x)
    line = jnp.maximum(line, mass) + jnp.minimum(line, 1.0) * jnp.float32(0.9) ** newest[:, None, None].astype(
        jnp.float32
    )
    bits = lax.bitcast_convert_type(lax.stop_gradient(line), jnp.uint32)
    bits = ~(bits << 1) | (bits >> 2) & jnp.uint32(7)
    whole = lax.rem(position, 7) + (bits & 3).astype(jnp.int32)
    chosen = ((whole >= 2) & (whole <= 5) | (whole < 1) | ~(whole > 3)) & (whole != 4) | (whole == 6)
    total = jnp.sum(line, axis=2, keepdims=True) + jnp.max(line, axis=2, keepdims=True)
    lowest = jnp.min(jnp.where(chosen, position, 9), axis=2, keepdims=True)

    def halve(state):
        return state[0] / 2, state[1] + 1

    total, turns = lax.while_loop(
        lambda state: jnp.any(state[0] > 1.0) & jnp.all(state[1] < 40), halve, (total, lowest)
    )
    total = lax.cond(jnp.any(total > 0.5), lambda: total, lambda: jnp.zeros_like(total))
    position = jnp.where(
        line * total + jnp.expand_dims(jnp.squeeze(mass, 0).reshape(1, *x.shape[1:])[0], 0) > 0, position, turns
    )
    position = jnp.where(
        jnp.sum(position >= 0, axis=2, keepdims=True, dtype=jnp.int32) > budget[:, None, None], -1, position
    )
    return {"mass": line}, position


def every_primitive_of_a_tpu(stats, position, columns, newest, budget):
    """The same, with those that only a TPU's kernel takes."""
    x = columns["identity"]
    line = jnp.sqrt(x) + lax.rsqrt(x + 1.0) + jnp.exp2(x) + jnp.tanh(x) + jax.nn.sigmoid(x) + lax.clamp(0.0, x, 1.0)
    line = jnp.where(jnp.isfinite(line) & jnp.any(x > 0, axis=2, keepdims=True), lax.rem(line, jnp.floor(line)), 0.0)
    columns = {"identity": lax.cond(jnp.max(line) > 1, lambda: line, lambda: x)}
    return every_primitive(stats, position, columns, newest, budget)


EVERY_PRIMITIVE = {"pallas_tpu": every_primitive_of_a_tpu, "pallas_gpu": every_primitive}
