"""Budgets by each rule of kvjax.analysis.budgets beside uniform ones on kvjax-tiny, at the same mean number of slots.

Every cache holds 160 slots per KV head on average, a quarter of 640 tokens. The first two rules give numbers of slots
to layers; the others choose the two of twelve heads that keep every token, and the other ten keep 4 + 60 slots. All
four were computed from four rows of another book; experiments/measured/notes.md has the calls.

Paper: D2O (arXiv:2406.13035), ZigZagKV (2412.09036), KVzip (2505.23416), DuoAttention (2410.10819); none has this
model.
Expected: experiments/measured/notes.md.
Hardware: any CPU; some five minutes on two cores.
Command: python -m experiments.after_prompt --config=budget_rules_tiny --config.data.text=FILE --against=h2o,window
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig

DENSITY = (172, 32, 201, 156, 205, 194)
ENTROPY = (80, 225, 415, 80, 80, 80)
REPLAY = ((0, 0), (0, 0), (0, 0), (1, 0), (0, 0), (0, 1))
GATES = ((0, 0), (0, 0), (0, 0), (1, 1), (0, 0), (0, 0))


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="budget_rules_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="h2o", budget=160),
        baselines=(
            "full", "window", f"h2o(budget={DENSITY})", f"h2o(budget={ENTROPY})", f"window(budget={DENSITY})",
            f"window(budget={ENTROPY})", f"duo_attention({REPLAY}, sinks=4, recent=60)",
            f"duo_attention({GATES}, sinks=4, recent=60)",
        ),
        data=DataConfig(num_sequences=16, prompt_length=512, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "associative"), prompts=32, length=640, nearest=200, farthest=500),
        repeats=0,
    )  # fmt: skip
