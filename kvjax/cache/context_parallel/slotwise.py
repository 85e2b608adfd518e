"""Whether a policy ranks each slot by itself, so that a device can rank its own slots; read from the policy's jaxpr."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from kvjax.cache.slots import empty_stats
from kvjax.cache.step.evict import ranking
from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.parallel import slot_reductions
from kvjax.policies.base import Evict, View
from kvjax.typing import PyTree

#: The number of slots of the trace, which is no other dimension's.
SLOTS = 1009

#: Primitives that act on each number separately.
ELEMENTWISE = frozenset(
    {
        *(
            "abs",
            "add",
            "add_any",
            "and",
            "atan2",
            "bitcast_convert_type",
            "ceil",
            "clamp",
            "clz",
            "convert_element_type",
        ),
        *("copy", "copy_p", "cos", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt"),
        *("integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg"),
        *("nextafter", "not", "or", "population_count", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n"),
        *(
            "shift_left",
            "shift_right_arithmetic",
            "shift_right_logical",
            "sign",
            "sin",
            "sqrt",
            "square",
            "stop_gradient",
        ),
        *("sub", "tan", "tanh", "xor"),
        *("random_bits", "random_fold_in", "random_seed", "random_unwrap", "random_wrap"),
    }
)
#: Primitives that keep an axis as it is or drop, add and shorten others, if all slots are one axis of the result.
ARRANGING = frozenset(
    {"broadcast_in_dim", "expand_dims", "pvary", "reshape", "reshard", "slice", "squeeze", "transpose"}
)
#: Primitives that reduce the axes in their parameter.
REDUCING = frozenset({"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"})
#: Primitives that run a jaxpr on their operands.
CALLS = frozenset({"closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat"})


@functools.lru_cache(maxsize=256)
def reason(policy: Evict, needs: frozenset[Statistic], heads: tuple[int, ...] | None, kv_heads: int, dim: int) -> str:
    """Returns why a device cannot rank its own slots, or an empty string if it can.

    Reductions by `kvjax.numerics.top_k.largest` add up over all devices, and count as each slot by itself.

    Args:
      policy: one that has a budget.
      needs: the statistics that are kept.
      heads: see `kvjax.policies.View`.
      kv_heads: the number of KV heads.
      dim: features of a head.
    """

    def rank(stats: PyTree, position: PyTree, key: PyTree, value: PyTree, row: PyTree, layer: PyTree) -> PyTree:
        return ranking(policy, stats, View(position, key, value, row, row, row, layer, True, heads))

    shape = (2, kv_heads, SLOTS)
    stats = jax.eval_shape(lambda: empty_stats(needs, policy.remembers, shape))
    vectors = jax.ShapeDtypeStruct((*shape, dim), jnp.float32)
    row, layer = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    with slot_reductions.devices(slot_reductions.Across(traced=True)):
        try:
            traced = jax.make_jaxpr(rank)(
                stats, jax.ShapeDtypeStruct(shape, jnp.int32), vectors, vectors, row, layer
            )  # fmt: skip
        except PolicyError as error:  # of `View.rotated` and `View.unrotated`
            return f"policy {policy.name}: {str(error).rstrip('.')}"
    primitive = _first(traced.jaxpr)
    return f"policy {policy.name} compares slots with each other (by {primitive})" if primitive else ""


def _first(jaxpr: Jaxpr) -> str | None:
    """Returns the first primitive of a jaxpr that does more than act on each slot; None if there is none."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = [each for each in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr) if _is_jaxpr(each)]
        if name in CALLS:
            found = [_first(each.jaxpr if isinstance(each, ClosedJaxpr) else each) for each in inner]
            if any(found):
                return next(each for each in found if each)
            continue
        if not _acts_on_each(eqn):
            return name
    return None


def _acts_on_each(eqn: Any) -> bool:
    """Returns whether an equation gives each slot what depends on that slot alone."""
    name = eqn.primitive.name
    before = [var.aval.shape for var in eqn.invars if SLOTS in getattr(var.aval, "shape", ())]
    after = [var.aval.shape for var in eqn.outvars if SLOTS in var.aval.shape]
    if name == "iota":
        # The order of slots has no meaning.
        return not after or eqn.outvars[0].aval.shape[eqn.params["dimension"]] != SLOTS
    if not before:
        return name in ARRANGING or not after
    if any(shape.count(SLOTS) != 1 for shape in (*before, *after)):
        return False
    if name in REDUCING:
        return all(before[0][axis] != SLOTS for axis in eqn.params["axes"])
    if name in ELEMENTWISE or name in ARRANGING:
        return len(after) == len(eqn.outvars)
    return False


def _is_jaxpr(x: object) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)
