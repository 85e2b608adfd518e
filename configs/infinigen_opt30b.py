"""InfiniGen on OPT-30B: everything is kept, and a guess of the query chooses what is read.

Paper: InfiniGen (arXiv:2406.19707, section 5.1): alpha 4 for OPT, a partial weight ratio of 0.3, at most 20 % of
the slots. Figures 14 to 16 are of a pool in host memory; here the pool is in the device's memory. Expected numbers: not
yet measured.
Hardware: 59.9 GB of weights in bfloat16, so a TPU v5e 2x4 (8 chips of 16 GB), or one GPU with 80 GB.
Command: python -m experiments.run --config=infinigen_opt30b --config.data.text=FILE --config.model.skew=SKEW
The skew: python -m experiments.skew --model=facebook/opt-30b --text=SAMPLE --output=SKEW
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="infinigen_opt30b",
        model=ModelConfig(path="facebook/opt-30b", shape="opt-30b"),
        policy=PolicyConfig(name="full"),
        selection="infinigen(alpha=4, ratio=0.3, cap=0.2)",
        data=DataConfig(num_sequences=8, prompt_length=1024, new_tokens=256),
    )
