"""FlexGen on OPT-30B: a model and a cache that are larger than the device, both in host memory.

Paper: FlexGen (arXiv:2303.06865), the setting of H2O's Table 2 and the baseline of InfiniGen's Figures 14 to 16. The
weights of a layer move to the device while the layer before it runs; so do its keys and values, all in every step. The
papers' other rows: --config.storage="int4(memory='host')" for INT4, --config.policy.name=h2o for H2O, and the config
infinigen_opt30b. Expected numbers: not yet measured.
Hardware: 59.4 GB of weights and 14.1 GB of keys and values in host memory (bfloat16); any device with 8 GB.
Command: python -m experiments.run --config=flexgen_opt30b --config.data.text=FILE
For a TPU that you do not have: python -m experiments.run --config=flexgen_opt30b --topology=v5e:1x1
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="flexgen_opt30b",
        model=ModelConfig(path="facebook/opt-30b", shape="opt-30b", host_weights=1.0),
        policy=PolicyConfig(name="full"),
        storage="dense(memory='host')",
        data=DataConfig(num_sequences=8, prompt_length=1024, new_tokens=256),
    )
