"""CSKV on kvjax's own small model: one latent of both heads, keys in half of their numbers, values in three quarters.

Paper: CSKV (arXiv:2409.10593); no table of it is at this scale. kvjax-tiny reads recall tasks whose fact lies 700
to 900 tokens back, and a generated story: 768 tokens of prompt, 128 scored. Every token is kept, the newest 32 exactly.
Expected, on a CPU, of 16 prompts: perplexity 3.05 for 2.87; passkey 94 %, multi_key 100 % and associative 88 % where
the full cache finds 100, 100 and 88 %; 64 % of its bytes. With directions trained for 50 steps on the paper's
objective, the reconstruction of keys and values, perplexity is 3.00, and on the loss of the next token 3.14.
Hardware: any CPU; about a minute on two cores.
Command: python -m experiments.run --config=cskv_tiny
Directions that are trained, as the paper's are:
  python -m experiments.calibrate --model=kvjax-tiny --dtype=float32 --steps=50 --output=results/cskv.safetensors
    --storage='cskv(rank=64, window=32, value_rank=96)'
  python -m experiments.run --config=cskv_tiny --config.model.calibration=results/cskv.safetensors
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="cskv_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="full"),
        storage="cskv(rank=64, window=32, value_rank=96)",
        baselines=("full",),
        data=DataConfig(num_sequences=4, prompt_length=768, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "multi_key", "associative")),
        repeats=1,
    )
