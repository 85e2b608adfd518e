"""Every policy of the leaderboard of SmolLM2 on kvjax-tiny, at a fifth of the prompt.

Paper: those of the policies; none has this model.
Expected: experiments/measured/leaderboard/policies_tiny.md.
Hardware: any CPU; some twenty minutes on two cores.
Command: python -m experiments.leaderboard --config=leaderboard_policies_tiny --config.texts=FILE
"""

from experiments.config import DataConfig, ModelConfig
from experiments.leaderboards.caches import POLICIES
from experiments.leaderboards.config import LeaderboardConfig


def get_config() -> LeaderboardConfig:
    return LeaderboardConfig(
        name="leaderboard_policies_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        # Six layers have room for shorter spans of a ladder than the 30 of SmolLM2.
        caches=tuple(cache.replace("span=10", "span=3") for cache in POLICIES),
        budgets=(0.2,),
        data=DataConfig(num_sequences=32, prompt_length=512, new_tokens=128),
    )
