"""InfiniGen on OPT-13B: everything is kept, and a guess of the query chooses what is read.

Paper: InfiniGen (arXiv:2406.19707, section 5.1): alpha 4 for OPT, a partial weight ratio of 0.3, at most 20 % of
the slots. The pool is in host memory, as in Figures 14 to 16. Expected numbers: not yet measured.
Hardware: one accelerator with 40 GB in bfloat16 (25.7 GB of weights, 1.3 GB of partial keys); 8.4 GB of host memory.
Command: python -m experiments.run --config=infinigen_opt13b --config.data.text=FILE --config.model.skew=SKEW
The skew: python -m experiments.skew --model=facebook/opt-13b --text=SAMPLE --output=SKEW
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="infinigen_opt13b",
        model=ModelConfig(path="facebook/opt-13b", shape="opt-13b"),
        policy=PolicyConfig(name="full"),
        storage="dense(memory='host')",
        selection="infinigen(alpha=4, ratio=0.3, cap=0.2)",
        data=DataConfig(num_sequences=8, prompt_length=1024, new_tokens=256),
    )
