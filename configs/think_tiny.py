"""ThinK on kvjax's own small model: keys without two fifths of their channels.

Paper: ThinK (arXiv:2407.21018); no table of it is at this scale. kvjax-tiny reads recall tasks whose fact lies 700 to
900 tokens back, and a generated story: 768 tokens of prompt, 128 scored. Every token is kept.
Expected, on a CPU: perplexity 2.83 for the full cache's 2.87, though the text that it writes differs after 40 tokens;
passkey 100 %, multi_key 100 % and associative 88 % of 16 prompts, as with the full cache; 81.2 % of its bytes.
Hardware: any CPU; about a minute on two cores.
Command: python -m experiments.run --config=think_tiny
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="think_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="full"),
        storage="think(ratio=0.4)",
        baselines=("full",),
        data=DataConfig(num_sequences=4, prompt_length=768, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "multi_key", "associative")),
        repeats=1,
    )
