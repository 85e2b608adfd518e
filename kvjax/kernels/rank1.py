"""Evaluates a policy's code, written for arrays [B, K, S], on rank-1 arrays [S] of one head.

A GPU's program holds the slots of one (row, KV head), spread over its threads, and Mosaic can only reduce whole arrays.
So the policy's code is traced on arrays [1, 1, S], and its jaxpr is evaluated on rank-1 arrays. An array of S numbers
becomes a line [S], and an array of one number becomes a scalar [].
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from kvjax.typing import Equation

Array = jax.Array

#: Primitives that act on each number separately.
ELEMENTWISE = frozenset(
    {
        *("abs", "add", "div", "exp", "integer_pow", "log", "max", "min", "mul", "neg", "rem", "sign", "square"),
        *("sub", "eq", "ge", "gt", "le", "lt", "ne", "and", "or", "not", "shift_left", "shift_right_logical"),
        *("select_n", "bitcast_convert_type", "convert_element_type"),
    }
)
#: Primitives that change shape or placement: on a line the identity, or a broadcast of a scalar.
ARRANGING = frozenset({"broadcast_in_dim", "expand_dims", "pvary", "reshape", "reshard", "squeeze", "stop_gradient"})
REDUCTIONS: dict[str, Callable[..., Array]] = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}
#: Reductions that are supported on scalars only.
PREDICATES = frozenset({"reduce_or", "reduce_and"})
CALLS = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"})
#: All primitives that `on_lines` evaluates and that Mosaic lowers for GPUs; `unsupported` returns the exceptions.
PRIMITIVES = ELEMENTWISE | ARRANGING | frozenset(REDUCTIONS) | PREDICATES | CALLS | {"pow", "while", "cond"}


def on_lines(function: Callable[..., Any], slots: int) -> Callable[..., Any]:
    """Returns a function of pytrees of arrays [1, 1, S] and [1] as a function of arrays [S] and [].

    Args:
      function: the function to evaluate.
      slots: the number of slots S, at least 2.

    Raises:
      NotImplementedError: if the function has an operation that is not supported on lines, such as a sort.
    """

    def call(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        shaped = [jax.ShapeDtypeStruct((1, 1, slots) if x.ndim else (1,), x.dtype) for x in leaves]
        traced, out = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(tree, shaped))
        return jax.tree.unflatten(jax.tree.structure(out), _evaluate(traced, slots, leaves))

    return call


def unsupported(equation: Equation, slots: int) -> str | None:
    """Returns the reason why an equation, apart from the jaxprs inside it, is not supported on lines, or None."""
    name = equation.primitive.name
    if name not in PRIMITIVES:
        return name
    if name in PREDICATES and equation.invars[0].aval.size > 1:
        return f"{name} over slots"
    if name == "cond" and any(out.aval.size == slots for out in equation.outvars):
        return "cond between slots"
    if name == "rem" and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
        return "rem of floats"
    for out in equation.outvars:
        if out.aval.size not in (1, slots):
            return f"{name} to an array of shape {out.aval.shape}"
    return None


def signed(line: Array) -> Array:
    """Marks an int32 line that a select returned as signed, for Mosaic; the numbers are the same.

    Mosaic (jax 0.10 to 0.12) takes the result of a select for unsigned if the operand for True is one number, and
    compares it as unsigned from there on: then -1 is not below 0. The cast to float32 and back costs nothing.
    """
    return lax.bitcast_convert_type(lax.bitcast_convert_type(line, jnp.float32), jnp.int32)


def _evaluate(traced: ClosedJaxpr, slots: int, arguments: Sequence[Array]) -> list[Array]:
    jaxpr: Equation = traced.jaxpr
    values: dict[Any, Array] = {
        **dict(zip(jaxpr.constvars, (_line(x, slots) for x in traced.consts), strict=True)),
        **dict(zip(jaxpr.invars, arguments, strict=True)),
    }

    def read(atom: object) -> Array:
        if not isinstance(atom, Literal):
            return values[atom]
        aval: Any = atom.aval
        return jnp.asarray(atom.val, aval.dtype)

    for equation in jaxpr.eqns:
        if reason := unsupported(equation, slots):
            raise NotImplementedError(f"{reason} has no form on the slots of one head.")
        wide = equation.outvars[0].aval.size == slots
        results = _apply(equation, [read(x) for x in equation.invars], slots, wide)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _apply(equation: Equation, inputs: list[Array], slots: int, wide: bool) -> Sequence[Array]:
    """Evaluates one equation.

    Args:
      equation: of a jaxpr.
      inputs: its operands, lines or scalars.
      slots: the number of slots.
      wide: whether the first result is a line.
    """
    name, params = equation.primitive.name, equation.params
    again = functools.partial(_evaluate, slots=slots)
    if name in ELEMENTWISE:
        spread = [jnp.broadcast_to(x, (slots,)) for x in inputs] if wide else inputs
        result = equation.primitive.bind(*spread, **params)
        return [signed(result) if wide and name == "select_n" and result.dtype == jnp.int32 else result]
    if name == "pow":
        return [_power(*inputs)]
    if name in ARRANGING:
        return [jnp.broadcast_to(inputs[0], (slots,)) if wide else inputs[0]]
    if name in REDUCTIONS:
        # A reduction over rows or heads, of which there is one, is the identity.
        return [REDUCTIONS[name](inputs[0]) if inputs[0].ndim and not wide else inputs[0]]
    if name in PREDICATES:
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
    index, *operands = inputs  # cond
    branches = [lambda *x, branch=branch: again(branch, arguments=x) for branch in params["branches"]]
    return lax.switch(index, branches, *operands)


def _power(base: Array, exponent: Array) -> Array:
    """Computes base ** exponent, which Mosaic lacks; exact for the exponents 0 and 1 of a decoding step."""
    other = jnp.exp(exponent * jnp.log(base))
    return jnp.where(exponent == 1, base, jnp.where(exponent == 0, jnp.ones_like(base), other))


def _line(constant: Any, slots: int) -> Array:
    """Reshapes a constant of a jaxpr to [S] or []."""
    return jnp.reshape(constant, (slots,) if jnp.size(constant) == slots else ())
