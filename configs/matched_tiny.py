"""Compares the outputs of attention over 10 % of a prompt, of kvjax-tiny: matched weights and values, and evictions.

Paper: none; `matched` is kvjax's own (docs/policies.md). Errors are those of kvjax.analysis.output_error.
Expected: docs/evidence.md.
Hardware: any CPU; five minutes on two cores, most of it compilation.
Command: python -m experiments.after_prompt --config=matched_tiny --measures=errors --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="matched_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="matched", budget=0.1),
        baselines=(
            "matched(queries='following')", "matched(queries='replay')", "window", "window(sinks=4)", "h2o", "roco",
            "tova", "snapkv(window=16)", "expected_attention", "kvzip(chunk=256)", "keydiff", "compactor", "random",
        ),
        data=DataConfig(num_sequences=8, prompt_length=512, new_tokens=64),
        repeats=0,
    )  # fmt: skip
