"""Measures contexts as bytes; see `experiments.context_bytes`."""

import dataclasses
import importlib.util
import math
import shlex
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags
from tabulate import tabulate

import kvjax
from experiments import results
from experiments.config import DataConfig
from experiments.context_bytes import ALL
from experiments.programs.storage_tables import EXAMPLES
from experiments.reports.bootstrap import interval
from experiments.runs import data, identity, machine
from kvjax import contexts, policies, storage, transport
from kvjax.cache.planning.limits import Limits
from kvjax.cache.spec import CacheSpec
from kvjax.contexts.choices import score_prefilled
from kvjax.contexts.description import state_shapes
from kvjax.errors import ConfigError, KvjaxError
from kvjax.generation.context import Context
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import prepare
from kvjax.models.model import Model
from kvjax.specs import parse
from kvjax.storage import STORAGES
from kvjax.storage.calibration import required
from kvjax.transport import vectors

PROGRAM = "python -m experiments.context_bytes"
SILENT = ("--output", "--text")
#: Kinds of rows: the numbers as they are, or compressed without loss of these; a codec of transport; a storage.
NUMBERS, CODEC, STORAGE = "numbers", "codec", "storage"
Parts = Mapping[str, int]


@dataclasses.dataclass
class Row:
    """The results of a codec or a storage.

    Attributes:
      name: of it.
      kind: `NUMBERS`, `CODEC` or `STORAGE`.
      bits: of a number, on average.
      bytes: of keys and values of all rows.
      parts: these bytes by part: of a message, see `kvjax.transport.Report`; of a storage, see
        `kvjax.storage.breakdown`. Without parts, they are the numbers themselves.
      ideal: bits of a number by the tables of the codes; None where there are no codes.
      nats: of each row, the mean loss of its scored tokens.
      agreement: of each row, the share of greedy tokens that equal those after the context as it is.
    """

    name: str
    kind: str
    bits: float
    bytes: int
    parts: Parts
    ideal: float | None
    nats: list[float]
    agreement: list[float]


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores contexts of the same tokens.

    Attributes:
      model: of the contexts.
      following: the tokens after each row that are scored.
      generated: greedy tokens after each row.
    """

    model: Model
    following: list[list[list[int]]]
    generated: int

    def nats(self, context: Context) -> list[float]:
        """Returns the mean loss of each row."""
        return [-float(np.mean(own[0].logprobs)) for own in score_prefilled(self.model, context, self.following)]

    def greedy(self, context: Context) -> np.ndarray:
        """Returns greedy tokens, [B, n]."""
        return contexts.decode(self.model, context, max_new_tokens=self.generated).tokens


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
    storages = _storages(values.storages)
    model = kvjax.load(values.model, dtype="float32")
    new_tokens = max(values.scored, values.generated)
    if values.prompt + new_tokens > model.config.max_positions:
        raise ConfigError(
            f"a row may have {model.config.max_positions} tokens; lower --prompt, --scored or --generated."
        )
    settings = DataConfig(
        text=values.text, num_sequences=values.rows + values.calibration, prompt_length=values.prompt,
        new_tokens=values.scored,
    )  # fmt: skip
    text, _, about = data.load(settings, model, seed=0)
    scored, others = text[: values.rows], text[values.rows :, : values.prompt]
    prompts = scored[:, : values.prompt]
    room = values.prompt + new_tokens
    whole = contexts.prefill(model, prompts, policies.full(), room=room)
    calibration = [contexts.prefill(model, others, policies.full(), room=room)]
    scorer = Scorer(model, [[own[values.prompt :].tolist()] for own in scored], values.generated)
    tokens = scorer.greedy(whole)
    numbers = transport.report(transport.encode(whole)).numbers
    rows: list[Row] = []

    def add(
        name: str, kind: str, context: Context, parts: Parts, ideal: float | None = None, by: Scorer = scorer
    ) -> None:
        agreement = np.mean(by.greedy(context) == tokens, axis=1)
        size = sum(parts.values())
        rows.append(Row(
            name, kind, 8 * size / numbers, size, parts, None if ideal is None else ideal / numbers, by.nats(context),
            [float(each) for each in agreement],
        ))  # fmt: skip
        print(f"{name}: {rows[-1].bits:.2f} bits", file=sys.stderr, flush=True)

    add("exact, float32", NUMBERS, whole, {"numbers": 4 * numbers})
    for name, size in _compressed(whole).items():
        exact = {"numbers": size}
        rows.append(Row(name, NUMBERS, 8 * size / numbers, size, exact, None, rows[0].nats, rows[0].agreement))
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
    refused = {}
    for name, held in storages.items():
        try:
            ready = kvjax.calibrated(model, held, kvjax.calibrate(model, others, held) if required(held) else None)
            context = contexts.prefill(ready, prompts, policies.full(), room=room, storage=held)
            parts = _held(ready, CacheSpec(policies.full(), held), values.rows, values.prompt)
            add(f"{STORAGE} {name}", STORAGE, context, parts, by=dataclasses.replace(scorer, model=ready))
        except KvjaxError as error:
            refused[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)
    _report(rows)
    if values.output:
        kept = {
            "model": values.model, "weights": identity.of_weights(values.model), "text": about, "rows": values.rows,
            "prompt": values.prompt, "scored": values.scored, "generated": values.generated, "numbers": numbers,
            "command": shlex.join([*PROGRAM.split(), *(each for each in argv[1:] if not each.startswith(SILENT))]),
            "environment": machine.environment(), "results": [dataclasses.asdict(own) for own in rows],
            "refused": refused, "nearest": dict(_nearest(rows)),
        }  # fmt: skip
        results.write(Path(values.output), results.to_json(kept))
    return 0


def _storages(text: str) -> dict[str, storage.Storage]:
    """Returns the storages of a flag by name.

    Raises:
      ConfigError: a name that is not one of a storage, or arguments that it does not take.
    """
    if text == ALL:
        names = [each for name in STORAGES if name != "dense" for each in EXAMPLES.get(name, (name,))]
    else:
        names = [each.strip() for each in text.split(";") if each.strip()]
    try:
        return {name: parse.build("storage", name) for name in names}
    except KvjaxError as error:
        raise ConfigError(
            f"--storages: {str(error).rstrip('.')}. Storages are separated by semicolons, such as int8;kivi(2)."
        ) from None


def _held(model: Model, spec: CacheSpec, rows: int, tokens: int) -> Parts:
    """Returns the bytes by part of the arrays of a cache for `tokens` tokens, whether they are full or not.

    A storage that encodes blocks has room for its exact tokens too: for 512 tokens, `kivi` has room for 640 keys (512
    in codes and 128 exact ones) and 512 values (384 and 128), 576 on average.
    """
    lengths = np.full(rows, tokens - 1, np.int32)
    options = CacheOptions(limits=Limits(tokens - 1, 1, shortest=tokens - 1))
    prepared = prepare(model, spec, lengths, lengths + 1, width=tokens - 1, options=options)
    found = storage.breakdown(state_shapes(model, prepared.layout, rows))
    return {part: size for part, size in found.items() if part not in ("stores", "rest") and size}


def _add_coded(
    add: Callable[[str, str, Context, Parts, float | None], None],
    model: Model,
    whole: Context,
    codec: transport.CacheGen | transport.KVTC,
    name: str,
) -> None:
    coded = transport.encode(whole, codec=codec)
    report = transport.report(coded)
    found = transport.decode(coded, model, codec=codec)
    # `Report.ranges` of KVTC are the vectors that are exact.
    first = "exact" if isinstance(codec, transport.KVTC) else "ranges"
    parts = {first: report.ranges, "tables": report.tables, "codes": report.codes}
    add(name, CODEC, found, {part: size for part, size in parts.items() if size}, report.ideal_bits)


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


def _nearest(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns each storage with the codec whose bits are nearest, as a ratio; equal: the first."""
    coded = [each for each in rows if each.kind == CODEC]
    return [
        (each.name, min(coded, key=lambda own: abs(math.log(own.bits / each.bits))).name)
        for each in rows
        if each.kind == STORAGE
    ]


def _report(rows: Sequence[Row]) -> None:
    full = np.array(rows[0].nats)

    def worse(row: Row) -> str:
        above = np.array(row.nats) - full
        low, high = (100 * math.expm1(end) for end in interval(above, row.name))
        return f"{100 * math.expm1(float(np.mean(above))):+.2f} ({low:+.2f} to {high:+.2f})"

    def agreement(row: Row) -> str:
        return f"{100 * float(np.mean(row.agreement)):.0f} %"

    table = [
        {
            "codec": each.name, "bits": f"{each.bits:.2f}",
            "by part": ", ".join(f"{part} {size * each.bits / each.bytes:.2f}"
                                 for part, size in each.parts.items()),
            "ideal of codes": "" if each.ideal is None else f"{each.ideal:.2f}",
            "16 bits over it": f"{16 / each.bits:.1f}",
            "perplexity": f"{math.exp(float(np.mean(each.nats))):.3f}", "above exact, %": worse(each),
            "agreement": agreement(each),
        }
        for each in rows
    ]  # fmt: skip
    print(tabulate(table, headers="keys", tablefmt="github", disable_numparse=True))
    found = {each.name: each for each in rows}
    pairs = []
    for held, codec in _nearest(rows):
        one, two = found[held], found[codec]
        pairs.append({
            "storage": held.removeprefix(f"{STORAGE} "), "bits": f"{one.bits:.2f}", "above exact, %": worse(one),
            "agreement": agreement(one), "codec of nearest bits": codec, "its bits": f"{two.bits:.2f}",
            "its loss, %": worse(two), "its agreement": agreement(two),
        })  # fmt: skip
    if pairs:
        print("\n" + tabulate(pairs, headers="keys", tablefmt="github", disable_numparse=True))
