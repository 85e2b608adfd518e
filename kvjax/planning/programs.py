"""The programs of a plan, compiled from shapes alone, and the memory that they need."""

import dataclasses
import re
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike

from kvjax.cache.layer_stack import LayerStack, sequence_of
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.lowering import Lowered
from kvjax.cache.state import Block, Layer
from kvjax.errors import KvjaxError
from kvjax.generation import layer_calls
from kvjax.generation.decoding import CHUNK, decode_steps
from kvjax.generation.layer_calls import GroupBudgets
from kvjax.generation.prefill import prefill_steps
from kvjax.generation.sampling import Greedy
from kvjax.models import layer_loop
from kvjax.models.config import DecoderConfig
from kvjax.models.stacked_params import LAYER, are_alike, stacked
from kvjax.numerics.slices import stacked_shape
from kvjax.parallel import sharding
from kvjax.parallel.host_memory import DEVICE, HOST
from kvjax.planning.roofline import Shapes, local_bytes
from kvjax.products.quantized import is_quantized

Array = jax.Array

PALLAS = "jax._src.pallas"
#: What the compiler of TPUs says of a kernel that needs too much of another memory than the device's.
ON_CHIP = re.compile(r"memory space (?!hbm)\w+")


class _Jitted(Protocol):
    """A jitted function."""

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...


def with_loops(config: DecoderConfig, layout: CacheLayout, shapes: Shapes) -> tuple[CacheLayout, Shapes]:
    """Returns a layout with the layers that run as loops on accelerators, and the shapes with these in stacks.

    Args:
      config: the decoder.
      layout: of the cache.
      shapes: with the layers apart.
    """
    leaves = jax.tree.leaves(shapes.params, is_leaf=is_quantized)
    layers = [shapes.params[f"{LAYER}{index}"] for index in range(config.num_layers)]
    if any(map(is_quantized, leaves)) or local_bytes(leaves, HOST) or not are_alike(layers):
        return layout, shapes
    shapes = shapes._replace(params=stacked(shapes.params))
    runs = layer_loop.possible_runs(config, shapes.params, layout.prompt, layout.decode)
    entries: list[Layer | LayerStack] = []
    for index, layer in enumerate(shapes.carry.state.layers):
        run = next((run for run in runs if index in run.layers), None)
        if run is None:
            entries.append(layer)
        elif index == run.start:
            in_stack = jax.tree.map(lambda leaf, n=len(run): stacked_shape(leaf, n), layer)
            entries.append(LayerStack(in_stack, len(run)))
    state = shapes.carry.state.replace(layers=sequence_of(entries))
    return dataclasses.replace(layout, runs=runs), shapes._replace(carry=shapes.carry._replace(state=state))


def compile_decode(
    config: DecoderConfig, layout: CacheLayout, shapes: Shapes, mesh: Mesh | AbstractMesh | None
) -> tuple[jax.stages.Compiled | None, str]:
    """Compiles the decode loop; see `compile_for`."""
    stop = jax.ShapeDtypeStruct((len(config.eos_token_ids),), jnp.int32)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    options = {"config": config, "phase": layout.decode, "sampler": Greedy()}
    row = shapes.carry.token
    forced = _tokens((*row.shape, CHUNK), mesh)
    return compile_for(decode_steps, shapes.params, shapes.carry, stop, steps, forced, **options)


def compile_prefill(
    config: DecoderConfig, lowered: Lowered, shapes: Shapes, mesh: Mesh | AbstractMesh | None, prompt_length: int
) -> tuple["Memory | None", str]:
    """Compiles the prefill: one program, or those of single layers if the layout says so.

    Returns:
      The memory that it needs and an empty string, or None and the message of the compiler; see `compile_for`.
    """
    row = shapes.carry.token
    tokens = _tokens((*row.shape, prompt_length), mesh)
    budgets = jax.tree.map(lambda _: row, lowered.budgets)
    if lowered.layout.calls_layers:
        return _compile_layers(config, lowered.layout, shapes, tokens, budgets.prompt, mesh)
    compiled, problem = compile_for(
        prefill_steps, shapes.params, tokens, row, row, budgets.prompt, budgets.decode, config=config,
        layout=lowered.layout, score=False,
    )  # fmt: skip
    return Memory.of(compiled), problem


def _compile_layers(
    config: DecoderConfig,
    layout: CacheLayout,
    shapes: Shapes,
    tokens: Array,
    budget: GroupBudgets,
    mesh: Mesh | AbstractMesh | None,
) -> tuple["Memory | None", str]:
    """Compiles the programs of `layer_calls.prefill_by_layer`, for prompts in one shot; see `compile_prefill`."""
    row, rest = shapes.carry.token, layer_calls.without_layers(shapes.params)
    batch, width = tokens.shape
    dtype = rest["embed"]["tokens"].dtype
    number = jax.ShapeDtypeStruct((), jnp.int32)
    # [B, n], [B, n, hidden] and [B, E]
    position = _tokens(tokens.shape, mesh)
    x, last = _rows((batch, width, config.hidden_size), dtype, mesh), _rows((batch, config.embed_size), dtype, mesh)
    compiled = [
        compile_for(layer_calls.enter, rest, tokens, row, number, row, config=config),
        compile_for(layer_calls.leave, rest, x, tokens, row, number, last, config=config, score=False),
        compile_for(layer_calls.logits_of, rest, last, config=config),
    ]
    # While one of them runs, other parameters and the caches of other layers are in memory.
    held, own_bytes = local_bytes(shapes.params, DEVICE), [local_bytes(rest, DEVICE)] * len(compiled)
    kinds: dict[Hashable, int] = {}
    for index, groups in enumerate(layout.prompt):
        kinds.setdefault((config.kind(index), groups), index)
    for index in kinds.values():
        own, kind, groups = shapes.params[f"layer_{index}"], config.kind(index), layout.prompt[index]
        block = Block(position=position, prompt=row, total=row, budget=budget[index], layer=number)
        compiled.append(
            compile_for(layer_calls.call_layer, own, x, None, block, config=config, kind=kind, groups=groups)
        )
        own_bytes.append(local_bytes((own, shapes.carry.state.layers[index]), DEVICE))
    if problem := next((problem for _, problem in compiled if problem), ""):
        return None, problem
    held += local_bytes(shapes.carry.state.layers, DEVICE)
    needed = [memory for memory in (Memory.of(each) for each, _ in compiled) if memory is not None]
    most = max(memory.total - own for memory, own in zip(needed, own_bytes, strict=True))
    return Memory(held + most, max(memory.temporaries for memory in needed)), ""


def _tokens(shape: tuple[int, ...], mesh: Mesh | AbstractMesh | None) -> Array:
    """Returns the shape of tokens [B, n], whose rows a mesh divides."""
    return _rows(shape, jnp.int32, mesh)


def _rows(shape: tuple[int, ...], dtype: DTypeLike, mesh: Mesh | AbstractMesh | None) -> Array:
    """Returns the shape of an array [B, ...] whose rows a mesh divides, typed as an array."""
    axes = ("batch", *(None for _ in shape[1:]))
    place = mesh and NamedSharding(mesh, sharding.spec(axes, shape, mesh))
    return cast(Array, jax.ShapeDtypeStruct(shape, dtype, sharding=place))


def compile_for(function: _Jitted, *arguments: Any, **options: Any) -> tuple[jax.stages.Compiled | None, str]:
    """Compiles a jitted function for arguments of the given shapes, on the mesh in force.

    Returns:
      The program and an empty string, or None and the message of the compiler if the device has too little memory.

    Raises:
      KvjaxError: if the compiler fails for another reason.
    """
    lowered = function.lower(*arguments, **options)
    try:
        return lowered.compile(), ""
    except Exception as error:
        # What Pallas raises of a kernel has no public type.
        of_kernel = type(error).__module__.startswith(PALLAS)
        if not (of_kernel or isinstance(error, jax.errors.JaxRuntimeError)):
            raise
        message = str(error).splitlines()[0].strip()
        small = ON_CHIP.search(message)
        if "RESOURCE_EXHAUSTED" in str(error) and not small:
            return None, message
        remedy = "; implementation='xla' runs without kernels" if of_kernel or small else ""
        raise KvjaxError(f"the compiler rejects this program: {message.rstrip('.')}{remedy}.") from None


class Memory(NamedTuple):
    """The memory of one device that a program needs.

    Attributes:
      total: bytes of arguments, results, scratch memory and the program itself.
      temporaries: bytes of scratch memory.
    """

    total: int
    temporaries: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled | None) -> "Memory | None":
        """Returns the memory of a program, or None if there is no program."""
        if compiled is None:
            return None
        memory = compiled.memory_analysis()
        assert memory is not None, "this backend does not report the memory of its programs"
        total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        total += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
        return cls(int(total), int(memory.temp_size_in_bytes))
