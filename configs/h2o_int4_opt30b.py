"""H2O at a budget of 20 % on OPT-30B, its slots in integers of 4 bits.

Paper: H2O (arXiv:2306.14048), which combines heavy hitters with 4-bit quantisation as in FlexGen (arXiv:2303.06865,
section 4: groups of 64) and reports accuracy on OPT-30B close to that of either alone. Here a slot takes 144 of 512
bytes, and 20 % of the slots are held. The paper's 4-bit weights are not part of this config. Expected numbers: not yet
measured; from shapes, on eight chips of a TPU v5e, 105 MB of cache a chip for the full cache's 1.78 GB, and at most 864
tokens a second for its 721.
Hardware: 59.9 GB of weights in bfloat16, so a TPU v5e 2x4 (8 chips of 16 GB), or one GPU with 80 GB.
Command: python -m experiments.run --config=h2o_int4_opt30b --config.mesh=model:8 --config.data.text=FILE
For a TPU that you do not have: python -m experiments.run --config=h2o_int4_opt30b --topology=v5e:2x4
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="h2o_int4_opt30b",
        model=ModelConfig(path="facebook/opt-30b", shape="opt-30b"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        storage="int4(group=64)",
        data=DataConfig(num_sequences=8, prompt_length=1024, new_tokens=256),
    )
