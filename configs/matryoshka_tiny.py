"""MatryoshkaKV at its start, on kvjax's own small model: keys in half of a head's directions, values in three quarters.

Paper: MatryoshkaKV (arXiv:2410.14731); no table of it is at this scale. kvjax-tiny reads recall tasks whose fact lies
700 to 900 tokens back, and a generated story: 768 tokens of prompt, 128 scored. Every token is kept. The directions are
those of another story's keys and values (2,048 tokens), and are not trained.
Expected, on a CPU: perplexity 3.52 for the full cache's 2.87; passkey 69 %, multi_key 56 % and associative 50 % of 16
prompts for its 100, 100 and 88 %; 63.8 % of its bytes.
Hardware: any CPU; about a minute on two cores.
Command: python -m experiments.run --config=matryoshka_tiny
Directions that are trained, as the paper's are; perplexity is 3.21 after 100 steps:
  python -m experiments.calibrate --model=kvjax-tiny --dtype=float32 --objective=distillation --steps=100
    --storage='low_rank(key_rank=32, value_rank=48, residual=32)' --output=results/matryoshka.safetensors
  python -m experiments.run --config=matryoshka_tiny --config.model.calibration=results/matryoshka.safetensors
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="matryoshka_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="full"),
        storage="low_rank(key_rank=32, value_rank=48, residual=32)",
        baselines=("full",),
        data=DataConfig(num_sequences=4, prompt_length=768, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "multi_key", "associative")),
        repeats=1,
    )
