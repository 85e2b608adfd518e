"""KIVI with 2 bits on LLaMA-2-7B: keys per channel, values per token, the newest 128 exact.

Paper: KIVI (arXiv:2402.02750), which evaluates LLaMA-2-7B with groups of 32 and a residual of 128 and states 2.6 times
less peak memory, weights included, at almost the same quality. A token takes 96 of 512 bytes a head, scales and zeros
included, besides the exact ones. Expected numbers: not yet measured here; from shapes, on four chips of a TPU v5e, 297
MB of cache a chip for the full cache's 1.22 GB, but 1.68 GB of temporaries.
Hardware: one accelerator with 24 GB in bfloat16 (13.5 GB of weights), or a host with 32 GB in float32.
Command: python -m experiments.run --config=kivi_llama2_7b --config.data.text=FILE
(The hub asks for Meta's licence; --config.model.path=FOLDER reads a checkpoint that you have.)
What it would take on a TPU, from shapes alone: add --topology=v5e:2x2
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="kivi_llama2_7b",
        model=ModelConfig(path="meta-llama/Llama-2-7b-hf", shape="llama2-7b"),
        policy=PolicyConfig(name="full"),
        storage="kivi(bits=2, group=32, residual=128)",
        data=DataConfig(num_sequences=4, prompt_length=2048, new_tokens=256),
    )
