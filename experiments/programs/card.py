"""Scores a finished training run, and makes its curve and its card; see `experiments.card`."""

import contextlib
import json
import math
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tabulate import tabulate

import kvjax
from experiments import fields, results
from experiments.config import RecallConfig
from experiments.lines import numbered
from experiments.reports import plots
from experiments.reports.tables import NONE
from experiments.tasks import recall, score
from experiments.tasks.prompts import NoRoom, Prompt
from experiments.tasks.words import AFTERWARDS, HELD_OUT, Words
from experiments.training import corpus, evaluate
from experiments.training.config import TrainConfig, files
from kvjax import policies
from kvjax.errors import ConfigError
from kvjax.models.model import Model
from kvjax.models.parameters import parameter_count
from kvjax.typing import JsonObject

WINDOWS, GAIN_WINDOWS = 32, 128  # of each held-out text; the gain is a small difference, and takes more
GAIN_STRIDE = 1  # the gain is measured on every n-th token; tests take fewer
NEAR = 128  # tokens that the short-sighted comparison sees
PROMPTS = 128  # of each task
BUDGET = 0.2
TASKS = tuple(recall.TASKS)
POLICIES = ("full", "h2o", "window", "local_only")
REWORDED = "full, other wordings"  # written after training, see `AFTERWARDS`
RECIPE = """`{start[command]}`

{config.steps:,} steps of {config.batch_tokens:,} tokens, seed {config.seed}, in {hours:.1f} hours{resumed} on
{start[cores]} cores ({start[cpu]}), jax {start[jax]}, Python {start[python]}. {beginning} Windows of {contexts} tokens
{stages}, of these {repeats} one sequence of random tokens over and over; {recall} of every window's tokens recall
material ({shares}), {invented} of it in wordings made up on the spot. The learning rate came down to 0 at step {cycles}
(over {decays})."""


class Run(NamedTuple):
    """A finished training run: its settings, and what it logged."""

    folder: Path
    config: TrainConfig
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "Run":
        events = [json.loads(line) for _, line in numbered((folder / "metrics.jsonl").read_bytes())]
        return cls(folder, fields.from_dict(TrainConfig, results.read_json(folder / "config.json")), events)

    def of(self, kind: str) -> list[JsonObject]:
        return [event for event in self.events if event["kind"] == kind]

    def before(self) -> "list[Run]":
        """The runs that led to this one, the oldest first, and this one."""
        folder = Path(self.config.start).parent
        known = self.config.start and (folder / "metrics.jsonl").is_file()
        return [*(Run.read(folder).before() if known else []), self]

    def recipe(self) -> str:
        config, mixture, starts = self.config, self.config.mixture, self.of("start")
        hours = sum(config.batch_tokens * config.log_every / e["tokens_per_second"] for e in self.of("loss")) / 3600
        return RECIPE.format(
            config=config,
            start=starts[-1],
            hours=hours,
            resumed=f", in {len(starts)} parts," if len(starts) > 1 else "",
            beginning=f"It began with the weights of `{config.start}`, in bfloat16.{_added(config.new_layers)}"
            if config.start
            else "The first parameters hold an induction head (`experiments/training/induction.py`).",
            contexts=_listed(config.contexts),
            stages=f"by stage (ends at steps {_listed(config.stage_ends)})" if config.stage_ends else "throughout",
            repeats=", ".join(f"{share:.0%}" for share in mixture.repeat_fraction),
            recall=f"{mixture.recall_fraction:.0%}",
            shares=", ".join(
                f"{task} {share / sum(mixture.task_shares):.0%}"
                for task, share in zip(recall.TASKS, mixture.task_shares, strict=True)
            ),
            invented=", ".join(f"{share:.0%}" for share in mixture.invented_fraction),
            cycles=_listed((*config.optimizer.cycle_ends, config.steps)),
            decays=_listed(config.optimizer.decay_steps),
        )


def context_gain(model: Model, text: corpus.Text) -> tuple[float, float]:
    """Bits per byte of bytes 512 to 1,024 of a text's windows: with all that precedes visible, and with 128 tokens."""
    bos, context = model.config.bos_token_id or 0, 512
    starts = np.linspace(0, text.tokens.size - context, GAIN_WINDOWS).astype(int)
    rows = np.stack([text.tokens[start : start + context] for start in starts])
    sizes = np.stack([text.bytes[start : start + context] for start in starts])
    ends = np.cumsum(sizes, axis=1)
    asked = (ends > 512) & (ends <= 1024)
    asked[:, : NEAR - 1] = False
    asked[:, np.arange(context) % GAIN_STRIDE != 0] = False
    full, _ = evaluate.log_probabilities(
        model.params, np.concatenate([np.full((len(rows), 1), bos), rows], axis=1), model.config
    )
    # A row for each token that is asked for: BOS and the tokens right before it, 128 in all.
    row, place = np.nonzero(asked)
    near = np.stack([rows[r, p - NEAR + 1 : p + 1] for r, p in zip(row, place, strict=True)])
    near = np.concatenate([np.full((len(near), 1), bos), near], axis=1)
    short, _ = evaluate.log_probabilities(model.params, near, model.config)
    size = sizes[asked].sum() * np.log(2)
    full, short = full[asked].sum(dtype=np.float64), short[:, -1].sum(dtype=np.float64)
    return float(-full / size), float(-short / size)


def recalled(model: Model) -> dict[str, dict[str, float]]:
    """Task -> policy -> share of exact matches: facts 700 to 900 tokens back, held-out words and wordings."""
    asked, reworded = _prompts(model, HELD_OUT), _prompts(model, AFTERWARDS)
    budgets = {name: {} if name == "full" else {"budget": BUDGET} for name in POLICIES}
    chosen = {name: policies.by_name(name, **budget) for name, budget in budgets.items()}
    by_policy = {name: score.exact_matches(model, asked, policy) for name, policy in chosen.items()}
    by_policy[REWORDED] = score.exact_matches(model, reworded, chosen["full"])
    return {task: {name: shares.get(task, math.nan) for name, shares in by_policy.items()} for task in asked}


def _prompts(model: Model, words: Words) -> dict[str, list[Prompt]]:
    asked: dict[str, list[Prompt]] = {}
    for task in TASKS:
        # Under a tokenizer of few bytes a token, a task's facts may not fit.
        with contextlib.suppress(NoRoom):
            asked |= score.make_prompts(RecallConfig(tasks=(task,), prompts=PROMPTS), model, seed=1, words=words)
    return asked


def curve(runs: Sequence[Run]) -> bytes:
    """A PNG: losses and held-out bits per byte by step, run after run; a line where the context or the run changes."""
    events: list[dict[str, Any]] = []
    done, changes = 0, []
    for run in runs:
        events += [event | {"step": event["step"] + done} for event in run.events]
        changes += [done + step for step in (0, *run.config.stage_ends)]
        done += run.config.steps
    figure, panels = plots.new_figure(2, figsize=(10, 3.6), width_ratios=[1.4, 1])
    losses = [event for event in events if event["kind"] == "loss"]
    left, right = panels[0]
    plots.style(left, "Training loss", "step", "nats a token")
    for name, color in zip(("text", "answer", "repeat"), plots.COLORS, strict=False):
        points = [(event["step"], event[name]) for event in losses if name in event]
        if not points:
            continue
        x, y = map(np.asarray, zip(*points, strict=True))
        width = min(10, len(y))
        smooth = np.convolve(y, np.ones(width) / width, "valid")
        left.plot(x, y, color=color, lw=0.6, alpha=0.3)
        left.plot(x[width - 1 :], smooth, color=color, lw=1.8, label=name)
    left.legend(frameon=False)
    left.set_ylim(bottom=0)
    for step in changes[1:]:
        left.axvline(step, color="#dddddd", lw=0.8, zorder=0)
    plots.style(right, "Held-out text", "step", "bits a byte")
    evaluations = [event for event in events if event["kind"] == "evaluation"]
    # Texts that every run has read, in the lines in which they were published.
    names = [name for name in evaluations[0] if name.endswith(".txt") and all(name in e for e in evaluations)]
    for name, color in zip(names, plots.COLORS, strict=False):
        right.plot(
            [e["step"] for e in evaluations], [e[name] for e in evaluations], "o-", ms=4, color=color, label=name
        )
    right.legend(frameon=False, fontsize=8)
    return plots.png(figure)


def card(run: Path, license: str) -> tuple[str, bytes]:
    """The card in Markdown, and the curve."""
    last = Run.read(run)
    config, runs = last.config, last.before()
    model = kvjax.load(run / "model", dtype="float32")
    decoder = model.config
    if decoder.max_positions < 1024:
        raise ConfigError(f"{run} has a context of {decoder.max_positions} tokens; a card's recall tasks need 1,024.")
    _, held_out = corpus.load(config, run, resume=True)
    training, kept_out = files(config)
    as_published = {path.name for path in kept_out}  # the gain takes minutes, and is not asked of other layouts
    texts = []
    for text in held_out:
        bits = evaluate.bits_per_byte(
            model.params, decoder, text, bos=decoder.bos_token_id or 0, context=decoder.max_positions, windows=WINDOWS
        )
        gain = (f"{each:.3f}" for each in context_gain(model, text)) if text.name in as_published else (NONE, NONE)
        columns = ("held-out text", "bits a byte", "bytes 512 to 1,024", f"the same, {NEAR} tokens visible")
        texts.append(dict(zip(columns, (text.name, f"{bits:.3f}", *gain), strict=True)))
        print(texts[-1], flush=True)
    tasks = [
        {"task": task, "difficulty": recall.DIFFICULTY[task]} | {name: _percent(each) for name, each in shares.items()}
        for task, shares in recalled(model).items()
    ]  # fmt: skip
    print(*tasks, sep="\n", flush=True)
    size = sum(len(corpus.read(path).encode()) for path in training)
    template = (Path(__file__).parent / "card.md").read_text()
    filled = template.format(
        name=config.name.replace("train_", "kvjax-"),
        config=config,
        mixture=config.mixture,
        layouts=", ".join(config.mixture.layouts),
        decoder=decoder,
        millions=parameter_count(decoder) / 1e6,
        tokens=sum(each.config.steps * each.config.batch_tokens for each in runs) / 1e6,
        recipes="\n\n".join(each.recipe() for each in runs),
        megabytes=size / 1e6,
        files=", ".join(path.stem for path in training),
        held_out=", ".join(path.name for path in kept_out),
        license=license,
        texts=tabulate(texts, headers="keys", tablefmt="github", disable_numparse=True),
        tasks=tabulate(tasks, headers="keys", tablefmt="github", disable_numparse=True),
        windows=WINDOWS,
        gain_windows=GAIN_WINDOWS,
        prompts=PROMPTS,
    )
    return _wrapped(filled), curve(runs)


def _added(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    which, were = ("Layer", "was") if len(layers) == 1 else ("Layers", "were")
    return f" {which} {_listed(layers)} {were} new, and began as the identity."


def _percent(share: float) -> str:
    return NONE if math.isnan(share) else f"{100 * share:.0f} %"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)


def _wrapped(markdown: str) -> str:
    """Paragraphs of prose in lines of 120 characters; tables, headings, commands and pictures as they are."""
    parts = markdown.strip().split("\n\n")
    prose = [part[0] not in "|#`!" for part in parts]
    filled = [
        textwrap.fill(" ".join(part.split()), 120, break_long_words=False, break_on_hyphens=False) if of else part
        for part, of in zip(parts, prose, strict=True)
    ]
    return "\n\n".join(filled) + "\n"


def start(run: Path, output: Path, license: str) -> int:
    """Writes the model, its curve and its card.

    Returns:
      The exit status.
    """
    results.make_folder(output)
    text, plot = card(run, license)
    for number, each in enumerate(Run.read(run).before(), 1):
        folder = output / "training" / f"run_{number}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "metrics.jsonl"):
            shutil.copy(each.folder / name, folder / name)
    for path in (run / "model").iterdir():
        shutil.copy(path, output / path.name)
    (output / "training" / "curve.png").write_bytes(plot)
    (output / "README.md").write_text(text)
    print(text)
    return 0
