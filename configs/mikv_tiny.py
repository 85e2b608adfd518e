"""MiKV on kvjax-tiny: what h2o evicts is kept with 2 bits.

Paper: MiKV (arXiv:2402.18096), whose claim is that evicted tokens are needed after all and that few bits of them are
enough; no table of it is at this scale. kvjax-tiny reads the recall tasks of h2o_tiny, where h2o at 20 % finds none of
the facts that it has evicted. The baselines are the full cache, and h2o at the same budget, which drops what it evicts.
Expected, on a CPU: perplexity 2.87 with the full cache, 3.77 under h2o and 3.41 with mikv, which holds 32.7 % of the
full cache's bytes for h2o's 17.2; of 16 prompts it finds 69 % of the passkeys, 69 % of the keys by name and 88 % of the
word pairs, where h2o finds none and the full cache 100, 100 and 88 %.
Hardware: any CPU.
Command: python -m experiments.run --config=mikv_tiny
With more bits: --config.storage="mikv(bits=4)"
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="mikv_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        baselines=("full", "h2o"),
        storage="mikv(bits=2, group=16)",
        data=DataConfig(num_sequences=4, prompt_length=768, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "multi_key", "associative")),
        repeats=1,
    )
