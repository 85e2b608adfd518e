"""Asks kvjax-tiny for facts of prompts that were compressed to 30 % before the question was known.

Paper: KVzip (arXiv:2505.23416), which keeps what the model needs to repeat the prompt, and loses little at 30 %, where
methods that choose by the prompt's own attention lose the answers.
Expected: docs/evidence.md.
Hardware: any CPU; a quarter of an hour on two cores, most of it compilation.
Command: python -m experiments.run --config=unseen_questions_tiny
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, TasksConfig

LENGTH = 700  # tokens; the replay of `kvzip` has the positions after them, of 1,024


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="unseen_questions_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="kvzip(chunk=256)", budget=0.3),
        baselines=(
            "full", "adakv(kvzip(chunk=256), safeguard=0)", "snapkv(window=16)", "h2o", "window",
        ),
        data=DataConfig(num_sequences=1, prompt_length=256, new_tokens=32),
        tasks=TasksConfig(
            names=(
                f"needle(lengths=({LENGTH},), depths=8, repeats=4)",
                f"passkey(lengths=({LENGTH},), depths=8, repeats=4)",
            ),
            rows=32,
        ),
        repeats=0,
    )  # fmt: skip
