"""The config of `experiments.leaderboard`.

No postponed annotations here: `config_flags` reads the types themselves.
"""

import dataclasses

from experiments.config import DataConfig, ModelConfig, TasksConfig
from experiments.fields import Count, Kernels, Names, Numbers, Text, Whole

FULL, WHOLE = "full", 1.0  # the cache that all others are compared with, and the budget of a cache that has none


@dataclasses.dataclass
class LeaderboardConfig:
    """Attributes:
    name: the name of the results.
    model: the model that runs.
    caches: such as ``h2o`` or ``full + int8 + quest(page=16, budget={tokens})``. A policy is run with each budget;
      ``{share}`` is replaced by the budget, and ``{tokens}`` by that share of the prompt in tokens, in whole pages of
      16.
    unlimited: caches without a budget, such as ``full + int4``; each is measured once.
    budgets: shares of the prompt.
    texts: text files, each scored separately; none = a generated text.
    data: the sizes of each text.
    tasks: the tasks.
    opening: the number of tokens of each row of the first text, which a long generation continues.
    generated: the number of new tokens of the long generation, whose budgets are shares of both; 0 = none.
    implementation: as in `experiments.config.ExperimentConfig`.
    repeats: how often the steps of the first text are timed, with those of the full cache in turn; 0 = never.
    seed: the seed of random weights, of the generated text and of generated tasks.
    output: the folder of results.
    """

    name: Text = "leaderboard"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    caches: Names = ("window", "h2o")
    unlimited: Names = ()
    budgets: Numbers = (0.1, 0.2, 0.5)
    texts: Names = ()
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    tasks: TasksConfig = dataclasses.field(default_factory=TasksConfig)
    opening: Count = 32
    generated: Whole = 0
    implementation: Kernels = "auto"
    repeats: Whole = 0
    seed: Whole = 0
    output: Text = "results"
