"""H2O at a budget of 20 % on OPT-125M.

Paper: H2O (arXiv:2306.14048). The paper evaluates OPT from 6.7B upwards; this is the smallest model of the family, the
one that fits anywhere. Expected numbers: not yet measured here.
Hardware: any machine with 2 GB to spare. Time: not yet measured (no checkpoint at hand).
Command: python -m experiments.run --config=h2o_opt125m --config.data.text=FILE
Without the checkpoint, for speed and memory only (random weights): add --config.model.path=none
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="h2o_opt125m",
        model=ModelConfig(path="facebook/opt-125m", shape="opt-125m"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        data=DataConfig(num_sequences=1, prompt_length=512, new_tokens=128),
    )
