"""A policy's code for the slots of one head, [1, 1, S], as code for a line of them, [S].

A GPU's program holds the slots of one (row, KV head), spread over its threads, and Mosaic sums over all of an array or
not at all. So the code is traced as it is, and what was traced is done again on lines: a value of as many numbers as
there are slots is a line, any other is one number.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

Array = jax.Array

#: Primitives that do to each number what they do to all, by their names.
ELEMENTWISE = frozenset(
    {
        *("abs", "add", "div", "exp", "integer_pow", "log", "max", "min", "mul", "neg", "rem", "sign", "sqrt"),
        *("square", "sub", "eq", "ge", "gt", "le", "lt", "ne", "and", "or", "not", "shift_left", "shift_right_logical"),
        *("select_n", "bitcast_convert_type", "convert_element_type"),
    }
)
#: Those that only arrange numbers, or say where they are: on a line, nothing, or one number for each slot.
ARRANGING = frozenset({"broadcast_in_dim", "expand_dims", "pvary", "reshape", "reshard", "squeeze", "stop_gradient"})
REDUCTIONS: dict[str, Callable[..., Array]] = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}
CALLS = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"})


def on_lines(function: Callable[..., Any], slots: int) -> Callable[..., Any]:
    """The function, of pytrees of [1, 1, S] and [1] arrays, for lines [S] and single numbers [] in their places.

    Args:
      slots: S, more than one.

    Raises:
      NotImplementedError: where the function does something that has no form on lines, such as a sort.
    """

    def call(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        shaped = [jax.ShapeDtypeStruct((1, 1, slots) if x.ndim else (1,), x.dtype) for x in leaves]
        traced, out = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(tree, shaped))
        return jax.tree.unflatten(jax.tree.structure(out), _evaluate(traced, slots, leaves))

    return call


def _evaluate(traced: ClosedJaxpr, slots: int, arguments: Sequence[Array]) -> list[Array]:
    jaxpr: Any = traced.jaxpr
    values: dict[Any, Array] = {
        **dict(zip(jaxpr.constvars, (_line(x, slots) for x in traced.consts), strict=True)),
        **dict(zip(jaxpr.invars, arguments, strict=True)),
    }

    def read(atom: Any) -> Array:
        if not isinstance(atom, Literal):
            return values[atom]
        aval: Any = atom.aval
        return jnp.asarray(atom.val, aval.dtype)

    for equation in jaxpr.eqns:
        wide = equation.outvars[0].aval.size == slots
        results = _apply(equation, [read(x) for x in equation.invars], slots, wide)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _apply(equation: Any, inputs: list[Array], slots: int, wide: bool) -> Sequence[Array]:
    """What one operation leaves, as lines; wide: its first result is one."""
    name, params = equation.primitive.name, equation.params
    again = functools.partial(_evaluate, slots=slots)
    if name in ELEMENTWISE:
        spread = [jnp.broadcast_to(x, (slots,)) for x in inputs] if wide else inputs
        return [equation.primitive.bind(*spread, **params)]
    if name == "pow":
        return [_power(*inputs)]
    if name in ARRANGING:
        return [jnp.broadcast_to(inputs[0], (slots,)) if wide else inputs[0]]
    if name in REDUCTIONS:
        # Over heads or rows, of which there is one, a line stays as it is.
        return [REDUCTIONS[name](inputs[0]) if inputs[0].ndim and not wide else inputs[0]]
    if name in ("reduce_or", "reduce_and") and not inputs[0].ndim:
        return inputs
    if name in CALLS:
        inner = params.get("jaxpr") or params["call_jaxpr"]
        return again(inner, arguments=inputs)
    if name == "while":
        counts = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body, state = inputs[: counts[0]], inputs[counts[0] : sum(counts)], inputs[sum(counts) :]
        return lax.while_loop(
            lambda state: again(params["cond_jaxpr"], arguments=[*of_cond, *state])[0],
            lambda state: again(params["body_jaxpr"], arguments=[*of_body, *state]),
            state,
        )
    if name == "cond":
        index, *operands = inputs
        branches = [lambda *x, branch=branch: again(branch, arguments=x) for branch in params["branches"]]
        return lax.switch(index, branches, *operands)
    raise NotImplementedError(
        f"{name} has no form on the slots of one head; the policy's importance or scope must say in_kernel=False."
    )


def _power(base: Array, exponent: Array) -> Array:
    """base ** exponent, which Mosaic does not have; exact for the queries of a decoding step, one or none."""
    other = jnp.exp(exponent * jnp.log(base))
    return jnp.where(exponent == 1, base, jnp.where(exponent == 0, jnp.ones_like(base), other))


def _line(constant: Any, slots: int) -> Array:
    return jnp.reshape(constant, (slots,) if jnp.size(constant) == slots else ())
