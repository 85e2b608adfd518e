"""Plans a run: shapes, the programs that they compile to, and the roofline; see `plan`."""

import dataclasses
import time
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from kvjax import policies
from kvjax.arguments import plain_signature
from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import Lowered, lower
from kvjax.cache.spec import CacheSpec
from kvjax.devices import local_device
from kvjax.errors import ConfigError
from kvjax.generation import layer_calls
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.inputs import check_batch, check_count
from kvjax.models import layer_loop
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import parameter_count
from kvjax.models.quantize import WeightCodes, as_weight_codes
from kvjax.parallel import sharding
from kvjax.parallel.host_memory import DEVICE
from kvjax.parallel.rules import Rules, using
from kvjax.planning.hlo_collectives import collectives
from kvjax.planning.plan_report import Plan, fits_in
from kvjax.planning.programs import Memory, compile_decode, compile_prefill, with_loops
from kvjax.planning.prompt_attention import prompt_attention_flops
from kvjax.planning.roofline import average_slots, decode_shapes, fewest_bytes, local_bytes, roofline
from kvjax.planning.speculation import plan_speculation
from kvjax.planning.topologies import find_target
from kvjax.policies.base import Policy

#: Of drafts for a full cache, whose length of break-even a plan says: slots that they read, chance to be accepted.
DRAFT_SLOTS, DRAFT_CHANCE = 512, 0.8


@plain_signature
@cache_keywords()
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
    host_weights: float = 0.0,
    weights: WeightCodes | str | None = None,
    rules: Rules | None = None,
    compiles: bool = True,
    decode: bool = True,
    by_layer: bool | None = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
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
      host_weights: see `kvjax.load`.
      weights: see `kvjax.load`.
      rules: see `kvjax.load`.
      compiles: False to count from shapes alone, in a second or two. What only a compiler knows is then None, and
        `total` the bytes of parameters and cache.
      decode: False to leave out the decode program, where only the prefill's is asked for.
      by_layer: whether prompts in one shot call a program of a layer for each of them, elsewhere than on CPUs; None =
        as `kvjax.generate` does, see `kvjax.generation.layer_calls`.
      options: see `kvjax.CacheOptions`. The limits are those of the run, and calibrations are not read.
      cache: fields of the options.

    Raises:
      KvjaxError: if `kvjax.generate` would raise one, the topology or the mesh is not valid, or libtpu is missing.
    """
    options = options_of(options, cache, "plan")
    spec, codes = options.spec(policy), as_weight_codes(weights)
    for name, value in (("batch", batch), ("prompt_length", prompt_length), ("new_tokens", new_tokens)):
        check_count(name, value)
    check_batch(config, np.zeros((1, prompt_length), np.int32), None, new_tokens=new_tokens)
    target = find_target(topology)
    dtype, compiles = _dtype(dtype, target.platform), compiles and target.devices is not None
    prompts = np.full((batch,), prompt_length, np.int32)
    sizes = sizes_for(
        prompts, new_tokens - 1, width=prompt_length, block=options.prefill_block,
        limits=Limits(prompt_length, new_tokens, shortest=prompt_length), last_fed=False,
    )  # fmt: skip

    def lowered_on(mesh: Mesh | AbstractMesh | None, spec: CacheSpec) -> Lowered:
        """Lowers a spec with `mesh` as the current mesh."""
        rows = sharding.padded_rows(batch, mesh, rules)
        with sharding.on_mesh(mesh, rules):
            return lower(
                spec, config, dataclasses.replace(sizes, rows=rows), np.resize(prompts, rows),
                implementation=options.implementation, platform=target.platform, dtype=dtype,
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
    programs_shapes = shapes
    if target.platform != "cpu":
        # On CPUs loops over layers depend on the machine and the weights.
        if by_layer is None and layer_loop.wants_stacks(config, mesh):
            with sharding.on_mesh(mesh, rules):
                layout, programs_shapes = with_loops(config, layout, shapes)
        calls = layer_calls.calls_layers(config, programs_shapes.params, layout) if by_layer is None else by_layer
        layout = dataclasses.replace(layout, calls_layers=calls and layout.block is None)
    lowered = lowered._replace(layout=layout)
    step = roofline(config, shapes, slots, device)
    full = roofline(config, full_shapes, average_slots(config, full_lowered, prompt_length, new_tokens), device)
    whole = roofline(config, whole_shapes, slots, device)
    weight_bytes, cache_bytes = local_bytes(shapes.params, DEVICE), step.cache
    # Rows are divided over the devices of the other axes.
    copies = sharding.padded_rows(1, mesh, rules)
    # On a CPU, host memory is the device's.
    arguments = weight_bytes + cache_bytes + (step.host if target.platform == "cpu" else 0)

    start = time.perf_counter()
    with sharding.on_mesh(mesh, rules):
        compiled, problem = None, ""
        if compiles and decode:
            compiled, problem = compile_decode(config, layout, programs_shapes, mesh)
        memory, prefill_memory = Memory.of(compiled), None
        if prefill and compiles:
            prefill_memory, prefill_problem = compile_prefill(config, lowered, programs_shapes, mesh, prompt_length)
            problem = problem or prefill_problem
    seconds = time.perf_counter() - start

    drafts = None
    if spec.policy == policies.full() and spec.storage.exact and codes is None and count == 1 and device.bandwidth:
        on_host = spec.storage.on_host and device.link is not None
        drafts = plan_speculation(
            config, budget=DRAFT_SLOTS, device=device, alpha=DRAFT_CHANCE, length=prompt_length + new_tokens,
            batch=batch, on_host=on_host, dtype_bytes=max(dtype.itemsize, 2),
        )  # fmt: skip
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
        by_layer=layout.calls_layers,
        weights=weight_bytes,
        weights_even=-(-local_bytes(whole_shapes.params, DEVICE) * copies // count),
        cache=cache_bytes,
        cache_even=-(-whole.cache // count),
        rows=rows,
        temporaries=memory and memory.temporaries,
        host=step.host,
        other=memory and memory.total - memory.temporaries - arguments,
        total=needed,
        prefill_temporaries=prefill_memory and prefill_memory.temporaries,
        prefill_total=prefill_memory and prefill_memory.total,
        fits=False if problem else fits_in(peak, device.memory),
        problem=problem,
        prompt_flops=prompt_attention_flops(config, layout, rows, sizes.prompt),
        full_prompt_flops=prompt_attention_flops(config, full_lowered.layout, rows, sizes.prompt),
        flops_per_token=whole.flops / batch,
        bytes_per_token=(step.weights_moved + step.cache_moved) * count / batch,
        collectives=collectives(compiled.as_text() or "") if compiled else None,
        step=step,
        full=full,
        compile_seconds=seconds,
        compiled=compiled,
        drafts=drafts,
    )


def _dtype(dtype: DTypeLike | None, platform: str) -> jnp.dtype:
    """Returns the checked dtype, or the default of the platform."""
    if dtype is None:
        return jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    try:
        return jnp.dtype(dtype)
    except TypeError:
        raise ConfigError(f"dtype {dtype!r} is unknown; use float32, bfloat16 or float16.") from None
