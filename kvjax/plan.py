"""What a run needs and how fast it could be, without running it: the decode step compiled ahead of time from shapes.

The program is `kvjax.generate`'s own decode loop, compiled for this machine or for a named TPU topology that need not
exist; nothing of the model is allocated.
"""

import contextlib
import dataclasses
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tabulate import tabulate

from kvjax import policies, sharding
from kvjax.attention import Implementation
from kvjax.cache.layout import CacheLayout
from kvjax.cache.limits import Limits, sizes_for
from kvjax.cache.lowering import Lowered, lower
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.devices import DEVICES, Device, local_device, topology_devices
from kvjax.errors import ConfigError, KvjaxError
from kvjax.generate import decode_steps
from kvjax.inputs import check_batch, check_count
from kvjax.models.config import DecoderConfig
from kvjax.policies.base import Policy
from kvjax.prefill import prefill_steps
from kvjax.roofline import Roofline, Shapes, decode_shapes, fewest_bytes, live_slots, local_bytes, roofline
from kvjax.sampling import Greedy
from kvjax.selection.base import Selection
from kvjax.storage.base import Storage


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` returns; bytes are those of one device, the fullest.

    Attributes:
      target, device: the machine or topology, and one of its devices.
      mesh: axis sizes; `mesh_chosen`: they were picked here.
      policy, batch, prompt_length, new_tokens, dtype, parameters: what was planned.
      slots: per layer and group of heads, slots of each head's arrays while decoding.
      explain: what runs in each layer, and why nothing faster; see `CacheLayout.explain`.
      weights, cache: bytes of parameters and of the KVState, from shapes.
      temporaries: bytes of the decode program's scratch memory; None = it did not compile for want of memory.
      other: bytes of program, tokens and padding of layouts; None likewise.
      total: all of these; without `temporaries` a lower bound.
      prefill_temporaries, prefill_total: the same of the prefill program; None = not asked for, or no memory.
      fits: whether decode (and prefill, if asked for) stays within the device's memory; None = unknown.
      problem: the compiler's own words if memory did not suffice.
      flops_per_token, bytes_per_token: of the whole mesh, for one new token of one row.
      step, full: the roofline under the policy, and with a full cache.
      compile_seconds: how long compilation took.
      compiled: the decode program (`jax.stages.Compiled`), or None.
    """

    target: str
    device: Device
    mesh: dict[str, int]
    mesh_chosen: bool
    policy: str
    batch: int
    prompt_length: int
    new_tokens: int
    dtype: str
    parameters: int
    slots: tuple[int, ...]
    explain: str
    weights: int
    cache: int
    temporaries: int | None
    other: int | None
    total: int
    prefill_temporaries: int | None
    prefill_total: int | None
    fits: bool | None
    problem: str
    flops_per_token: float
    bytes_per_token: float
    step: Roofline
    full: Roofline
    compile_seconds: float
    compiled: Any = dataclasses.field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the program, as JSON's types."""
        values = dataclasses.asdict(dataclasses.replace(self, compiled=None))
        del values["compiled"]
        return values | {"slots": list(self.slots)}

    def table(self) -> str:
        """Text for a person: what is needed, what there is, and how fast it could be."""
        least, full, step = "" if self.temporaries is not None else "at least ", self.full, self.step
        full_total = self.weights + full.cache
        rows = [
            ("weights", size(self.weights), size(self.weights)),
            ("cache, statistics included", size(self.cache), size(full.cache)),
            ("temporaries", size(self.temporaries), "-"),
            ("program, tokens, padding", size(self.other), "-"),
            ("total to decode", least + size(self.total), f"at least {size(full_total)}"),
            ("total to prefill", size(self.prefill_total), "-"),
            ("memory", size(self.device.memory), size(self.device.memory)),
            ("fits", _yes(self.fits), _yes(_below(full_total, self.device.memory), "before temporaries")),
            ("moved a step", size(step.weights_moved + step.cache_moved), size(full.weights_moved + full.cache_moved)),
            ("computed a step", _si(step.flops, "FLOP"), _si(full.flops, "FLOP")),
            ("roofline", _speed(step), _speed(full)),
        ]
        if self.prefill_total is None:
            del rows[5]
        axes = ",".join(f"{axis}:{count}" for axis, count in self.mesh.items())
        low, high = min(self.slots), max(self.slots)
        kept = f"{low}" if low == high else f"{low} to {high}"
        first = (
            f"{self.parameters / 1e9:.3g}B parameters in {self.dtype}; batch {self.batch}, {self.prompt_length} prompt "
            f"+ {self.new_tokens} new tokens; {kept} slots a head under {self.policy}."
        )
        chosen = " (chosen here: fewest bytes moved)" if self.mesh_chosen else ""
        second = f"{self.target}, mesh {axes}{chosen}; bytes and FLOPs of one device:"
        columns = 2 if self.policy == "full" else 3
        headers, alignment = ("", self.policy, "full cache")[:columns], ("left", "right", "right")[:columns]
        body = tabulate([row[:columns] for row in rows], headers=headers, colalign=alignment, disable_numparse=True)
        last = (
            f"A token needs {_si(self.flops_per_token, 'FLOP')} and {size(self.bytes_per_token)} moved. "
            f"Compiled in {self.compile_seconds:.1f} s.\nOne device: {_si(self.device.bandwidth, 'B/s')}, "
            f"{_si(self.device.flops, 'FLOP/s')} ({self.device.source}). The roofline counts no collectives."
        )
        words = (f"The compiler says: {self.problem}",) if self.problem else ()
        return "\n".join((first, second, body, last, self.explain, *words))


def plan(
    config: DecoderConfig,
    policy: Policy | CacheSpec,
    *,
    batch: int = 1,
    prompt_length: int,
    new_tokens: int,
    dtype: Any = None,
    mesh_axes: str = "",
    topology: str | None = None,
    prefill: bool = False,
    prefill_block: int | None = None,
    implementation: Implementation = "auto",
    storage: Storage | None = None,
    selection: Selection | None = None,
) -> Plan:
    """Compiles what `kvjax.generate` would run, and counts what it needs.

    Args:
      config: the decoder.
      policy: what the cache keeps, or a `CacheSpec`.
      batch: rows.
      prompt_length: tokens of each row's prompt.
      new_tokens: tokens that follow.
      dtype: of weights and cache; None = float32 on a CPU, bfloat16 elsewhere.
      mesh_axes: as in ``"data:2,model:4"``. Empty = one local device, or all devices of the topology, split between
        the axes so that each moves the fewest bytes a step (of equals, the split with the larger ``model``).
      topology: a TPU topology such as ``"v5e:2x4"`` (needs the libtpu wheel, no TPU); None = this machine.
      prefill: whether to compile the prefill too.
      prefill_block: as in `kvjax.generate`.
      implementation: as in `kvjax.generate`.
      storage: as in `kvjax.generate`.
      selection: as in `kvjax.generate`.

    Raises:
      KvjaxError: a run that `kvjax.generate` would refuse, an unknown topology or mesh, or no libtpu.
    """
    spec = as_spec(policy, storage, selection)
    for name, value in (("batch", batch), ("prompt_length", prompt_length), ("new_tokens", new_tokens)):
        check_count(name, value)
    check_batch(config, np.zeros((1, prompt_length), np.int32), None, new_tokens=new_tokens)
    targets = topology_devices(topology) if topology else jax.devices()
    dtype = _dtype(dtype, targets[0].platform)
    prompts = np.full((batch,), prompt_length, np.int32)
    sizes = sizes_for(
        prompts, new_tokens - 1, width=prompt_length, block=prefill_block, limits=Limits(prompt_length, new_tokens),
        last_fed=False,
    )  # fmt: skip

    def lowered_on(mesh: Mesh | None, spec: CacheSpec) -> Lowered:
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            return lower(
                spec, config, sizes, prompts, implementation=implementation, platform=targets[0].platform, dtype=dtype
            )

    axes: Any = mesh_axes
    if topology and not mesh_axes:
        alone = lowered_on(None, spec)
        live = live_slots(config, alone, prompt_length, new_tokens)
        axes = fewest_bytes(config, alone.layout, dtype, batch, live, len(targets))
    mesh = sharding.make_mesh(axes, targets) if axes else None
    count = mesh.size if mesh else 1
    lowered, kept = lowered_on(mesh, spec), lowered_on(mesh, CacheSpec(policies.full()))
    layout = lowered.layout
    live = live_slots(config, lowered, prompt_length, new_tokens)
    device = DEVICES[targets[0].device_kind] if topology else local_device(targets[:count])

    shapes = decode_shapes(config, layout, dtype, batch, mesh)
    step = roofline(config, shapes, live, device)
    full_shapes = decode_shapes(config, kept.layout, dtype, batch, mesh)
    full = roofline(config, full_shapes, live_slots(config, kept, prompt_length, new_tokens), device)
    whole = roofline(config, decode_shapes(config, layout, dtype, batch, None), live, device)
    weights, cache = local_bytes(shapes.params), step.cache

    start = time.perf_counter()
    compiled, problem = _compile_decode(config, layout, shapes, mesh)
    memory, prefill_memory = _Memory.of(compiled), None
    if prefill:
        program, prefill_problem = _compile_prefill(config, lowered, shapes, mesh, prompt_length)
        prefill_memory, problem = _Memory.of(program), problem or prefill_problem
    seconds = time.perf_counter() - start

    needed = memory.total if memory else weights + cache
    peak = max(needed, prefill_memory.total if prefill_memory else 0)
    return Plan(
        target=f"TPU {topology}" if topology else f"this machine ({device.kind})",
        device=device,
        mesh=dict(mesh.shape) if mesh else {"data": 1, "model": 1},
        mesh_chosen=bool(topology and not mesh_axes and count > 1),
        policy=spec.name,
        batch=int(batch),
        prompt_length=int(prompt_length),
        new_tokens=int(new_tokens),
        dtype=str(dtype),
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.params)),
        slots=tuple(group.capacity for group in layout.groups),
        explain=layout.explain(),
        weights=weights,
        cache=cache,
        temporaries=memory and memory.temporaries,
        other=memory and memory.total - memory.temporaries - weights - cache,
        total=needed,
        prefill_temporaries=prefill_memory and prefill_memory.temporaries,
        prefill_total=prefill_memory and prefill_memory.total,
        fits=False if problem else _below(peak, device.memory),
        problem=problem,
        flops_per_token=whole.flops / batch,
        bytes_per_token=(step.weights_moved + step.cache_moved) * count / batch,
        step=step,
        full=full,
        compile_seconds=seconds,
        compiled=compiled,
    )


def _dtype(dtype: Any, platform: str) -> Any:
    if dtype is None:
        return jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    try:
        return jnp.dtype(dtype)
    except TypeError:
        raise ConfigError(f"dtype {dtype!r} is unknown; use float32, bfloat16 or float16.") from None


def _compile_decode(config: DecoderConfig, layout: CacheLayout, shapes: Shapes, mesh: Mesh | None) -> tuple[Any, str]:
    stop = jax.ShapeDtypeStruct((len(config.eos_token_ids),), jnp.int32)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    options = {"config": config, "phase": layout.decode, "sampler": Greedy()}
    return _compile(decode_steps, mesh, shapes.params, shapes.carry, stop, steps, **options)


def _compile_prefill(
    config: DecoderConfig, lowered: Lowered, shapes: Shapes, mesh: Mesh | None, prompt_length: int
) -> tuple[Any, str]:
    row = shapes.carry.token
    place = mesh and NamedSharding(mesh, sharding.spec(("batch", None), (*row.shape, prompt_length), mesh))
    tokens = jax.ShapeDtypeStruct((*row.shape, prompt_length), jnp.int32, sharding=place)
    budgets = jax.tree.map(lambda _: row, lowered.budgets)
    return _compile(
        prefill_steps, mesh, shapes.params, tokens, row, row, budgets.prompt, budgets.decode, config=config,
        layout=lowered.layout, score=False,
    )  # fmt: skip


def _compile(function: Any, mesh: Mesh | None, *arguments: Any, **options: Any) -> tuple[Any, str]:
    """The program and "", or None and the compiler's words when the device has too little memory for it."""
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        lowered = function.lower(*arguments, **options)
        try:
            return lowered.compile(), ""
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise KvjaxError(f"the compiler refuses this program: {str(error).splitlines()[0].strip()}") from None
            return None, str(error).splitlines()[0].strip()


class _Memory(NamedTuple):
    """Bytes of one device while a program runs: all of them, and its scratch memory alone."""

    total: int
    temporaries: int

    @classmethod
    def of(cls, compiled: Any) -> "_Memory | None":
        if compiled is None:
            return None
        memory = compiled.memory_analysis()
        total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        total += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
        return cls(int(total), int(memory.temp_size_in_bytes))


def _below(needed: float, memory: float | None) -> bool | None:
    return None if memory is None else bool(needed <= memory)


def _yes(answer: bool | None, condition: str = "") -> str:
    if answer is None:
        return "unknown"
    return "no" if not answer else f"yes, {condition}" if condition else "yes"


def _speed(step: Roofline) -> str:
    return "-" if step.tokens_per_second is None else f"{step.tokens_per_second:,.3g} tokens/s ({step.limit})"


def size(count: float | None) -> str:
    """Bytes as text in decimal units: ``8.56 GB``."""
    return _si(count, "B")


def _si(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
