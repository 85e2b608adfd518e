"""Measures contexts whose text was edited; see `experiments.edit_reuse`."""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import flags
from tabulate import tabulate

import kvjax
from experiments import results
from experiments.config import DataConfig
from experiments.progress import counted
from experiments.reports.bootstrap import interval
from experiments.runs import data, identity, machine
from kvjax import contexts, policies, reuse
from kvjax.cache import Limits
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.state import Layer
from kvjax.contexts.choices import score_prefilled
from kvjax.errors import ConfigError
from kvjax.generation.context import Context
from kvjax.models.model import Model
from kvjax.reuse import Edit

PROGRAM = "python -m experiments.edit_reuse"
SILENT = ("--output", "--text")


class Passage(NamedTuple):
    """A passage before and after its edits.

    Attributes:
      before: [T'] int32, the text that was read.
      after: [T] int32, the right one.
      edits: that make it, ascending, in the positions of `before`.
    """

    before: np.ndarray
    after: np.ndarray
    edits: tuple[Edit, ...]


@dataclasses.dataclass
class Row:
    """The results of a method.

    Attributes:
      method: see `experiments.edit_reuse`.
      edits: their number; 0 where it does not matter.
      nats: of each passage, the mean loss of the tokens after it.
    """

    method: str
    edits: int
    nats: list[float] = dataclasses.field(default_factory=list)


def with_edits(
    passage: np.ndarray, elsewhere: np.ndarray, count: int, span: int, random: np.random.Generator
) -> Passage:
    """Puts other words into a passage, so that edits give the passage.

    Args:
      passage: [T] int32.
      elsewhere: [n] int32, where the other words are from.
      count: the number of edits, each within its own part of the passage.
      span: tokens that an edit puts in; it takes out from half as many to three halves.
      random: draws places and lengths.

    Raises:
      ConfigError: the passage is too short for this number of edits.
    """
    part = len(passage) // count
    if part <= 2 * span:
        raise ConfigError(f"{count} edits of {span} tokens do not fit into {len(passage)} tokens; give fewer --edits.")
    before: list[np.ndarray] = []
    edits: list[Edit] = []
    at = length = 0
    for number in range(count):
        place = number * part + int(random.integers(1, part - span))
        lengths = [each for each in range(span - span // 2, span + span // 2 + 1) if each != span]
        other = int(random.choice(lengths))
        source = int(random.integers(0, len(elsewhere) - other))
        before += [passage[at:place], elsewhere[source : source + other]]
        length += place - at
        edits.append(Edit(length, length + other, passage[place : place + span]))
        length, at = length + other, place + span
    return Passage(np.concatenate([*before, passage[at:]]).astype(np.int32), passage, tuple(edits))


def unrotated(model: Model, context: Context, edits: Sequence[Edit]) -> Context:
    """Applies edits, and leaves the keys of the slots behind them as they were rotated before.

    Args:
      model: of the context.
      context: of one row, a full cache.
      edits: see `kvjax.reuse.edit`.
    """
    moved = 0
    for start, stop, tokens in edits:
        more = len(np.asarray(tokens)) - (stop - start)
        context = reuse.edit(model, context, (start + moved, stop + moved, tokens))
        context = _rotated_back(model, context, stop + moved + more, more)
        moved += more
    return context


def _rotated_back(model: Model, context: Context, first: int, by: int) -> Context:
    """Rotates the keys of positions from `first` on back by some positions, but for the last token's, which is new."""
    stacked = stacked_runs(context.state.layers)
    state = arranged_state(context.state, ())
    layers = []
    for index, layer in enumerate(state.layers):
        (own,), rope = layer, model.config.kind(index).rope
        if rope is None:
            layers.append(layer)
            continue
        # [1, K, S]
        later = (own.position >= first) & (own.position < state.length[:, None, None] - 1)
        steps = jnp.where(later, -by, 0).astype(jnp.int32)
        plain = dataclasses.replace(rope, attention_factor=1.0)
        key = jnp.where(later[..., None], plain.rotate(own.key, steps, rope.frequencies(state.total)), own.key)
        layers.append(Layer((own.with_exact(key, own.value),)))
    return context._replace(state=arranged_state(state.replace(layers=tuple(layers)), stacked))


def start(values: flags.FlagValues, argv: Sequence[str]) -> int:
    """Measures what a command line asks for.

    Returns:
      The exit status.
    """
    if values.output:
        results.make_file(values.output)
    counts = sorted({*values.edits})
    model = kvjax.load(values.model, dtype="float32")
    settings = DataConfig(
        text=values.text, num_sequences=2 * values.rows, prompt_length=values.tokens, new_tokens=values.scored + 1
    )
    text, _, about = data.load(settings, model, seed=0)
    passages, elsewhere = text[: values.rows], np.concatenate(text[values.rows :])
    longest = values.tokens + max(counts) * values.span
    room = longest + values.scored + 1
    # The same for all passages, whatever their lengths, so that programs are compiled once.
    limits = Limits(prompt=longest, new_tokens=room - values.tokens + max(counts) * values.span)
    if room > model.config.max_positions:
        raise ConfigError(f"a row may have {model.config.max_positions} tokens; lower --tokens, --edits or --scored.")
    rows: dict[tuple[str, int], Row] = {}

    def add(method: str, edits: int, context: Context, following: np.ndarray) -> None:
        # The first token is fed, so that none is scored by logits from before the last change of a cache.
        context = contexts.extend(model, context, following[:1], block=1)
        ((scored,),) = score_prefilled(model, context, [[following[1:].tolist()]])
        row = rows.setdefault((method, edits), Row(method, edits))
        row.nats.append(-float(np.mean(scored.logprobs)))

    def read(tokens: np.ndarray) -> Context:
        return contexts.prefill(model, tokens, policies.full(), room=room, limits=limits)

    with counted(len(passages), done=0, unit="passage", name="edits", show=None) as advance:
        for number, whole in enumerate(passages):
            passage, following = whole[: values.tokens], whole[values.tokens :]
            add("prefill", 0, read(passage), following)
            for count in counts:
                random = np.random.default_rng([values.seed, number, count])
                made = with_edits(passage, elsewhere, count, values.span, random)
                wrong = read(made.before)
                add("unedited", count, wrong, following)
                add("unrotated", count, unrotated(model, wrong, made.edits), following)
                add("edit", count, reuse.edit(model, wrong, *made.edits), following)
                if count == 1:
                    repaired = reuse.edit(model, wrong, *made.edits, repair=values.repair)
                    add("repair", count, repaired, following)
            if values.output:
                kept = {
                    "model": values.model, "weights": identity.of_weights(values.model), "text": about,
                    "rows": values.rows, "tokens": values.tokens, "scored": values.scored, "span": values.span,
                    "command": shlex.join(
                        [*PROGRAM.split(), *(each for each in argv[1:] if not each.startswith(SILENT))]
                    ),
                    "environment": machine.environment(), "results": [dataclasses.asdict(own) for own in rows.values()],
                }  # fmt: skip
                results.write(Path(values.output), results.to_json(kept))
            advance()
    print(table(list(rows.values())))
    return 0


def table(rows: Sequence[Row]) -> str:
    """Returns perplexities, and by how much each is above that of a prefill of the right passage.

    Args:
      rows: the first one is that of the prefill.
    """
    right = np.array(rows[0].nats)
    made = []
    for each in rows:
        more = np.array(each.nats) - right
        low, high = (100 * math.expm1(end) for end in interval(more, each.method))
        made.append({
            "edits": each.edits or "", "method": each.method,
            "perplexity": f"{math.exp(float(np.mean(each.nats))):.3f}",
            "above prefill, %": f"{100 * math.expm1(float(np.mean(more))):+.2f} ({low:+.2f} to {high:+.2f})",
        })  # fmt: skip
    return tabulate(made, headers="keys", tablefmt="github", disable_numparse=True)
