"""Prints plans of serving; see `experiments.simulate`."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tabulate import tabulate

from experiments import results
from experiments.training.activations import recommended_share
from kvjax.devices import Device
from kvjax.errors import ConfigError
from kvjax.models import shapes
from kvjax.planning import (
    attention_traffic,
    cache_phases,
    kernel_traffic,
    memory_layouts,
    memory_pool,
    offload_shares,
    preemption,
    storage_attention,
)  # fmt: skip
from kvjax.planning.served_model import Budget, ServedModel, evicting_layers, layer_budgets
from kvjax.planning.serving_costs import serving_costs
from kvjax.planning.topologies import find_target
from kvjax.policies import Evict, h2o, window
from kvjax.specs import parse
from kvjax.transport import plan_transfer
from kvjax.typing import JsonObject
from kvjax.units import parse_size, size

Rows = list[JsonObject]


def start(subject: str, values: flags.FlagValues) -> int:
    """Prints the plan of a subject.

    Returns:
      The exit status.
    """
    if values.output_file:
        results.make_file(values.output_file, "output_file")
    held = None if values.storage is None else parse.build("storage", values.storage)
    model = ServedModel.of(shapes.by_name(values.shape), storage=held)
    rows = SUBJECTS[subject](model, values)
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".4g"))
    print(f"\n{subject} of {values.shape}: planned from closed forms; nothing was measured.")
    if values.output_file:
        about = {"subject": subject, "shape": values.shape, "topology": values.topology, "rows": rows}
        results.write(Path(values.output_file), results.to_json(about))
    return 0


def _device(values: flags.FlagValues) -> Device:
    target = find_target(values.topology)
    if target.device is None:
        raise ConfigError(f"the numbers of {target.name} are not in the table; name a TPU or a GPU.")
    return target.device


def _caches(values: flags.FlagValues) -> list[tuple[str, Callable[[int], Budget]]]:
    """Returns the full cache, and the one that a command line asks for.

    Returns:
      The name of each, and its slots by the number of tokens of a prompt, of which some budgets are a share.
    """
    if values.policy is None:
        return [("full", lambda prompt: None), (f"{values.budget} slots", lambda prompt: values.budget)]
    policy, config = parse.build("policy", values.policy), shapes.by_name(values.shape)
    return [
        ("full", lambda prompt: None),
        (values.policy, functools.cache(lambda prompt: layer_budgets(policy, config, prompt))),
    ]


def _percentiles(values: flags.FlagValues) -> list[float]:
    known = {f"{each:g}": each for each in preemption.PERCENTILES}
    if unknown := [each for each in values.percentiles if each not in known]:
        raise ConfigError(f"--percentiles={unknown[0]} is not computed; computed: {', '.join(known)}.")
    return [known[each] for each in values.percentiles]


def _numbers(flag: str, given: Sequence[str], example: str) -> list[float]:
    try:
        found = [float(each) for each in given]
    except ValueError:
        found = [math.nan]
    if not all(math.isfinite(each) and each > 0 for each in found):
        raise ConfigError(f"--{flag}={','.join(given)} is not valid; give numbers above 0, such as {example}.")
    return found


def _serving(model: ServedModel, values: flags.FlagValues) -> Rows:
    rows = []
    for name, of_prompt in _caches(values):
        budget = of_prompt(values.tokens)
        made = serving_costs(
            model, _device(values), values.tokens, budget=budget, statistics_layers=evicting_layers(model.runs(budget)),
            host_memory=_bytes("host_memory", values.host_memory),
        )  # fmt: skip
        rows.append({
            "cache": name, "bytes of a row": size(made.cache),
            **({"on the host": size(made.host)} if made.host else {}), "rows": made.rows, "prompt, s": made.prefill,
            "token of one row, ms": 1e3 * made.decode_step_one_row, "of all rows, ms": 1e3 * made.decode_step_all_rows,
            "exchange with the host, ms": 1e3 * made.switch,
        })  # fmt: skip
    return rows


def _layouts(model: ServedModel, values: flags.FlagValues) -> Rows:
    device = _device(values)
    assert device.memory is not None
    # The number of slots is that of the longest prompt, whatever the text.
    budget = _caches(values)[1][1](values.longest)
    options = {"longest": values.longest, "budget": budget, "granule": values.granule}
    row = memory_layouts.row_bytes(model, values.tokens, **options)
    turns = preemption.random_trace(
        values.users, values.turns, rate=values.rate, prompt=values.prompt, output=values.output, seed=values.seed
    )
    # A step for each token: requests arrive all at once.
    trace = [memory_layouts.TracedRow(0, *_within(each.prompt, each.output, values.longest)) for each in turns]
    memory = int(device.memory - model.weight_bytes)
    if memory <= 0:
        raise ConfigError(f"the weights, {size(model.weight_bytes)}, do not fit in {device.kind}.")
    used = memory_layouts.simulate_layouts(model, trace, memory=memory, **options)
    return [
        {
            "layout": name, f"bytes of {values.tokens:,} tokens": size(getattr(row, name)), "peak": size(use.peak),
            "unused, %": 100 * use.waste, "most rows": use.most_rows, "steps": use.steps,
        }
        for name, use in used.items()
    ]  # fmt: skip


def _within(prompt: int, output: int, longest: int) -> tuple[int, int]:
    prompt = min(prompt, longest - 1)
    return prompt, min(output, longest - prompt)


def _preemption(model: ServedModel, values: flags.FlagValues) -> Rows:
    trace = preemption.random_trace(
        values.users, values.turns, rate=values.rate, prompt=values.prompt, output=values.output, seed=values.seed
    )
    rows, shown = [], _percentiles(values)
    for name, budget in _caches(values):
        name = "full, pages" if name == "full" else name
        for keep_host, overlap in ((False, False), (True, False), (True, True)):
            made = preemption.simulate_preemption(
                model, _device(values), trace, budget=budget, frequency=values.frequency,
                copy_seconds=values.copy_seconds, seed=values.seed, keep_host=keep_host, overlap=overlap,
            )  # fmt: skip
            rows.append({
                "cache": name, "copies stay on the host": keep_host, "moves overlap": overlap,
                **{f"TTFT P{each:g}, s": made.ttft[each] for each in shown},
                **{f"TBT P{each:g}, ms": 1e3 * made.tbt.get(each, math.nan) for each in shown},
                "tokens/s": made.tokens_per_second, "Jain": made.jain, "moved": size(made.moved), "swaps": made.swaps,
            })  # fmt: skip
    return rows


def _pool(model: ServedModel, values: flags.FlagValues) -> Rows:
    trace = memory_pool.random_requests(
        values.requests, rate=values.rate, prompt=values.prompt, output=values.output, long=values.long,
        long_share=values.long_share, seed=values.seed,
    )  # fmt: skip
    rows, shown = [], _percentiles(values)
    for name, budget in _caches(values):
        for pooled in (False, True):
            made = memory_pool.simulate_pool(
                model, _device(values), trace, instances=values.instances, pooled=pooled, budget=budget
            )
            rows.append({
                "cache": name, "memory": "pool" if pooled else "own", "finished": made.finished,
                "refused": made.refused, "most rows": made.most_rows,
                **{f"TTFT P{each:g}, s": made.ttft.get(each, math.nan) for each in shown},
                **{f"request P{each:g}, s": made.request_seconds.get(each, math.nan) for each in shown},
                "tokens/s": made.tokens_per_second,
                "held by each, %": ", ".join(f"{100 * each:.2g}" for each in made.use),
                "for others": size(max(made.for_others)),
                "slots moved": size(made.slots_moved), "parts moved": size(made.parts_moved),
            })  # fmt: skip
    return rows


def _phases(model: ServedModel, values: flags.FlagValues) -> Rows:
    device = _device(values)
    assert device.memory and device.bandwidth and device.flops
    if device.link is None:
        raise ConfigError(f"the link between {device.kind} and its host is unknown; name another device.")
    room = device.memory - model.weight_bytes
    if room <= 0:
        raise ConfigError(f"the weights, {size(model.weight_bytes)}, do not fit in {device.kind}.")
    phases = cache_phases.CachePhases(
        model=model, device_bytes=room, host_bytes=_bytes("host_memory", values.host_memory),
        bandwidth=device.bandwidth, link=device.link, compute=device.flops, rows=values.rows,
        read_share=values.read_share, overlap=values.overlap,
    )  # fmt: skip
    found = phases.boundaries()
    shown = {each for each in found if each} | {each - 1 for each in found if each and each > 1}
    shown |= {values.tokens << doubling for doubling in range(5)}
    names = {cache_phases.DEVICE: "device", cache_phases.HOST: "host", cache_phases.RECOMPUTED: "recomputed"}
    return [
        {
            "tokens": tokens, "phase": names[own.phase], "on the device": own.device, "on the host": own.host,
            "recomputed": own.recomputed, "step, ms": 1e3 * own.seconds,
        }
        for tokens, own in ((tokens, phases.split(tokens)) for tokens in sorted(shown))
    ]  # fmt: skip


def _bytes(flag: str, text: str | None) -> float:
    if text is None:
        return math.inf
    try:
        return parse_size(text)
    except ValueError:
        raise ConfigError(f"--{flag}={text!r} is not valid; give bytes, such as 256GB.") from None


def _storage(model: ServedModel, values: flags.FlagValues) -> Rows:
    device = _device(values)
    if device.link is None:
        raise ConfigError(f"the link of {device.kind} is unknown; name another device.")
    made = storage_attention.storage_bytes(
        model, values.tokens, channels=values.channels, slots=values.budget, page=values.page
    )
    times = storage_attention.storage_seconds(
        model, made, flash_rate=values.flash_rate, link_rate=device.link, rows=values.rows, page=values.page
    )
    return [
        *({"what": name.replace("_", " "), "planned": each, "unit": "pages" if "pages" in name else "bytes",
           "of": "layer and row"} for name, each in made._asdict().items()),
        *({"what": f"attention, {name.replace('_', ' ')}", "planned": 1e3 * each, "unit": "ms", "of": "step"}
          for name, each in times._asdict().items()),
    ]  # fmt: skip


def _activations(model: ServedModel, values: flags.FlagValues) -> Rows:
    device, config, rows = _device(values), shapes.by_name(values.shape), []
    for tokens in (values.tokens << doubling for doubling in range(5)):
        share = recommended_share(
            config, device, rows=values.rows, tokens=tokens, width=model.width,
            host_bytes=_bytes("host_memory", values.host_memory),
        )  # fmt: skip
        if share is None:
            raise ConfigError(f"the FLOP/s of {device.kind} or its link to the host are unknown; name another device.")
        rows.append({"tokens": tokens, "rows": values.rows, "offloaded, %": 100 * share})
    return rows


def _traffic(model: ServedModel, values: flags.FlagValues) -> Rows:
    made = attention_traffic.attention_traffic(
        values.tokens, model.dim, tile=values.tile, memory=values.fast_memory, slots=values.budget
    )
    shared = attention_traffic.part_bytes(model.heads, model.kv_heads, model.dim, model.width)
    rows: Rows = [
        {"what": name.replace("_", " "), "moved": each, "unit": "numbers of a query head"}
        for name, each in made._asdict().items()
    ]
    rows += [
        {"what": f"slots on several devices, {name}", "moved": each, "unit": "bytes of a row, layer and other device"}
        for name, each in shared._asdict().items()
    ]
    policies = {"window": window(values.budget), "h2o": h2o(values.budget)}
    passes = {
        name: attention_traffic.passes_over_keys(each) for name, each in policies.items() if isinstance(each, Evict)
    }
    rows += [
        {"what": f"passes over the keys of a prompt, {name}", "moved": each, "unit": "passes"}
        for name, each in (passes | {"softmax as it is written": 3}).items()
    ]
    # The blocks of a KV head serve all of its query heads.
    group = model.heads // model.kv_heads
    prompt = kernel_traffic.prefill_kernels(values.tokens, model.dim, group=group, statistics=True)
    counted = [*zip(("prefill_causal", "prefill_statistics_causal"), prompt, strict=True)]
    counted += [("decode", each) for each in kernel_traffic.decode_kernels(values.budget, model.dim, group=group)]
    for name, each in counted:
        own = attention_traffic.attention_traffic(
            values.tokens, model.dim, tile=each.query_tile, memory=values.fast_memory, slots=values.budget
        )
        tile = "" if name == "decode" else f", tiles of {each.query_tile} queries"
        rows.append({
            "what": f"{name.replace('_', ' ')}, blocks of {each.kernel} on a TPU{tile}",
            "moved": each.features / group, "unit": "numbers of a query head", "formula": getattr(own, name),
        })  # fmt: skip
    return rows


def _rates(values: flags.FlagValues) -> tuple[float, float]:
    """Returns the FLOP/s of the device, and the bytes/s of its link to the host."""
    device = _device(values)
    if device.link is None or device.flops is None:
        raise ConfigError(f"the FLOP/s of {device.kind} or its link to the host are unknown; name another device.")
    return device.flops, device.link


def _blend(model: ServedModel, values: flags.FlagValues) -> Rows:
    flops, link = _rates(values)
    model.check_on_device("blend")
    prefill = model.prefill_flops(values.tokens) / flops / model.layers
    places = {"host memory": link} | {
        f"{each:.3g} bytes/s": each for each in _numbers("load_rates", values.load_rates, "5e9,1e9")
    }
    rows: Rows = []
    for name, rate in places.items():
        load = model.token_bytes / model.layers * values.tokens / rate
        made = offload_shares.plan_blend(model.layers, load=load, prefill=prefill)
        rows.append({
            "caches of chunks from": name, "load of a layer, ms": 1e3 * load, "compute of a layer, ms": 1e3 * prefill,
            "computed again, %": 100 * made.ratio, "TTFT, s": made.ttft,
            "of a whole prefill, s": model.layers * prefill,
        })  # fmt: skip
    return rows


def _transfer(model: ServedModel, values: flags.FlagValues) -> Rows:
    flops, link = _rates(values)
    pairs = [each.split(":") for each in values.trace] or [["0", str(link)]]
    try:
        trace = [(float(start), float(rate)) for start, rate in pairs]
    except ValueError:
        raise ConfigError(
            f"--trace={','.join(values.trace)} is not valid; give SECONDS:BYTES/S, such as 0:1e9."
        ) from None
    counts = [min(values.chunk, values.tokens - start) for start in range(0, values.tokens, values.chunk)]
    numbers = 2 * model.layers * model.kv_heads * model.dim
    bits = sorted(_numbers("bits", values.bits, "2.5,3.6,3.9"))
    if not bits:
        raise ConfigError("--bits needs a number for each level, such as 2.5,3.6,3.9.")
    sizes = [[int(count * numbers * each / 8) for each in bits] for count in counts]
    recompute = [model.prefill_flops(count) / flops for count in counts]
    made = plan_transfer(sizes, recompute, slo=values.slo, trace=trace)
    rows: Rows = [
        {
            "chunk": number + 1,
            "tokens": count,
            "sent as": level if isinstance(level, str) else f"level {level}",
            "bytes": "0" if isinstance(level, str) else size(own[level - 1]),
        }
        for number, (count, level, own) in enumerate(zip(counts, made.levels, sizes, strict=True))
    ]
    return [*rows, {"chunk": "all", "tokens": values.tokens, "s": made.ttft, "in time": made.in_time}]


SUBJECTS: Mapping[str, Callable[[ServedModel, Any], Rows]] = {
    "serving": _serving, "layouts": _layouts, "preemption": _preemption, "pool": _pool, "phases": _phases,
    "storage": _storage, "activations": _activations, "traffic": _traffic, "blend": _blend, "transfer": _transfer,
}  # fmt: skip
