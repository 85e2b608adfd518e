"""H2O at a budget of 20 % on LLaMA-2-7B.

Paper: H2O (arXiv:2306.14048) evaluates LLaMA among others; LLaMA-2 is later, so no number of it applies. Expected
numbers: not yet measured here.
Hardware: one accelerator with 24 GB in bfloat16 (13.5 GB of weights), or a host with 32 GB in float32.
Command: python -m experiments.run --config=h2o_llama2_7b --config.data.text=FILE
(The hub asks for Meta's licence; --config.model.path=FOLDER reads a checkpoint that you have.)
What it would take on a TPU, from shapes alone: add --topology=v5e:2x2
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="h2o_llama2_7b",
        model=ModelConfig(path="meta-llama/Llama-2-7b-hf", shape="llama2-7b"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        data=DataConfig(num_sequences=4, prompt_length=2048, new_tokens=256),
    )
