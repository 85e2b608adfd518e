"""InfiniGen against H2O, a window and the full cache, on kvjax's own small model: reading 2 % of the slots.

Paper: InfiniGen (arXiv:2406.19707); no table of it is at this scale. kvjax-tiny reads recall tasks whose fact lies 700
to 900 tokens back, and a generated story: 768 tokens of prompt, 128 scored. Layers 0 and 1 read everything; the other
four read what a guess chooses, at most 2 % of the slots.
Expected, on a CPU, of 16 prompts: passkey 100 %, multi_key 100 % and associative 88 %, as with the full cache;
perplexity 3.84 for 2.87. h2o and the window keep 20 % and find nothing (perplexity 3.77 and 4.02).
Without a skew: made from a play (Shakespeare), it costs this model recall (passkey 94 %, multi_key 62 %, associative
81 %; perplexity 4.77).
Hardware: any CPU; two minutes on two cores.
Command: python -m experiments.run --config=infinigen_tiny
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="infinigen_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="full"),
        selection="infinigen(alpha=5, ratio=0.3, cap=0.02)",
        baselines=("full", "window(budget=0.2)", "h2o(budget=0.2)"),
        data=DataConfig(num_sequences=4, prompt_length=768, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "multi_key", "associative")),
        repeats=1,
    )
