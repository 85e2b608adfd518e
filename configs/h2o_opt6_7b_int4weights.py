"""H2O at a budget of 20 % on OPT-6.7B with 4-bit weights, on a small accelerator.

Paper: H2O (arXiv:2306.14048), Table 7, the row H2O-c: 4-bit weights by FlexGen's group-wise quantisation, no
offloading, one T4 of 16 GB, 512 prompt tokens. It states 72.5 tokens/s at batch 52 and 512 new tokens, where 16-bit
weights leave room for batch 4 and 51.7 tokens/s. Expected numbers here: not yet measured.
Hardware: 4.2 GB of weights, so one accelerator with 16 GB; a host with 8 GB runs smaller batches.
Command: python -m experiments.run --config=h2o_opt6_7b_int4weights --config.data.text=FILE
What it would take on a TPU, from shapes alone: add --topology=v5e:1x1. Exact weights: --config.model.weights=none
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="h2o_opt6_7b_int4weights",
        model=ModelConfig(path="facebook/opt-6.7b", shape="opt-6.7b", weights="int4"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        data=DataConfig(num_sequences=52, prompt_length=512, new_tokens=512),
    )
