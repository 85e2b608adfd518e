"""Measures contexts as bytes; see `experiments.context_bytes`."""

import dataclasses
import importlib.util
import math
import shlex
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from absl import flags
from tabulate import tabulate

import kvjax
from experiments import results
from experiments.config import DataConfig
from experiments.leaderboards.page import interval
from experiments.runs import data, identity, machine
from kvjax import contexts, policies, storage, transport
from kvjax.contexts.choices import score_prefilled
from kvjax.errors import ConfigError, KvjaxError
from kvjax.generation.context import Context
from kvjax.models.model import Model
from kvjax.transport import vectors

PROGRAM = "python -m experiments.context_bytes"
SILENT = ("--output", "--text")


@dataclasses.dataclass
class Row:
    """The results of a codec or a storage.

    Attributes:
      name: of it.
      bits: of a number, on average.
      bytes: of keys and values of all rows.
      ideal: bits of a number by the tables of the codes; None where there are no codes.
      nats: of each row, the mean loss of its scored tokens.
    """

    name: str
    bits: float
    bytes: int
    ideal: float | None
    nats: list[float]


def start(values: flags.FlagValues, argv: Sequence[str]) -> int:
    """Measures what a command line asks for.

    Returns:
      The exit status.
    """
    if values.output:
        results.make_file(values.output)
    try:
        ratios = [float(each) for each in values.ratios]
    except ValueError as error:
        raise ConfigError(f"--ratios must be numbers: {error}.") from None
    model = kvjax.load(values.model, dtype="float32")
    if values.prompt + values.scored > model.config.max_positions:
        raise ConfigError(f"a row may have {model.config.max_positions} tokens; lower --prompt or --scored.")
    settings = DataConfig(
        text=values.text, num_sequences=values.rows + values.calibration, prompt_length=values.prompt,
        new_tokens=values.scored,
    )  # fmt: skip
    text, _, about = data.load(settings, model, seed=0)
    scored, others = text[: values.rows], text[values.rows :]
    prompts, following = scored[:, : values.prompt], [[own[values.prompt :].tolist()] for own in scored]
    room = values.prompt + values.scored
    whole = contexts.prefill(model, prompts, policies.full(), room=room)
    calibration = [contexts.prefill(model, others[:, : values.prompt], policies.full(), room=room)]
    rows: list[Row] = []

    def add(name: str, context: Context, size: int, ideal: float | None = None) -> None:
        nats = [-float(np.mean(own[0].logprobs)) for own in score_prefilled(model, context, following)]
        rows.append(Row(name, 8 * size / numbers, size, None if ideal is None else ideal / numbers, nats))
        print(f"{name}: {rows[-1].bits:.2f} bits", file=sys.stderr, flush=True)

    numbers = transport.report(transport.encode(whole)).numbers
    add("exact, float32", whole, 4 * numbers)
    for name, size in _compressed(whole).items():
        rows.append(Row(name, 8 * size / numbers, size, None, rows[0].nats))
    for level in (1, 2, 3):
        for delta in (True, False):
            tables = transport.make_tables(calibration, level=level, delta=delta)
            _add_coded(add, model, whole, transport.CacheGen(level, delta, tables=tables),
                       f"CacheGen {level}{'' if delta else ', no differences'}")  # fmt: skip
    for ratio in ratios:
        made = transport.fit_transform(calibration, ratio=ratio)
        for recent in (128, 0):
            _add_coded(add, model, whole, transport.KVTC(made, recent=recent),
                       f"KVTC {ratio:g}{'' if recent else ', no recent tokens'}")  # fmt: skip
    for name in values.storages:
        try:
            held = storage.by_name(name)
            context = contexts.prefill(model, prompts, policies.full(), room=room, storage=held)
        except KvjaxError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        each = held.bytes_per_slot(model.config.head_dim, model.dtype)
        add(f"storage {name}", context, round(each * numbers / (2 * model.config.head_dim)))
    _report(rows)
    if values.output:
        kept = {
            "model": values.model, "weights": identity.of_weights(values.model), "text": about, "rows": values.rows,
            "prompt": values.prompt, "scored": values.scored, "numbers": numbers,
            "command": shlex.join([*PROGRAM.split(), *(each for each in argv[1:] if not each.startswith(SILENT))]),
            "environment": machine.environment(), "results": [dataclasses.asdict(own) for own in rows],
        }  # fmt: skip
        results.write(Path(values.output), results.to_json(kept))
    return 0


def _add_coded(
    add: Callable[[str, Context, int, float | None], None],
    model: Model,
    whole: Context,
    codec: transport.CacheGen | transport.KVTC,
    name: str,
) -> None:
    coded = transport.encode(whole, codec=codec)
    report = transport.report(coded)
    found = transport.decode(coded, model, codec=codec)
    add(name, found, report.ranges + report.tables + report.codes, report.ideal_bits)


def _compressed(context: Context) -> dict[str, int]:
    """Returns the bytes of keys and values in 16 bits, as they are and compressed without loss of these."""
    read = vectors.read(context)
    raw = b"".join(
        own.sides[side].astype(np.float16).tobytes()
        for layer in read.layers for group in layer for row in group.rows for own in row for side in range(2)
    )  # fmt: skip
    found = {"float16": len(raw), "float16, zlib": len(zlib.compress(raw, 9))}
    if importlib.util.find_spec("zstandard"):
        import zstandard

        found["float16, zstd"] = len(zstandard.ZstdCompressor(level=19).compress(raw))
    return found


def _report(rows: Sequence[Row]) -> None:
    full = np.array(rows[0].nats)
    table = []
    for each in rows:
        worse = 100 * (math.exp(float(np.mean(np.array(each.nats) - full))) - 1)
        low, high = (100 * math.expm1(end) for end in interval(np.array(each.nats) - full, each.name))
        table.append({
            "codec": each.name, "bits": f"{each.bits:.2f}", "ideal": "" if each.ideal is None else f"{each.ideal:.2f}",
            "16 bits over it": f"{16 / each.bits:.1f}", "perplexity": f"{math.exp(float(np.mean(each.nats))):.3f}",
            "above exact, %": f"{worse:+.2f} ({low:+.2f} to {high:+.2f})",
        })  # fmt: skip
    print(tabulate(table, headers="keys", tablefmt="github", disable_numparse=True))
