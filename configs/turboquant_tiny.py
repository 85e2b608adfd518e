"""TurboQuant in 4 bits under H2O, beside int4 and exact slots, on kvjax's own small model.

Paper: TurboQuant (arXiv:2504.19874); no table of it is at this scale. kvjax-tiny reads recall tasks whose fact lies 250
to 450 tokens back, and a generated story: 768 tokens of prompt, 128 scored. h2o keeps half of each prompt.
Expected: perplexity 2.87 under full, 3.26 under h2o, 3.37 with turboquant(4) in a seventh of h2o's bytes; the full
cache finds all of the passkeys and of the word pairs, h2o none.
Hardware: any CPU; two minutes on two cores.
Command: python -m experiments.run --config=turboquant_tiny
Other forms of the same slots:
  python -m experiments.sweep --config=turboquant_tiny \
    --sweep='storage=dense,int8,int4,fp8,mxfp4,turboquant(4),turboquant(3),turboquant(2)'
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="turboquant_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="h2o", budget=0.5),
        storage="turboquant(4)",
        baselines=("full", "h2o"),
        data=DataConfig(num_sequences=4, prompt_length=768, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "associative"), nearest=250, farthest=450),
        repeats=1,
    )
