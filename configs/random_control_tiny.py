"""Compares scores with random eviction of generated tokens on kvjax-tiny; the prompt is kept.

Paper: arXiv:2609.03430, which keeps the prompt and evicts generated tokens at random, and finds that no score does
better ("the selection signal contributes almost nothing"). Every cache holds the prompt and up to 64 + 15 tokens after
it, and evicts 16 at once, so that all take the same bytes. Tokens after the prompt are those of a book, by teacher
forcing.
Hardware: any CPU; a quarter of an hour on two cores, most of it compilation.
Command: python -m experiments.run --config=random_control_tiny --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig

EVERY = 16  # slots that are evicted at once
SCORES = (
    "random(seed=1, {every})", "window({every})", "h2o({every})", "h2o_decay({every})", "roco({every})",
    "tova(share_heads=False, {every})", "scissorhands({every})", "morphkv(window=16, {every})",
    "rkv(window=8, {every})", "gkv(window=8, {every})", "lazy({every})", "vase({every})", "vase_dkv({every})",
    "expected_attention({every})", "triattention({every})", "qfilters({every})", "lagkv(lag=16, {every})",
    "leverage({every})",
)  # fmt: skip


def get_config() -> ExperimentConfig:
    scores = (each.format(every=f"every={EVERY}") for each in SCORES)
    return ExperimentConfig(
        name="random_control_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name=f"phases(full, random(every={EVERY}))", budget=64),
        baselines=("full", *(f"phases(full, {each})" for each in scores)),
        data=DataConfig(num_sequences=16, prompt_length=128, new_tokens=768),
        repeats=0,
    )
