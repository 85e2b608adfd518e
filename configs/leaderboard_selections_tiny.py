"""Selections on kvjax's own model, each of which reads a tenth of the prompt: perplexity, and needles.

Paper: none; see docs/leaderboard.md.
Expected: experiments/measured/leaderboard/selections_tiny.md.
Hardware: any CPU; some ten minutes on two cores.
Command: python -m experiments.leaderboard --config=leaderboard_selections_tiny --config.texts=FILE
"""

from experiments.config import DataConfig, ModelConfig, TasksConfig
from experiments.leaderboards.config import LeaderboardConfig


def get_config() -> LeaderboardConfig:
    return LeaderboardConfig(
        name="leaderboard_selections_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        # All read everything in layers 0 and 1, as quest and infinigen do by default.
        caches=(
            "full + quest(page=16, budget={tokens})",
            "full + infinigen(cap={tokens})",
            "full + sparf(8, {tokens}, first_layer=2)",
            "full + sparf(32, {tokens}, first_layer=2)",
            "full + alisa({tokens}, first_layer=2)",
            "full + rekv(page=16, budget={tokens}, recent=32, first_layer=2)",
            "full + optimal({tokens}, first_layer=2)",
            "window",
        ),
        budgets=(0.1,),
        data=DataConfig(num_sequences=16, prompt_length=896, new_tokens=64),
        tasks=TasksConfig(names=("needle(lengths=(896,), depths=8, repeats=4)",)),
    )
