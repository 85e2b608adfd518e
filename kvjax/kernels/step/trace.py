"""Determines from a policy's jaxpr whether the kernel of a whole decoding step can run it, for each backend.

The policy's own code, which follows attention in a step, is traced into the kernel on the slots of one row. A backend
supports a policy if it supports every primitive, and if the result of each head does not depend on heads of another
program or device.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from kvjax.kernels import rank1, registry
from kvjax.typing import Equation

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Trace = Callable[..., Any]
#: Primitives that Mosaic lowers for TPUs on [1, K, S] arrays; `_unsupported_on_tpu` returns the exceptions.
TPU_PRIMITIVES = rank1.PRIMITIVES | {"clamp", "exp2", "floor", "is_finite", "logistic", "rsqrt", "sqrt", "tanh"}
SEVERAL = 5  # the number of heads to trace with if a device has one of several


def refuses(request: "Request", backend: str) -> str | None:
    """Returns why the kernel of a whole step cannot run a request for reasons that all backends share, or None."""
    if request.tokens != 1:
        return f"it takes one token per row, not {request.tokens}"
    if request.extras:
        return f"it does no more than append, attend, observe and evict, but the step has {', '.join(request.extras)}"
    # The step's own token is apart from coded slots.
    if request.parts > (2 if any(request.codecs) else 1) or request.band:
        return "it attends to one part, under one window for all rows"
    if request.soft_cap:
        return registry.NO_SOFT_CAP
    for statistic in request.statistics:
        if statistic.recurs:
            return f"statistic {statistic.name} is {statistic.kept[0]} numbers per slot, not one"
        if statistic.words:
            return f"statistic {statistic.name} is {statistic.words[0]} words per slot, not one float32"
        if statistic.tail is not None:
            return f"statistic {statistic.name} is of the prompt's end, and the step is of decoding"
    if request.trace is None:
        return "no policy was given that could be traced"
    return untraceable(request.trace, request, backend) or _needs_other_heads(request.trace, request, backend)


def untraceable(trace: Trace, request: "Request", backend: str) -> str | None:
    """Returns why a backend's kernel cannot trace a policy, or None.

    Args:
      trace: see `Request`.
      request: gives the shapes to trace with; on a GPU, one head at a time.
      backend: ``pallas_tpu`` or ``pallas_gpu``.
    """
    heads = 1 if backend == "pallas_gpu" else request.kv_heads
    try:
        traced = jax.make_jaxpr(trace)(*_arguments(request, heads, request.slots))
    except Exception as error:  # a policy's own code may raise anything, for example because there are no keys
        first = (str(error).splitlines() or [""])[0]
        return f"the policy cannot be traced from positions and statistics alone ({type(error).__name__}: {first})"
    for constant in traced.consts:
        if jnp.size(constant) > 1:
            return f"the policy holds an array of shape {jnp.shape(constant)}"
    for equation in _equations(traced.jaxpr):
        if backend == "pallas_gpu":
            reason = rank1.unsupported(equation, request.slots)
        else:
            reason = _unsupported_on_tpu(equation, heads * request.slots)
        if reason is not None:
            return f"the policy's ranking has {reason}, which the kernel cannot trace"
    return None


def compares_heads(trace: Trace, request: "Request") -> bool:
    """Returns whether the result of a head depends on other heads.

    This is the case if the result is computed from a reduction over heads. Reductions that only determine the length of
    a loop or the branch of a conditional are ignored: a search that runs until every head has found its threshold
    searches each head separately.
    """
    heads = request.kv_heads if request.kv_heads > 1 else SEVERAL
    # The number of slots is not a multiple of the number of heads, so that an axis of slots is not mistaken for heads.
    slots = request.slots + (request.slots % heads == 0)
    try:
        traced = jax.make_jaxpr(trace)(*_arguments(request, heads, slots))
    except Exception:  # the policy's code requires a certain number of heads
        return True
    return _reduces_heads(traced.jaxpr, heads)


def _needs_other_heads(trace: Trace, request: "Request", backend: str) -> str | None:
    alone = backend == "pallas_gpu" and request.kv_heads > 1
    if request.whole_heads and not alone:
        return None
    if not compares_heads(trace, request):
        return None
    where = "programs" if request.whole_heads else "devices"
    return f"the policy compares heads, which are on several {where}"


def _arguments(request: "Request", heads: int, slots: int) -> tuple[Any, ...]:
    """Returns the shapes of the arguments that a policy is traced with."""

    def line(dtype: object) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, heads, slots), dtype)

    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    stats = {statistic.name: line(jnp.float32) for statistic in request.statistics}
    columns = {statistic.transform: line(jnp.float32) for statistic in request.statistics}
    return stats, line(jnp.int32), columns, one, one


def _unsupported_on_tpu(equation: Equation, size: int) -> str | None:
    """Returns why Mosaic does not lower an equation for a TPU on arrays of up to `size` numbers, or None."""
    name = equation.primitive.name
    if name not in TPU_PRIMITIVES:
        return name
    if name in rank1.REDUCTIONS and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.unsignedinteger):
        return f"{name} of unsigned integers"
    for out in equation.outvars:
        if out.aval.size > size:
            return f"{name} to an array of shape {out.aval.shape}"
    if name == "reshape" and _moves(equation):
        return f"reshape of {equation.invars[0].aval.shape} to {equation.outvars[0].aval.shape}"
    return None


def _moves(reshape: Equation) -> bool:
    """Returns whether a reshape does more than add or remove dimensions of size 1."""
    before, after = (tuple(n for n in x.aval.shape if n > 1) for x in (reshape.invars[0], reshape.outvars[0]))
    return before != after


def _reduces_heads(jaxpr: Equation, heads: int) -> bool:
    """Returns whether results depend on a reduction over an axis of heads, or of heads and slots together."""
    needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        name, params, inputs = equation.primitive.name, equation.params, equation.invars
        shape = inputs[0].aval.shape if inputs else ()
        if name.startswith("reduce_") and any(shape[axis] % heads == 0 for axis in params["axes"]):
            return True
        if name == "reshape" and _moves(equation):
            return True
        inside = list(_inner(equation))
        if name == "cond":
            inputs = inputs[1:]
        elif name == "while":
            inputs, inside = inputs[params["cond_nconsts"] :], [params["body_jaxpr"].jaxpr]
        if any(_reduces_heads(each, heads) for each in inside):
            return True
        needed |= {x for x in inputs if not isinstance(x, Literal)}
    return False


def _equations(jaxpr: Equation) -> Iterator[Equation]:
    """Yields all equations, including those of inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner(equation):
            yield from _equations(inner)


def _inner(equation: Equation) -> Iterator[Equation]:
    """Yields the jaxprs inside an equation: of a call, of branches, of a loop's condition and body."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(each, "jaxpr", each)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
