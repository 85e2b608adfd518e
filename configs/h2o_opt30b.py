"""H2O at a budget of 20 % on OPT-30B.

Paper: H2O (arXiv:2306.14048). Its abstract states up to 29, 29 and 3 times the throughput of DeepSpeed Zero-Inference,
Hugging Face Accelerate and FlexGen on OPT-6.7B and OPT-30B with 20 % heavy hitters, and up to 1.9 times lower latency
at equal batch size. Those are other systems on other hardware. Expected numbers here: not yet measured.
Hardware: 59.9 GB of weights in bfloat16, so a TPU v5e 2x4 (8 chips of 16 GB), or one GPU with 80 GB.
Command: python -m experiments.run --config=h2o_opt30b --config.mesh=model:8 --config.data.text=FILE
On a machine that cannot hold it, the same command says what is missing and compiles the step from shapes alone; for a
TPU that you do not have: python -m experiments.run --config=h2o_opt30b --topology=v5e:2x4
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="h2o_opt30b",
        model=ModelConfig(path="facebook/opt-30b", shape="opt-30b"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        data=DataConfig(num_sequences=8, prompt_length=1024, new_tokens=256),
    )
