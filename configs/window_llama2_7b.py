"""A sliding window with four attention sinks on LLaMA-2-7B, against none and against H2O.

Paper: StreamingLLM (arXiv:2309.17453): a window without the first tokens fails once the text outgrows it, and keeping
four of them restores it. `local_only` is that window without sinks. The paper streams PG-19 over far longer texts than
this, with positions="cache". Expected numbers: not yet measured here.
Hardware: one accelerator with 24 GB in bfloat16 (13.5 GB of weights), or a host with 32 GB in float32.
Command: python -m experiments.run --config=window_llama2_7b --config.data.text=FILE
StreamingLLM's positions: add --config.policy.positions=cache
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="window_llama2_7b",
        model=ModelConfig(path="meta-llama/Llama-2-7b-hf", shape="llama2-7b"),
        policy=PolicyConfig(name="window", budget=0.2, sinks=4),
        baselines=("full", "local_only", "h2o"),
        data=DataConfig(num_sequences=4, prompt_length=2048, new_tokens=256),
    )
