"""Configs of the training of learned reuse; every field can be overridden on the command line (`experiments.fields`).

This module does not import jax, so that ``--help`` takes no time.
"""

import dataclasses
import re

from experiments.fields import Count, Counts, Names, Text, Whole
from experiments.tuning.config import EvaluationConfig, TunedModel, TuneOptimizer
from kvjax.arguments import did_you_mean
from kvjax.errors import ConfigError

PREDICTION, AUGMENTATION = "prediction", "augmentation"  # methods


@dataclasses.dataclass
class PredictionConfig:
    """Attributes:
    auxiliaries: auxiliary models, each as the layers of the model that it begins with, such as 0+3; they are trained
      side by side on the same windows.
    """

    auxiliaries: Names = ("0", "0+3")


@dataclasses.dataclass
class AugmentationConfig:
    """Attributes:
    latents: numbers of input vectors; a coprocessor for each of them is trained, side by side on the same windows.
    points: the number of random points of a window.
    ahead: the number of tokens after each point whose loss is trained and measured.
    """

    latents: Counts = (4, 16)
    points: Count = 4
    ahead: Count = 16


@dataclasses.dataclass
class ReuseWindowConfig:
    """Attributes:
    prompt_length: the number of tokens of a window that are its prompt, whose cache is predicted.
    new_tokens: the number of tokens of a training window after its prompt. Augmentation has points in the whole window.
    """

    prompt_length: Count = 192
    new_tokens: Count = 64


@dataclasses.dataclass
class TrainReuseConfig:
    """Attributes:
    name: the name of the run.
    method: prediction (KV prediction) or augmentation (cache augmentation).
    model: the model whose cache is predicted or augmented; it is not trained.
    prediction: the auxiliary models.
    augmentation: the coprocessors.
    texts: text files, folders of text files or glob patterns.
    held_out: the file names of texts that are used for evaluation only; none = the last tenth of each text.
    windows: the windows of the texts.
    evaluation: the windows of held-out texts; their new_tokens are scored after each prompt.
    optimizer: AdamW with a schedule.
    rows: the number of windows of a step.
    steps: the number of steps of the run.
    evaluate_every: the number of steps between evaluations.
    checkpoint_every: the number of steps between checkpoints; there is one before each evaluation too.
    log_every: the number of steps between log lines.
    seed: the random seed of windows, of points and of the first parameters.
    output: the folder of the run; a run that already exists there continues from its last checkpoint.
    """

    name: Text = "train_reuse"
    method: Text = PREDICTION
    model: TunedModel = dataclasses.field(default_factory=lambda: TunedModel(dtype="float32"))
    prediction: PredictionConfig = dataclasses.field(default_factory=PredictionConfig)
    augmentation: AugmentationConfig = dataclasses.field(default_factory=AugmentationConfig)
    texts: Names = ()
    held_out: Names = ()
    windows: ReuseWindowConfig = dataclasses.field(default_factory=ReuseWindowConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=lambda: EvaluationConfig(new_tokens=64))
    optimizer: TuneOptimizer = dataclasses.field(default_factory=TuneOptimizer)
    rows: Count = 8
    steps: Count = 200
    evaluate_every: Count = 50
    checkpoint_every: Count = 50
    log_every: Count = 10
    seed: Whole = 0
    output: Text = "results/train_reuse"

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of what is trained side by side."""
        if self.method == PREDICTION:
            return tuple(self.prediction.auxiliaries)
        return tuple(str(each) for each in self.augmentation.latents)


def layers_of(auxiliary: str) -> tuple[int, ...]:
    """Returns the layers of an auxiliary model such as 0+3."""
    return tuple(int(each) for each in auxiliary.split("+"))


def check(config: TrainReuseConfig) -> None:
    """Refuses, before anything is read or trained, settings that do not fit together.

    Raises:
      ConfigError: a setting that is not valid, or two that do not fit together.
    """
    methods = (PREDICTION, AUGMENTATION)
    if config.method not in methods:
        raise ConfigError(
            f"method={config.method!r} is unknown; {did_you_mean(config.method, methods)}valid: {', '.join(methods)}."
        )
    if config.optimizer.warmup_steps >= config.steps:
        raise ConfigError(f"optimizer.warmup_steps={config.optimizer.warmup_steps} must be below steps={config.steps}.")
    if not config.optimizer.clip:
        raise ConfigError("optimizer.clip=0.0 sets every gradient to 0; give a number above 0, such as 1.0.")
    if not config.variants or len({*config.variants}) != len(config.variants):
        raise ConfigError(f"{', '.join(config.variants) or 'nothing'} is not valid; give different ones, at least one.")
    if config.method == PREDICTION:
        if wrong := [each for each in config.variants if not re.fullmatch(r"\d+(\+\d+)*", each)]:
            raise ConfigError(f"prediction.auxiliaries: {wrong[0]!r} is not valid; give layers such as 0+3.")
        if config.windows.prompt_length < 2:
            raise ConfigError("windows.prompt_length=1 leaves nothing to predict; give at least 2 tokens.")
        return
    size = config.windows.prompt_length + min(config.windows.new_tokens, config.evaluation.new_tokens)
    if config.augmentation.ahead >= size:
        raise ConfigError(
            f"augmentation.ahead={config.augmentation.ahead} must be below the {size} tokens of a window."
        )
