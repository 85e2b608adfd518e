"""Config of the training of merges; every field can be overridden on the command line (see `experiments.fields`).

This module does not import jax, so that ``--help`` takes no time.
"""

import dataclasses

from experiments.config import PolicyConfig
from experiments.fields import Count, Names, Text, Whole
from experiments.tuning.config import EvaluationConfig, TunedModel, TuneOptimizer, WindowConfig
from kvjax.errors import ConfigError


@dataclasses.dataclass
class TrainMergeConfig:
    """Attributes:
    name: the name of the run.
    model: the model, which is not trained.
    policy: a policy that evicts several slots at once, and whose merge has parameters.
    texts: text files, folders of text files or glob patterns.
    held_out: the file names of texts that are used for evaluation only; none = the last tenth of each text.
    windows: the windows of the texts; slots are merged after each block of a prompt.
    evaluation: how the loss under the budget is measured.
    optimizer: AdamW with a schedule.
    rows: the number of windows of a step.
    steps: the number of steps of the run.
    evaluate_every: the number of steps between evaluations.
    checkpoint_every: the number of steps between checkpoints.
    log_every: the number of steps between log lines.
    seed: the random seed of windows and of the first parameters.
    output: the folder of the run; a run that already exists there continues from its last checkpoint.
    """

    name: Text = "train_merge"
    model: TunedModel = dataclasses.field(default_factory=TunedModel)
    policy: PolicyConfig = dataclasses.field(
        default_factory=lambda: PolicyConfig(name="h2o(every=32, merge=lococo(slots=64))", budget=128)
    )
    texts: Names = ()
    held_out: Names = ()
    windows: WindowConfig = dataclasses.field(default_factory=lambda: WindowConfig(prompt_length=256))
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    optimizer: TuneOptimizer = dataclasses.field(default_factory=TuneOptimizer)
    rows: Count = 4
    steps: Count = 100
    evaluate_every: Count = 50
    checkpoint_every: Count = 50
    log_every: Count = 10
    seed: Whole = 0
    output: Text = "results/train_merge"


def check(config: TrainMergeConfig) -> None:
    """Refuses, before anything is read or trained, settings that do not fit together.

    Raises:
      ConfigError: a setting that is not valid, or two that do not fit together.
    """
    if config.optimizer.warmup_steps >= config.steps:
        raise ConfigError(f"optimizer.warmup_steps={config.optimizer.warmup_steps} must be below steps={config.steps}.")
    if not config.optimizer.clip:
        raise ConfigError("optimizer.clip=0.0 sets every gradient to 0; give a number above 0, such as 1.0.")
    block, prompt = config.windows.prefill_block, config.windows.prompt_length
    if block == 0:
        raise ConfigError("windows.prefill_block=0 is not valid; give a whole number of at least 1, or none.")
    if (block is None or block >= prompt) and config.windows.new_tokens < 2:
        raise ConfigError(
            f"windows.prefill_block={'none' if block is None else block} reads a prompt of {prompt} tokens in one "
            f"block, and windows.new_tokens={config.windows.new_tokens}: no token reads merged slots, so that training "
            "would not depend on them; give a smaller block, or at least 2 new tokens."
        )
    budget, size = config.policy.budget, prompt + config.windows.new_tokens
    if block is not None and isinstance(budget, int) and size <= budget + block:
        raise ConfigError(
            f"policy.budget={budget} and windows.prefill_block={block}: of windows of {size} tokens, no token reads "
            "merged slots, so that training would not depend on them; give longer windows or a smaller budget."
        )
