"""H2O at a budget of 20 % on OPT-6.7B.

Paper: H2O (arXiv:2306.14048). Its abstract states up to 29, 29 and 3 times the throughput of DeepSpeed Zero-Inference,
Hugging Face Accelerate and FlexGen on OPT-6.7B and OPT-30B with 20 % heavy hitters, and up to 1.9 times lower latency
at equal batch size. Those are other systems on other hardware. Expected numbers here: not yet measured.
Hardware: one accelerator with 16 GB in bfloat16 (13.3 GB of weights), or a host with 32 GB in float32.
Command: python -m experiments.run --config=h2o_opt6_7b --config.data.text=FILE
What it would take on a TPU, from shapes alone: add --topology=v5e:2x2
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="h2o_opt6_7b",
        model=ModelConfig(path="facebook/opt-6.7b", shape="opt-6.7b"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        data=DataConfig(num_sequences=8, prompt_length=1024, new_tokens=256),
    )
