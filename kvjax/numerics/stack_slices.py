"""Runs a function on slices of stacked arrays without copying the slices, where operations allow it.

A loop over layers has the caches of all layers in stacks [B, L, ...]; each iteration reads and writes one slice. XLA
for CPUs copies a slice before a custom call reads it, and again into the stack after it is written: three times the
traffic of the cache. Here, the jaxpr of the function is evaluated with a stack and an index in place of a slice, and an
operation that can address a slice within its stack does so:

- a scatter writes into the stack;
- a custom call of kvjax's own reads the stack, by its form that takes an index (`kvjax.products.libraries`);
- a function that was called by `call_with_slices` is given the slices, and reads and writes within their stacks.

Any other operation has the slice, copied or fused by XLA. The results are the same, to the bit.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives
from jax.interpreters import mlir

from kvjax.numerics.slices import AXIS, is_slice
from kvjax.products.libraries import INDEXED
from kvjax.typing import PyTree

Array = jax.Array

CUSTOM = (primitives.custom_jvp_call_p.name, primitives.custom_vjp_call_p.name)  # functions with gradients of their own
#: A backend's names in alternatives for platforms.
PLATFORMS = {"cpu": {"cpu"}, "tpu": {"tpu"}, "gpu": {"gpu", "cuda", "rocm"}}

T = TypeVar("T")
Value = Any  # an array or a `Slice`


def call(function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """Calls a function of arrays on trees whose leaves are arrays or slices.

    Where the function has alternatives for platforms, that of the mesh's devices is taken, or of the default backend.

    Args:
      function: of trees of arrays.
      arguments: its arguments; a leaf may be a `Slice`. All slices have the same index.

    Returns:
      Its result, whose leaves are arrays, or slices of stacks that were written.
    """
    leaves, tree = jax.tree.flatten(arguments, is_leaf=is_slice)
    shapes = [leaf.aval if is_slice(leaf) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    jaxpr, result = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(tree, shapes))
    made = _evaluate(jaxpr, leaves)
    return jax.tree.unflatten(jax.tree.structure(result), made)


def call_with_slices(function: Callable[..., T], *arguments: PyTree) -> T:
    """Calls a function that can be given slices in place of arrays.

    Outside of `call` all leaves are arrays, and this is ``function(*arguments)``. Within it, a leaf may be a `Slice`;
    the function then returns the slices that it writes as `Slice.written`.

    Args:
      function: of trees of arrays. It has no gradients here.
      arguments: its arguments.
    """
    leaves, tree = jax.tree.flatten(arguments)
    jaxpr, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    made = _call_with_slices.bind(*leaves, jaxpr=jaxpr, function=function, tree=tree)
    found: T = jax.tree.unflatten(jax.tree.structure(result), made)
    return found


def _call_arrays(*leaves: Array, jaxpr: jex.ClosedJaxpr, **_: Any) -> Sequence[Array]:
    made: Sequence[Array] = jex.jaxpr_as_fun(jaxpr)(*leaves)
    return made


_call_with_slices = jex.Primitive("call_with_slices")
_call_with_slices.multiple_results = True
_call_with_slices.def_impl(_call_arrays)
_call_with_slices.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))
mlir.register_lowering(_call_with_slices, mlir.lower_fun(_call_arrays, multiple_results=True))


def _evaluate(closed: jex.ClosedJaxpr, arguments: Sequence[Value]) -> list[Value]:
    """Evaluates a jaxpr on arrays, slices, and numbers of Python's for what is known while tracing."""
    jaxpr = closed.jaxpr
    values: dict[Any, Value] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def value(atom: Any) -> Value:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for equation in jaxpr.eqns:
        made = _operation(equation, [value(atom) for atom in equation.invars])
        values |= zip(equation.outvars, made, strict=True)
    return [value(atom) for atom in jaxpr.outvars]


def _operation(equation: jex.JaxprEqn, operands: list[Value]) -> Sequence[Value]:
    """Evaluates one operation; returns all of its results."""
    name, parameters = equation.primitive.name, equation.params
    if name == "platform_index":
        own = PLATFORMS.get(platform := _platform(), {platform})
        return [next(i for i, names in enumerate(parameters["platforms"]) if names is None or own & set(names))]
    if name == "cond" and isinstance(operands[0], int):
        return _evaluate(parameters["branches"][operands[0]], operands[1:])
    if (inner := _inner(name, parameters)) is not None:
        return _evaluate(inner, operands)
    with_stacks = _WITH_STACKS.get(name) if any(map(is_slice, operands)) else None
    if with_stacks is not None and (written := with_stacks(parameters, operands)) is not None:
        return written
    arrays = [operand.array if is_slice(operand) else operand for operand in operands]
    made = equation.primitive.bind(*arrays, **equation.primitive.get_bind_params(parameters))
    return made if equation.primitive.multiple_results else [made]


def _platform() -> str:
    """Returns the platform that a program is for: of the devices of the mesh, which need not be here, if it has any."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _inner(name: str, parameters: dict[str, Any]) -> jex.ClosedJaxpr | None:
    """Returns the jaxpr of a call whose results are those of its jaxpr."""
    if name == primitives.jit_p.name:
        return parameters["jaxpr"]
    return parameters["call_jaxpr"] if name in CUSTOM else None


def _with_slices(parameters: dict[str, Any], operands: list[Value]) -> list[Value]:
    """Calls a function that takes slices."""
    made = parameters["function"](*jax.tree.unflatten(parameters["tree"], operands))
    return jax.tree.leaves(made, is_leaf=is_slice)


def _same(_: dict[str, Any], operands: list[Value]) -> list[Value]:
    return operands


def _pad(parameters: dict[str, Any], operands: list[Value]) -> list[Value] | None:
    """Pads with nothing."""
    return operands[:1] if not any(map(any, parameters["padding_config"])) else None


def _cond(parameters: dict[str, Any], operands: list[Value]) -> list[Value]:
    """Chooses by data between alternatives, which have the stacks."""
    index, *others = operands

    def alternative(jaxpr: jex.ClosedJaxpr) -> Callable[..., list[Array]]:
        def run(*given: Array) -> list[Array]:
            values = [own.written(x) if is_slice(own) else x for own, x in zip(others, given, strict=True)]
            return [made.array if is_slice(made) else made for made in _evaluate(jaxpr, values)]

        return run

    stacks = [each.stack if is_slice(each) else each for each in others]
    return list(lax.switch(index, [alternative(each) for each in parameters["branches"]], *stacks))


def _scatter(parameters: dict[str, Any], operands: list[Value]) -> list[Value] | None:
    """Writes into the stack, of which another dimension is said by an index."""
    operand, indices, updates = operands
    if not is_slice(operand) or is_slice(indices) or is_slice(updates):
        return None
    old = parameters["dimension_numbers"]

    def later(dimensions: Sequence[int]) -> tuple[int, ...]:
        return tuple(dimension + (dimension >= AXIS) for dimension in dimensions)

    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=old.update_window_dims,
        inserted_window_dims=tuple(sorted((AXIS, *later(old.inserted_window_dims)))),
        scatter_dims_to_operand_dims=(AXIS, *later(old.scatter_dims_to_operand_dims)),
        operand_batching_dims=later(old.operand_batching_dims),
        scatter_indices_batching_dims=old.scatter_indices_batching_dims,
    )
    layer = jnp.broadcast_to(operand.index.astype(indices.dtype), (*indices.shape[:-1], 1))
    stack = lax.scatter(
        operand.stack, jnp.concatenate([layer, indices], axis=-1), updates, numbers, mode=parameters["mode"],
        indices_are_sorted=parameters["indices_are_sorted"], unique_indices=parameters["unique_indices"],
    )  # fmt: skip
    return [operand.written(stack)]


def _custom_call(parameters: dict[str, Any], operands: list[Value]) -> list[Value] | None:
    """Calls kvjax's own code with stacks and the index of the slice."""
    indexed = INDEXED.get(parameters["target_name"])
    if indexed is None or not all(is_slice(operands[i]) for i in indexed.stacks):
        return None
    may_be = {*indexed.stacks, *indexed.optional}
    if any(is_slice(operand) and i not in may_be for i, operand in enumerate(operands)):
        return None
    arrays = [operand.stack if is_slice(operand) else operand for operand in operands]
    results = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in parameters["result_avals"]]
    run = jax.ffi.ffi_call(indexed.target, results, vmap_method=parameters["vmap_method"])
    return list(run(*arrays, operands[indexed.stacks[0]].index, **dict(parameters["attributes"])))


_WITH_STACKS: dict[str, Callable[[dict[str, Any], list[Value]], list[Value] | None]] = {
    "stop_gradient": _same,
    "pad": _pad,
    "cond": _cond,
    "scatter": _scatter,
    "ffi_call": _custom_call,
    "call_with_slices": _with_slices,
}
