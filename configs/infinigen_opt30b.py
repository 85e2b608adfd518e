"""InfiniGen on OPT-30B: everything is kept, and a guess of the query chooses what is read.

Paper: InfiniGen (arXiv:2406.19707, section 5.1): alpha 4 for OPT, a partial weight ratio of 0.3, at most 20 % of
the slots. The pool is in host memory, as in Figures 14 to 16. Expected numbers: not yet measured.
Hardware: 59.9 GB of weights in bfloat16, of which a third is in host memory, with 14.1 GB of keys and values; 2.1 GB of
partial keys are on the device. One accelerator with 48 GB, as the paper's.
Command: python -m experiments.run --config=infinigen_opt30b --config.data.text=FILE --config.model.skew=SKEW
The skew: python -m experiments.skew --model=facebook/opt-30b --text=SAMPLE --output=SKEW
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="infinigen_opt30b",
        model=ModelConfig(path="facebook/opt-30b", shape="opt-30b", host_weights=0.3),
        policy=PolicyConfig(name="full"),
        storage="dense(memory='host')",
        selection="infinigen(alpha=4, ratio=0.3, cap=0.2)",
        data=DataConfig(num_sequences=8, prompt_length=1024, new_tokens=256),
    )
