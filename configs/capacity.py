"""How many rows fit, and at what speed and price: five caches of one decoder on devices that need not be here.

Paper: H2O (arXiv:2306.14048) and RoCo (arXiv:2402.06262), each at a budget of 20 %, beside the full cache, int8, and
H2O in int8. The papers state throughput on other systems; what is here is a bound from shapes and compiled programs.
Expected batches, times and dollars: experiments/measured/capacity/README.md has those of seven decoders.
Hardware: none; two CPU cores for ten minutes, and the libtpu wheel for TPUs.
Command: python -m experiments.capacity --config=capacity --topology=v5e:2x4 --config.model.shape=opt-30b
The plan of one batch of one of the caches:
  python -m experiments.run --config=capacity --topology=v5e:2x4
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="capacity",
        model=ModelConfig(shape="opt-30b"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        storage="int8",
        baselines=("full", "h2o", "roco", "full + int8"),
        data=DataConfig(num_sequences=8, prompt_length=1024, new_tokens=256),
    )
