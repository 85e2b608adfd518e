"""The programs of a plan, compiled from shapes alone, and the memory that they need."""

import re
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.lowering import Lowered
from kvjax.errors import KvjaxError
from kvjax.generation.decoding import CHUNK, decode_steps
from kvjax.generation.prefill import prefill_steps
from kvjax.generation.sampling import Greedy
from kvjax.models.config import DecoderConfig
from kvjax.parallel import sharding
from kvjax.planning.roofline import Shapes

PALLAS = "jax._src.pallas"
#: What the compiler of TPUs says of a kernel that needs too much of another memory than the device's.
ON_CHIP = re.compile(r"memory space (?!hbm)\w+")


class _Jitted(Protocol):
    """A jitted function."""

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...


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
) -> tuple[jax.stages.Compiled | None, str]:
    """Compiles the prefill; see `compile_for`."""
    row = shapes.carry.token
    tokens = _tokens((*row.shape, prompt_length), mesh)
    budgets = jax.tree.map(lambda _: row, lowered.budgets)
    return compile_for(
        prefill_steps, shapes.params, tokens, row, row, budgets.prompt, budgets.decode, config=config,
        layout=lowered.layout, score=False,
    )  # fmt: skip


def _tokens(shape: tuple[int, ...], mesh: Mesh | AbstractMesh | None) -> jax.ShapeDtypeStruct:
    """Returns the shape of tokens [B, n], whose rows a mesh divides."""
    place = mesh and NamedSharding(mesh, sharding.spec(("batch", None), shape, mesh))
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)


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
