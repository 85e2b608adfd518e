"""Configs of fine-tuning under a cache; every field can be overridden on the command line (see `experiments.fields`).

This module does not import jax, so that ``--help`` takes no time.
"""

import dataclasses

from experiments import fields
from experiments.config import DENSE, EVERYTHING, DataConfig, ExperimentConfig, ModelConfig, PolicyConfig
from experiments.fields import Count, Names, Number, OptionalCount, OptionalText, Text, Whole
from kvjax.arguments import did_you_mean
from kvjax.errors import ConfigError
from kvjax.typing import JsonObject

FULL, LORA = "full", "lora"  # methods
SPEC = "spec"  # the config's own cache
#: Fields that may change when a run is continued.
FREE = ("name", "output", "log_every", "checkpoint_every", "evaluate_every")


@dataclasses.dataclass
class TunedModel:
    """Attributes:
    path: a checkpoint folder, a GGUF file, a Hugging Face hub id or kvjax-tiny.
    dtype: the dtype of the weights and the cache, and of the exported model; none = float32 on a CPU, bfloat16
      elsewhere. Trained parameters and the state of the optimizer are float32.
    """

    path: Text = "kvjax-tiny"
    dtype: OptionalText = None


@dataclasses.dataclass
class LoraConfig:
    """Attributes:
    rank: the rank of the update of a projection.
    alpha: the update is multiplied by alpha / rank.
    projections: the projections that are updated, of query, key, value, out, gate, up and down.
    """

    rank: Count = 8
    alpha: Number = 16.0
    projections: Names = ("query", "key", "value", "out")


@dataclasses.dataclass
class WindowConfig:
    """Attributes:
    prompt_length: the number of tokens of a window that are its prompt; fractional budgets refer to it.
    new_tokens: the number of tokens of a training window after its prompt, which are fed one at a time.
    prefill_block: the number of tokens of a block of the prompt, in training and in evaluation: a policy evicts after
      each block, and the next block attends to the slots that are left. none = the whole prompt in one block.
    """

    prompt_length: Count = 512
    new_tokens: Whole = 0
    prefill_block: OptionalCount = 32


@dataclasses.dataclass
class EvaluationConfig:
    """Attributes:
    windows: the number of windows of each held-out text, evenly spread over it.
    new_tokens: the number of tokens after each prompt that are fed one at a time, and scored.
    """

    windows: Count = 16
    new_tokens: Count = 128


@dataclasses.dataclass
class TuneOptimizer:
    """Attributes:
    learning_rate: the largest learning rate of AdamW.
    warmup_steps: the number of steps in which the rate rises linearly from 0; it then falls to 0 as a cosine.
    weight_decay: the weight decay.
    clip: the largest global norm of a gradient.
    """

    learning_rate: Number = 1e-3
    warmup_steps: Whole = 10
    weight_decay: Number = 0.0
    clip: Number = 1.0


@dataclasses.dataclass
class TuneConfig:
    """Attributes:
    name: the name of the run.
    model: the model that is tuned.
    policy: which slots the cache keeps.
    storage: how slots are held, such as int4(residual=32) or FILE.py:factory.
    selection: which of these slots a query reads, such as quest(page=16, budget=512) or FILE.py:factory.
    train_under: the cache under which the model is trained: spec, the config's own, or full, the control (ordinary
      fine-tuning, evaluated in the same way).
    texts: text files, folders of text files or glob patterns.
    held_out: the file names of texts that are used for evaluation only; none = the last tenth of each text.
    windows: the windows of the texts.
    evaluation: how the gap to the full cache is measured, before and after.
    method: lora, which trains low-rank updates of some projections, or full, which trains all parameters.
    lora: the low-rank updates.
    optimizer: AdamW with a schedule.
    rows: the number of windows of a step.
    steps: the number of steps of the run.
    checkpoint_every: the number of steps between checkpoints.
    log_every: the number of steps between log lines.
    seed: the random seed of windows and of the initial low-rank updates.
    output: the folder of the run; a run that already exists there continues from its last checkpoint.
    """

    name: Text = "tune"
    model: TunedModel = dataclasses.field(default_factory=TunedModel)
    policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    storage: Text = DENSE
    selection: Text = EVERYTHING
    train_under: Text = SPEC
    texts: Names = ()
    held_out: Names = ()
    windows: WindowConfig = dataclasses.field(default_factory=WindowConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    method: Text = LORA
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    optimizer: TuneOptimizer = dataclasses.field(default_factory=TuneOptimizer)
    rows: Count = 8
    steps: Count = 200
    checkpoint_every: Count = 50
    log_every: Count = 10
    seed: Whole = 0
    output: Text = "results/tune"


def check(config: TuneConfig) -> None:
    """Refuses, before anything is read or trained, settings that do not fit together.

    Raises:
      ConfigError: a setting that is not valid, or two that do not fit together.
    """
    for name, given, valid in (
        ("method", config.method, (LORA, FULL)),
        ("train_under", config.train_under, (SPEC, "full")),
    ):
        if given not in valid:
            raise ConfigError(f"{name}={given!r} is unknown; {did_you_mean(given, valid)}valid: {', '.join(valid)}.")
    if config.optimizer.warmup_steps >= config.steps:
        raise ConfigError(f"optimizer.warmup_steps={config.optimizer.warmup_steps} must be below steps={config.steps}.")
    if not config.optimizer.clip:
        raise ConfigError("optimizer.clip=0.0 sets every gradient to 0; give a number above 0, such as 1.0.")
    if config.method == LORA and not config.lora.projections:
        raise ConfigError("lora.projections is empty; give some of query, key, value, out, gate, up and down.")
    block, prompt = config.windows.prefill_block, config.windows.prompt_length
    if block == 0:
        raise ConfigError("windows.prefill_block=0 is not valid; give a whole number of at least 1, or none.")
    if (block is None or block >= prompt) and config.windows.new_tokens < 2:
        raise ConfigError(
            f"windows.prefill_block={'none' if block is None else block} reads a prompt of {prompt} tokens in one "
            f"block, and windows.new_tokens={config.windows.new_tokens}: no token reads the cache, so that training "
            "would not depend on it; give a smaller block, or at least 2 new tokens."
        )


def experiment(config: TuneConfig, mesh: str = "") -> ExperimentConfig:
    """Returns the experiment that runs the model under the cache on windows of the size of the evaluation."""
    return ExperimentConfig(
        name=config.name,
        model=ModelConfig(path=config.model.path, dtype=config.model.dtype),
        policy=config.policy,
        storage=config.storage,
        selection=config.selection,
        data=DataConfig(
            num_sequences=config.evaluation.windows,
            prompt_length=config.windows.prompt_length,
            new_tokens=config.evaluation.new_tokens,
        ),
        prefill_block=config.windows.prefill_block,
        mesh=mesh,
        repeats=0,
        seed=config.seed,
    )


def past(config: fields.Config) -> JsonObject:
    """Returns the settings that determine the results of a run."""
    return {name: value for name, value in fields.to_dict(config).items() if name not in FREE}
