"""Plans a run without running it: its memory, by compiling it ahead of time from shapes, and its maximum speed.

The program is the decode loop of `kvjax.generate`. It is compiled for this machine or for a TPU topology, which need
not be present. No parameters and no cache are allocated.
"""

import dataclasses
import re
import time
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike
from tabulate import tabulate

from kvjax import policies, sharding
from kvjax.attention import Implementation
from kvjax.cache.layout import CacheLayout
from kvjax.cache.limits import Limits, sizes_for
from kvjax.cache.lowering import Lowered, lower
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.collectives import Collectives, collectives
from kvjax.devices import Device, local_device
from kvjax.errors import ConfigError, KvjaxError
from kvjax.generate import decode_steps
from kvjax.inputs import check_batch, check_count
from kvjax.memory import DEVICE
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import parameter_count
from kvjax.models.quantize import WeightCodes, as_weight_codes
from kvjax.policies.base import Policy
from kvjax.prefill import prefill_steps
from kvjax.roofline import Roofline, Shapes, average_slots, decode_shapes, fewest_bytes, local_bytes, roofline
from kvjax.rules import Rules, using
from kvjax.sampling import Greedy
from kvjax.selection.base import Selection
from kvjax.storage.base import Storage
from kvjax.targets import find_target
from kvjax.units import si, size

PALLAS = "jax._src.pallas"
#: What the compiler of TPUs says of a kernel that needs too much of another memory than the device's.
ON_CHIP = re.compile(r"memory space (?!hbm)\w+")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`. Bytes are those of the device that needs the most.

    Attributes:
      target: the machine or the topology.
      device: one of its devices.
      mesh: axis name -> size.
      mesh_chosen: whether `plan` has chosen the mesh.
      policy: name of the policy, with storage and selection.
      batch: the number of rows.
      prompt_length: the number of tokens of each row's prompt.
      new_tokens: the number of new tokens of each row.
      dtype: of parameters and cache.
      codes: name of what weights are quantised to, or empty.
      parameters: the total number of elements of the parameters.
      slots: for each group of heads of each layer, the number of slots per head that is allocated for decoding.
      explain: what runs in each layer, and why no faster kernel does; see `CacheLayout.explain`.
      weights: bytes of the parameters on the device, from shapes.
      weights_even: bytes of the parameters on a device if they were divided evenly over those that share a row.
      cache: bytes of the KVState on the device, from shapes.
      cache_even: bytes of the KVState on a device if it were divided evenly, without padding.
      rows: the number of rows of arrays; those after the batch's are padding.
      host: bytes of parameters, keys and values in host memory, from shapes.
      temporaries: bytes of scratch memory of the decode program; None if it did not compile for lack of memory.
      other: bytes of the program itself, of tokens and of the padding of layouts; None as above.
      total: bytes of all of these; a lower bound if `temporaries` is None.
      prefill_temporaries: bytes of scratch memory of the prefill program; None if it was not requested or did not
        compile for lack of memory.
      prefill_total: bytes that the prefill program needs in all; None as above.
      fits: whether decoding, and prefill if requested, fit into the memory of the device; None if unknown.
      problem: the message of the compiler if the memory does not suffice, otherwise empty.
      flops_per_token: FLOPs of the whole mesh per new token of one row.
      bytes_per_token: bytes that the whole mesh moves per new token of one row.
      collectives: of a decode step; None if it did not compile.
      step: the roofline of a decode step under the policy.
      full: the roofline of a decode step with a full cache.
      compile_seconds: the wall time of compilation.
      compiled: the decode program, or None if it did not compile.
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
    codes: str
    parameters: int
    slots: tuple[int, ...]
    explain: str
    weights: int
    weights_even: int
    cache: int
    cache_even: int
    rows: int
    host: int
    temporaries: int | None
    other: int | None
    total: int
    prefill_temporaries: int | None
    prefill_total: int | None
    fits: bool | None
    problem: str
    flops_per_token: float
    bytes_per_token: float
    collectives: Collectives | None
    step: Roofline
    full: Roofline
    compile_seconds: float
    compiled: jax.stages.Compiled | None = dataclasses.field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Returns all attributes except the program, as JSON values."""
        values = dataclasses.asdict(dataclasses.replace(self, compiled=None))
        del values["compiled"]
        asked = self.collectives and self.collectives._asdict()
        return values | {"slots": list(self.slots), "collectives": asked}

    @property
    def held(self) -> str:
        """The dtype of the parameters, and what weights are quantised to."""
        return f"{self.dtype}, weights {self.codes}" if self.codes else self.dtype

    @property
    def _padding(self) -> str:
        """Says how many rows are padding; nothing if none is."""
        return "" if self.rows == self.batch else f" ({self.rows - self.batch} of {self.rows} rows are padding)"

    @property
    def _asked(self) -> str:
        """Formats the collectives of a step, and how long their bytes take."""
        if self.collectives is None:
            return "-"
        number, moved = self.collectives
        return f"{number:.0f}, {_in_time(moved, self.device.interconnect)}"

    def _linked(self, step: Roofline) -> str:
        """Formats the bytes that a step moves from the host, and how long they take."""
        return _in_time(step.link_moved, self.device.link) if step.link_moved else size(0)

    @staticmethod
    def _experts(step: Roofline) -> str:
        """Formats how many experts of a layer are read."""
        return f"{step.experts_read:.3g} of {step.experts}"

    def table(self) -> str:
        """Returns a table of the memory that the run needs and has, and of its maximum speed."""
        least, full, step = "" if self.temporaries is not None else "at least ", self.full, self.step
        full_total = self.weights + full.cache
        rows = [
            ("weights", size(self.weights), size(self.weights)),
            ("weights, times the even split", _times(self.weights, self.weights_even), "-"),
            ("cache, statistics included", size(self.cache), size(full.cache)),
            ("cache, times the even split", f"{_times(self.cache, self.cache_even)}{self._padding}", "-"),
            ("temporaries", size(self.temporaries), "-"),
            ("program, tokens, padding", size(self.other), "-"),
            ("total to decode", least + size(self.total), f"at least {size(full_total)}"),
            ("total to prefill", size(self.prefill_total), "-"),
            ("in host memory", size(self.host), size(full.host)),
            ("memory", size(self.device.memory), size(self.device.memory)),
            (
                "fits",
                _yes(self.fits, "" if self.compiled else "before temporaries"),
                _yes(_below(full_total, self.device.memory), "before temporaries"),
            ),
            (
                "moved per step",
                size(step.weights_moved + step.cache_moved),
                size(full.weights_moved + full.cache_moved),
            ),
            ("over the host link per step", self._linked(step), self._linked(full)),
            ("collectives per step", self._asked, "-"),
            ("experts of a layer read per step", self._experts(step), self._experts(full)),
            ("computed per step", si(step.flops, "FLOP"), si(full.flops, "FLOP")),
            ("roofline", _speed(step), _speed(full)),
        ]
        left_out = {"total to prefill"} if self.prefill_total is None else set()
        left_out |= set() if self.collectives and self.collectives.number else {"collectives per step"}
        left_out |= set() if step.experts else {"experts of a layer read per step"}
        if max(self.mesh.values()) == 1:
            left_out |= {"weights, times the even split", "cache, times the even split"}
        left_out |= set() if self.host or full.host else {"in host memory", "over the host link per step"}
        rows = [row for row in rows if row[0] not in left_out]
        axes = ",".join(f"{axis}:{count}" for axis, count in self.mesh.items())
        low, high = min(self.slots), max(self.slots)
        kept = f"{low}" if low == high else f"{low} to {high}"
        first = (
            f"{self.parameters / 1e9:.3g}B parameters in {self.held}; batch {self.batch}, {self.prompt_length} prompt "
            f"+ {self.new_tokens} new tokens; {kept} slots a head under {self.policy}."
        )
        chosen = " (chosen here: fewest bytes moved)" if self.mesh_chosen else ""
        second = f"{self.target}, mesh {axes}{chosen}; bytes and FLOPs of one device:"
        columns = 2 if self.policy == "full" else 3
        headers, alignment = ("", self.policy, "full cache")[:columns], ("left", "right", "right")[:columns]
        body = tabulate([row[:columns] for row in rows], headers=headers, colalign=alignment, disable_numparse=True)
        link = f", {si(self.device.link, 'B/s')} from the host" if self.host and self.device.link else ""
        last = (
            f"A token needs {si(self.flops_per_token, 'FLOP')} and {size(self.bytes_per_token)} moved. "
            f"Compiled in {self.compile_seconds:.1f} s.\nOne device: {si(self.device.bandwidth, 'B/s')}, "
            f"{si(self.device.flops, 'FLOP/s')}{link} ({self.device.source}). The roofline counts no collectives."
        )
        words = (f"The compiler reports: {self.problem}",) if self.problem else ()
        return "\n".join((first, second, body, last, self.explain, *words))


def plan(
    config: DecoderConfig,
    policy: Policy | CacheSpec,
    *,
    batch: int = 1,
    prompt_length: int,
    new_tokens: int,
    dtype: DTypeLike | None = None,
    mesh_axes: str = "",
    topology: str | None = None,
    prefill: bool = False,
    prefill_block: int | None = None,
    implementation: Implementation = "auto",
    storage: Storage | None = None,
    selection: Selection | None = None,
    host_weights: float = 0.0,
    weights: WeightCodes | str | None = None,
    rules: Rules | None = None,
    compiles: bool = True,
    decode: bool = True,
) -> Plan:
    """Compiles a run ahead of time, and counts its memory and FLOPs.

    The program is that of `kvjax.generate` with limits=Limits(prompt_length, new_tokens, shortest=prompt_length): all
    rows have prompts of one length, and arrays have exactly the sizes that these need.

    Args:
      config: the decoder.
      policy: which slots the cache keeps, or a `CacheSpec`.
      batch: the number of rows.
      prompt_length: the number of tokens of each row's prompt.
      new_tokens: the number of new tokens of each row.
      dtype: of parameters and cache; None for float32 on a CPU and bfloat16 elsewhere.
      mesh_axes: the sizes of the axes, such as ``"data:2,model:4"``. If empty, one local device, or all devices of the
        topology, on the mesh where each device moves the fewest bytes per step.
      topology: a TPU topology such as ``"v5e:2x4"``, which needs the libtpu wheel but no TPU; the number of GPUs of a
        machine, such as ``"h100:8"``, which is planned from shapes alone; None for this machine.
      prefill: whether to compile the prefill as well.
      prefill_block: see `kvjax.generate`.
      implementation: see `kvjax.generate`.
      storage: see `kvjax.generate`.
      selection: see `kvjax.generate`.
      host_weights: see `kvjax.load`.
      weights: see `kvjax.load`.
      rules: see `kvjax.load`.
      compiles: False to count from shapes alone, in a second or two. What only a compiler knows is then None, and
        `total` the bytes of parameters and cache.
      decode: False to leave out the decode program, where only the prefill's is asked for.

    Raises:
      KvjaxError: if `kvjax.generate` would raise one, the topology or the mesh is not valid, or libtpu is missing.
    """
    spec, codes = as_spec(policy, storage, selection), as_weight_codes(weights)
    for name, value in (("batch", batch), ("prompt_length", prompt_length), ("new_tokens", new_tokens)):
        check_count(name, value)
    check_batch(config, np.zeros((1, prompt_length), np.int32), None, new_tokens=new_tokens)
    target = find_target(topology)
    dtype, compiles = _dtype(dtype, target.platform), compiles and target.devices is not None
    prompts = np.full((batch,), prompt_length, np.int32)
    sizes = sizes_for(
        prompts, new_tokens - 1, width=prompt_length, block=prefill_block,
        limits=Limits(prompt_length, new_tokens, shortest=prompt_length), last_fed=False,
    )  # fmt: skip

    def lowered_on(mesh: Mesh | AbstractMesh | None, spec: CacheSpec) -> Lowered:
        """Lowers a spec with `mesh` as the current mesh."""
        rows = sharding.padded_rows(batch, mesh, rules)
        with sharding.on_mesh(mesh, rules):
            return lower(
                spec, config, dataclasses.replace(sizes, rows=rows), np.resize(prompts, rows),
                implementation=implementation, platform=target.platform, dtype=dtype,
            )  # fmt: skip

    axes: str | dict[str, int] = mesh_axes
    unsharded = lowered_on(None, spec)
    if topology and not mesh_axes:
        slots = average_slots(config, unsharded, prompt_length, new_tokens)
        axes = fewest_bytes(
            config, lambda mesh: lowered_on(mesh, spec).layout, dtype, batch, slots, target.size, host_weights, codes,
            rules,
        )  # fmt: skip
    mesh: Mesh | AbstractMesh | None = None
    if axes and target.devices:
        mesh = sharding.fit(sharding.make_mesh(axes, target.devices), config.num_kv_heads, rules)
    elif axes:
        mesh = sharding.abstract_mesh(axes, target.size, config.num_kv_heads, rules)
    count = mesh.size if mesh else 1
    lowered, full_lowered = lowered_on(mesh, spec), lowered_on(mesh, CacheSpec(policies.full()))
    layout = lowered.layout
    slots = average_slots(config, lowered, prompt_length, new_tokens)
    device = target.device or local_device(jax.devices()[:count])

    with using(rules or Rules()):
        rows = sharding.padded_rows(batch, mesh, rules)
        shapes = decode_shapes(config, layout, dtype, rows, mesh, host_weights, codes)
        full_shapes = decode_shapes(config, full_lowered.layout, dtype, rows, mesh, host_weights, codes)
        whole_shapes = decode_shapes(config, unsharded.layout, dtype, batch, None, host_weights, codes)
    step = roofline(config, shapes, slots, device)
    full = roofline(config, full_shapes, average_slots(config, full_lowered, prompt_length, new_tokens), device)
    whole = roofline(config, whole_shapes, slots, device)
    weight_bytes, cache = local_bytes(shapes.params, DEVICE), step.cache
    # Rows are divided over the devices of the other axes.
    copies = sharding.padded_rows(1, mesh, rules)
    # On a CPU, host memory is the device's.
    arguments = weight_bytes + cache + (step.host if target.platform == "cpu" else 0)

    start = time.perf_counter()
    with sharding.on_mesh(mesh, rules):
        compiled, problem = _compile_decode(config, layout, shapes) if compiles and decode else (None, "")
        memory, prefill_memory = _Memory.of(compiled), None
        if prefill and compiles:
            program, prefill_problem = _compile_prefill(config, lowered, shapes, mesh, prompt_length)
            prefill_memory, problem = _Memory.of(program), problem or prefill_problem
    seconds = time.perf_counter() - start

    needed = memory.total if memory else arguments
    peak = max(needed, prefill_memory.total if prefill_memory else 0)
    return Plan(
        target=target.name if topology else f"{target.name} ({device.kind})",
        device=device,
        mesh=dict(mesh.shape) if mesh else {"data": 1, "model": 1},
        mesh_chosen=bool(topology and not mesh_axes and count > 1),
        policy=spec.name,
        batch=int(batch),
        prompt_length=int(prompt_length),
        new_tokens=int(new_tokens),
        dtype=str(dtype),
        codes=codes.name if codes else "",
        parameters=parameter_count(config),
        slots=tuple(group.capacity for group in layout.groups),
        explain=layout.explain(),
        weights=weight_bytes,
        weights_even=-(-local_bytes(whole_shapes.params, DEVICE) * copies // count),
        cache=cache,
        cache_even=-(-whole.cache // count),
        rows=rows,
        temporaries=memory and memory.temporaries,
        host=step.host,
        other=memory and memory.total - memory.temporaries - arguments,
        total=needed,
        prefill_temporaries=prefill_memory and prefill_memory.temporaries,
        prefill_total=prefill_memory and prefill_memory.total,
        fits=False if problem else _below(peak, device.memory),
        problem=problem,
        flops_per_token=whole.flops / batch,
        bytes_per_token=(step.weights_moved + step.cache_moved) * count / batch,
        collectives=collectives(compiled.as_text() or "") if compiled else None,
        step=step,
        full=full,
        compile_seconds=seconds,
        compiled=compiled,
    )


class _Jitted(Protocol):
    """A jitted function."""

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...


def _dtype(dtype: DTypeLike | None, platform: str) -> jnp.dtype:
    """Returns the checked dtype, or the default of the platform."""
    if dtype is None:
        return jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    try:
        return jnp.dtype(dtype)
    except TypeError:
        raise ConfigError(f"dtype {dtype!r} is unknown; use float32, bfloat16 or float16.") from None


def _compile_decode(
    config: DecoderConfig, layout: CacheLayout, shapes: Shapes
) -> tuple[jax.stages.Compiled | None, str]:
    """Compiles the decode loop; see `_compile`."""
    stop = jax.ShapeDtypeStruct((len(config.eos_token_ids),), jnp.int32)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    options = {"config": config, "phase": layout.decode, "sampler": Greedy()}
    return _compile(decode_steps, shapes.params, shapes.carry, stop, steps, **options)


def _compile_prefill(
    config: DecoderConfig, lowered: Lowered, shapes: Shapes, mesh: Mesh | AbstractMesh | None, prompt_length: int
) -> tuple[jax.stages.Compiled | None, str]:
    """Compiles the prefill; see `_compile`."""
    row = shapes.carry.token
    place = mesh and NamedSharding(mesh, sharding.spec(("batch", None), (*row.shape, prompt_length), mesh))
    tokens = jax.ShapeDtypeStruct((*row.shape, prompt_length), jnp.int32, sharding=place)
    budgets = jax.tree.map(lambda _: row, lowered.budgets)
    return _compile(
        prefill_steps, shapes.params, tokens, row, row, budgets.prompt, budgets.decode, config=config,
        layout=lowered.layout, score=False,
    )  # fmt: skip


def _compile(function: _Jitted, *arguments: Any, **options: Any) -> tuple[jax.stages.Compiled | None, str]:
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


class _Memory(NamedTuple):
    """The memory of one device that a program needs.

    Attributes:
      total: bytes of arguments, results, scratch memory and the program itself.
      temporaries: bytes of scratch memory.
    """

    total: int
    temporaries: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled | None) -> "_Memory | None":
        """Returns the memory of a program, or None if there is no program."""
        if compiled is None:
            return None
        memory = compiled.memory_analysis()
        assert memory is not None, "this backend does not report the memory of its programs"
        total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        total += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
        return cls(int(total), int(memory.temp_size_in_bytes))


def _below(needed: float, memory: float | None) -> bool | None:
    """Returns whether `needed` bytes fit into a memory, or None if its size is unknown."""
    return None if memory is None else bool(needed <= memory)


def _in_time(moved: float, speed: float | None) -> str:
    """Formats bytes, and how long they take where the speed is known."""
    return f"{size(moved)}, {1e3 * moved / speed:.3g} ms" if speed else size(moved)


def _times(held: int, even: int) -> str:
    """Formats a share of the even split."""
    return f"{held / max(even, 1):.3f}"


def _yes(answer: bool | None, condition: str = "") -> str:
    """Formats an answer; `condition` qualifies a yes."""
    if answer is None:
        return "unknown"
    return "no" if not answer else f"yes, {condition}" if condition else "yes"


def _speed(step: Roofline) -> str:
    """Formats the maximum speed and its limit."""
    return "-" if step.tokens_per_second is None else f"{step.tokens_per_second:,.3g} tokens/s ({step.limit})"
