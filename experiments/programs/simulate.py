"""Prints plans of serving; see `experiments.simulate`."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import flags
from tabulate import tabulate

from experiments import results
from kvjax.devices import Device
from kvjax.errors import ConfigError
from kvjax.models import shapes
from kvjax.planning import attention_traffic, memory_layouts, preemption
from kvjax.planning.serving_costs import ServedModel, serving_costs
from kvjax.planning.topologies import find_target
from kvjax.typing import JsonObject
from kvjax.units import size

Rows = list[JsonObject]


def start(subject: str, values: flags.FlagValues) -> int:
    """Prints the plan of a subject.

    Returns:
      The exit status.
    """
    if values.output_file:
        results.make_file(values.output_file, "output_file")
    model = ServedModel.of(shapes.by_name(values.shape))
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


def _serving(model: ServedModel, values: flags.FlagValues) -> Rows:
    rows = []
    for name, budget in (("full", None), (f"{values.budget} slots", values.budget)):
        made = serving_costs(model, _device(values), values.tokens, budget=budget, statistics=budget is not None)
        rows.append({
            "cache": name, "bytes of a row": size(made.cache), "rows": made.rows, "prompt, s": made.prefill,
            "token of one row, ms": 1e3 * made.decode_step_one_row, "of all rows, ms": 1e3 * made.decode_step_all_rows,
            "exchange with the host, ms": 1e3 * made.switch,
        })  # fmt: skip
    return rows


def _layouts(model: ServedModel, values: flags.FlagValues) -> Rows:
    device = _device(values)
    assert device.memory is not None
    options = {"longest": values.longest, "budget": values.budget, "granule": values.granule}
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
    rows = []
    for name, budget in (("full, pages", None), (f"{values.budget} slots", values.budget)):
        for keep_host, overlap in ((False, False), (True, False), (True, True)):
            made = preemption.simulate_preemption(
                model, _device(values), trace, budget=budget, frequency=values.frequency,
                copy_seconds=values.copy_seconds, seed=values.seed, keep_host=keep_host, overlap=overlap,
            )  # fmt: skip
            rows.append({
                "cache": name, "copies stay on the host": keep_host, "moves overlap": overlap,
                **{f"TTFT P{each}, s": made.ttft[each] for each in (50, 99)},
                **{f"TBT P{each}, ms": 1e3 * made.tbt.get(each, math.nan) for each in (50, 99)},
                "tokens/s": made.tokens_per_second, "Jain": made.jain, "moved": size(made.moved), "swaps": made.swaps,
            })  # fmt: skip
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
    return rows + [
        {"what": f"slots on several devices, {name}", "moved": each, "unit": "bytes of a row, layer and other device"}
        for name, each in shared._asdict().items()
    ]


SUBJECTS: Mapping[str, Callable[[ServedModel, Any], Rows]] = {
    "serving": _serving, "layouts": _layouts, "preemption": _preemption, "traffic": _traffic,
}  # fmt: skip
