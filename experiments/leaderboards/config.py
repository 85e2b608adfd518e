"""The config of `experiments.leaderboard`.

No postponed annotations here: `config_flags` reads the types themselves.
"""

import dataclasses

from experiments.config import DataConfig, ModelConfig, TasksConfig
from experiments.fields import Kernels, Names, Numbers, Text, Whole


@dataclasses.dataclass
class LeaderboardConfig:
    """Attributes:
    name: names the results.
    model: what runs.
    caches: as text, ``h2o`` or ``full + int8 + quest(page=16, budget={tokens})``. A policy gets each of `budgets`, and
      so do ``{share}`` and ``{tokens}`` in a text: that share, and that share of the prompt in whole pages of 16
      tokens.
    unlimited: caches without a budget, such as ``full + int4``; each is measured once.
    budgets: shares of the prompt.
    texts: text files, each of which is scored by itself; none = a text that the project generates.
    data: the sizes of a text.
    tasks: what is asked.
    implementation: as in `experiments.config.ExperimentConfig`.
    repeats: how often the steps of the first text are timed, beside the full cache's in the same process; 0 = never.
    seed: likewise.
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
    implementation: Kernels = "auto"
    repeats: Whole = 0
    seed: Whole = 0
    output: Text = "results"
