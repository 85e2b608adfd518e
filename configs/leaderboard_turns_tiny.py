"""Four questions about one context under every policy, selections and storages on kvjax-tiny, in SCBench's modes.

A context of 240 tokens holds four word pairs; half of its slots are kept.

Paper: SCBench (arXiv:2412.10319): methods that compress the prompt for one question fail at later turns.
Expected: docs/evidence.md.
Hardware: any CPU; 75 minutes on two cores, nearly all of it compilation.
Command: python -m experiments.leaderboard --config=leaderboard_turns_tiny
"""

from experiments.config import DataConfig, ModelConfig, TasksConfig
from experiments.leaderboards.caches import POLICIES
from experiments.leaderboards.config import LeaderboardConfig

MODES = ("multi_turn", "multi_request", "single")
CONTEXT = "length=240, count=24"


def get_config() -> LeaderboardConfig:
    return LeaderboardConfig(
        name="leaderboard_turns_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        # Six layers have room for shorter spans of a ladder than the 30 of SmolLM2.
        caches=(
            *(cache.replace("span=10", "span=3") for cache in POLICIES),
            "fifo",
            "lru",
            "counter",
            "strided(stride=4)",
            "fixed(block=16, columns=4)",
            "full + quest(page=16, budget={tokens})",
            "full + tokenselect(k={tokens}, sinks=0, recent=1, first_layer=2)",
            "full + infinigen(alpha=5, cap={share}, recent=4, first_layer=2)",
            "full + retrieval(chunk=8, budget={tokens})",
            "full + lserve(page=16, sub=4, budget={tokens}, first_layer=0)",
            "full + optimal(n={tokens})",
            "full + rekv(page=16, budget={tokens})",
            "full + sparf(r=16, k={tokens})",
            "full + a2ats(k={tokens})",
            "full + alisa(budget={tokens})",
            "full + shadowkv(rank=96, chunk=16, budget={tokens}, local=1, outliers=0)",
        ),
        unlimited=("full + int8", "full + int4", "full + turboquant", "full + kivi"),
        budgets=(0.5,),
        data=DataConfig(num_sequences=8, prompt_length=256, new_tokens=16),
        tasks=TasksConfig(names=tuple(f"recall_associative(mode={mode}, {CONTEXT})" for mode in MODES), rows=24),
    )
