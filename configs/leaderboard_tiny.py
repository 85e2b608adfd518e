"""A small leaderboard of kvjax's own model: four caches at two budgets, for a first look.

Paper: none; see docs/leaderboard.md.
Expected: a page in results/leaderboard_tiny/.
Hardware: any CPU; some five minutes on two cores.
Command: python -m experiments.leaderboard --config=leaderboard_tiny
"""

from experiments.config import DataConfig, ModelConfig, TasksConfig
from experiments.leaderboards.config import LeaderboardConfig


def get_config() -> LeaderboardConfig:
    return LeaderboardConfig(
        name="leaderboard_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        caches=("window", "h2o", "snapkv(window=4)", "full + quest(page=16, budget={tokens})"),
        unlimited=("full + int4",),
        budgets=(0.1, 0.2),
        data=DataConfig(num_sequences=8, prompt_length=448, new_tokens=64),
        tasks=TasksConfig(names=("needle(lengths=(448,), depths=5, repeats=2)",)),
    )
