"""The full cache on OPT-30B: what H2O is compared with.

Paper: H2O (arXiv:2306.14048), whose "full" baseline this is. Expected numbers: not yet measured here.
Hardware: as h2o_opt30b, with 14.1 GB for the cache in bfloat16 instead of a sixth of it.
Command: python -m experiments.run --config=full_opt30b --config.mesh=model:8 --config.data.text=FILE
For a TPU that you do not have: python -m experiments.run --config=full_opt30b --topology=v5e:2x4
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="full_opt30b",
        model=ModelConfig(path="facebook/opt-30b", shape="opt-30b"),
        policy=PolicyConfig(name="full"),
        data=DataConfig(num_sequences=8, prompt_length=1024, new_tokens=256),
    )
