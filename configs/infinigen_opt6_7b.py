"""InfiniGen on OPT-6.7B: everything is kept, and a guess of the query chooses what is read.

Paper: InfiniGen (arXiv:2406.19707, section 5.1): alpha 4 for OPT, a partial weight ratio of 0.3, at most 20 % of
the slots. The pool is in host memory, as in Figures 14 to 16. Expected numbers: not yet measured.
Hardware: one accelerator with 24 GB in bfloat16 (13.3 GB of weights, 0.8 GB of partial keys); 5.4 GB of host memory.
Command: python -m experiments.run --config=infinigen_opt6_7b --config.data.text=FILE --config.model.skew=SKEW
The skew: python -m experiments.skew --model=facebook/opt-6.7b --text=SAMPLE --output=SKEW
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="infinigen_opt6_7b",
        model=ModelConfig(path="facebook/opt-6.7b", shape="opt-6.7b"),
        policy=PolicyConfig(name="full"),
        storage="dense(memory='host')",
        selection="infinigen(alpha=4, ratio=0.3, cap=0.2)",
        data=DataConfig(num_sequences=8, prompt_length=1024, new_tokens=256),
    )
