"""Compares scores with random eviction of generated tokens on kvjax-tiny; the prompt is kept.

Paper: arXiv:2609.03430, which keeps the prompt and evicts generated tokens at random, and finds that no score does
better ("the selection signal contributes almost nothing"). Every cache holds the prompt and up to 64 + 15 tokens after
it, and evicts 16 at once, so that all take the same bytes. Tokens after the prompt are those of a book, by teacher
forcing.
Expected, of Great Expectations (perplexity; two CPU cores, jax 0.10.2): full 30.59; rkv 31.60, window 31.83,
lazy 32.00, random with the newest 32 protected 32.18, h2o 32.47, tova 32.52, roco 32.92, random 45.68 and 46.95. So
scores are much better than chance here because they keep the newest tokens: see docs/evidence.md.
Hardware: any CPU; ten minutes on two cores, most of it compilation.
Command: python -m experiments.after_prompt --config=random_control_tiny --gap=80 --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig

EVERY = 16  # slots that are evicted at once
SCORES = (
    "random(recent=32, {every})", "random(seed=1, {every})", "window({every})", "h2o({every})", "h2o_decay({every})",
    "roco({every})",
    "tova(share_heads=False, {every})", "scissorhands({every})", "morphkv(window=16, {every})",
    "rkv(window=8, {every})", "gkv(window=8, {every})", "lazy({every})", "vase({every})", "vase_dkv({every})",
    "expected_attention({every})", "triattention({every})", "qfilters({every})", "lagkv(lag=16, {every})",
    "leverage({every})", "rkv(lam=1.0, window=8, {every})", "value_aware(random({every}))",
    "value_aware(window({every}))", "value_aware(h2o({every}))", "vase(large=4, {every})",
)  # fmt: skip


def get_config() -> ExperimentConfig:
    scores = (each.format(every=f"every={EVERY}") for each in SCORES)
    return ExperimentConfig(
        name="random_control_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name=f"random_control(every={EVERY})", budget=64),
        baselines=("full", *(f"phases(full, {each})" for each in scores)),
        data=DataConfig(num_sequences=16, prompt_length=128, new_tokens=768),
        recall=RecallConfig(tasks=("passkey", "associative"), prompts=32, length=640, nearest=100, farthest=320),
        repeats=0,
    )
