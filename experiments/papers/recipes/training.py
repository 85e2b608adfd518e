"""A few steps of training on rows of a text, and heavy hitters while a decoder is trained."""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

from experiments import results, stages
from experiments.papers.parts import Lab, Part, Result, packed, read
from experiments.papers.recipes import look
from experiments.papers.settings import FULL, Settings
from experiments.programs.train import train_step
from experiments.training import checkpoints as saved
from experiments.training.config import OptimizerConfig, TrainConfig
from experiments.training.mixture import Kind
from experiments.training.optimizer import optimizer
from kvjax.models.decoder import Decoder
from kvjax.models.model import Model
from kvjax.models.parameters import random_parameters
from kvjax.parallel.sharding import Params

MAX_ROWS = 1_000  # of a text that is trained on
HEAVY = 0.2  # of the tokens
LONG, SHORT = 3_000, 300  # steps from random weights
CHECKPOINTS = 12  # of a training, from the newest of which it continues if it was interrupted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints(Part):
    """Trains a decoder of the model's shape from random weights, and looks at attention on the way.

    The result has ``exponent`` [checkpoints, L] float64, of accumulated attention, and ``overlap`` [checkpoints, L],
    the share of the heaviest `HEAVY` of the tokens that are among the last checkpoint's. An interrupted training
    continues, in a folder beside the results of parts that is removed in the end.

    Attributes:
      text: a key of `TEXTS`, whose attention is measured.
      source: a key of `TEXTS`, which is trained on.
      rows: of the text.
      length: tokens of a row of both.
      layers: of the decoder; None = as many as the model has.
      count: steps.
      batch: rows of a step.
      shares: of the steps, at which attention is measured.
    """

    text: str
    source: str
    rows: int
    length: int
    layers: int | None
    count: int
    batch: int
    shares: tuple[float, ...]

    def files(self, settings: Settings) -> Sequence[Path]:
        return settings.file(self.text), settings.file(self.source)

    def measure(self, lab: Lab) -> Result:
        model = lab.model(self.model)
        if self.layers is not None:
            first, whole = self.layers, model.config
            config = dataclasses.replace(
                whole, num_layers=first, windows=whole.windows[:first], ropes=whole.ropes[:first]
            )
            model = dataclasses.replace(model, config=config)
        params = random_parameters(model.config, jax.random.key(lab.settings.seed))
        model = dataclasses.replace(model, params=params)
        source = lab.rows(self, self.source, min(MAX_ROWS, self.batch * self.count), self.length)
        tokens = lab.rows(self, self.text, self.rows, self.length)
        wanted = [max(1, round(share * self.count)) for share in self.shares]
        folder = lab.folder / f"{lab.digest(self)}-training"
        if lab.rerun:
            shutil.rmtree(folder, ignore_errors=True)
        for step, params in steps(
            model, source, count=self.count, batch=self.batch, seed=lab.settings.seed, learning_rate=8e-3, folder=folder
        ):
            if step in wanted:
                # [L, B, H, T]
                mass = look.mass_by_token(dataclasses.replace(model, params=params), tokens)
                heavy = mass >= np.quantile(mass, 1 - HEAVY, axis=-1, keepdims=True)
                exponent = look.by_layer(look.exponent_of(mass))
                results.write(folder / f"{step}.npz", packed({"exponent": exponent, "heavy": heavy}))
        looks = [read(folder / f"{step}.npz") for step in wanted]
        found = [each for each in looks if each is not None]
        assert len(found) == len(wanted)  # a step is looked at before the checkpoint after it is written
        last = found[-1]["heavy"]
        overlap = [look.by_layer((x["heavy"] & last).sum(axis=-1) / x["heavy"].sum(axis=-1)) for x in found]
        shutil.rmtree(folder, ignore_errors=True)
        return {"exponent": np.array([each["exponent"] for each in found]), "overlap": np.array(overlap)}


def checkpoints(settings: Settings) -> Checkpoints:
    """A part of the scale's sizes."""
    trial = settings.scale.trial
    # 4 % of 300 steps are 12, at which no decoder attends to anything yet. 3,000 take half an hour of a core for
    # kvjax-tiny, and days for the models whose sizes are half.
    count = 25 if trial else LONG if settings.scale == FULL else SHORT
    return Checkpoints(
        text="book", source="war", rows=settings.scale.look_rows, length=settings.scale.length // 4,
        layers=2 if trial else None, count=count, batch=2 if trial else 4,
        shares=(0.04, 0.1, 0.25, 0.5, 1.0),
    )  # fmt: skip


def steps(
    model: Model,
    rows: np.ndarray,
    *,
    count: int,
    batch: int,
    seed: int,
    learning_rate: float,
    folder: Path | None = None,
) -> Iterator[tuple[int, Params]]:
    """Trains on rows in a random order, over and over.

    Args:
      model: with the parameters to begin with.
      rows: [N, T] int32.
      count: steps.
      batch: rows of a step.
      seed: of the order.
      learning_rate: see `experiments.training.config.OptimizerConfig`.
      folder: of checkpoints, `CHECKPOINTS` at most, of which the newest two are kept. Training continues after the
        newest, and yields no steps before it. None = no checkpoints.

    Yields:
      After every step its number, from 1, and the parameters, float32; they are valid until the next step. The
      checkpoint of a step is written after the caller has asked for the next one.
    """
    settings = OptimizerConfig(
        learning_rate=learning_rate, embedding_learning_rate=learning_rate, warmup_steps=max(1, min(30, count // 5)),
        decay_steps=(max(1, count // 2),),
    )  # fmt: skip
    config = TrainConfig(optimizer=settings, steps=count)
    # Copies: a step takes its state's memory.
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), dict(model.params))
    state = TrainState.create(apply_fn=Decoder(model.config).apply, params=params, tx=optimizer(config))
    rng = np.random.default_rng(seed)
    kinds = np.full((batch, rows.shape[1]), int(Kind.TEXT), np.int32)
    order = np.empty(0, np.int64)
    every = max(1, count // CHECKPOINTS)
    with saved.manager(folder, every) if folder else contextlib.nullcontext() as manager:
        start = (manager.latest_step() or 0) if manager else 0
        if manager and start:
            state = manager.restore(start, args=ocp.args.StandardRestore(state))
        for step in range(1, count + 1):
            while order.size < batch:
                order = np.concatenate([order, rng.permutation(len(rows))])
            own, order = rows[order[:batch]], order[batch:]
            if step <= start:
                continue
            stages.enter(f"training, step {step} of {count}")
            state, _ = train_step(state, own, kinds, 1.0)
            yield step, state.params
            if manager and step % every == 0 and step < count:
                manager.save(step, args=ocp.args.StandardSave(state))
