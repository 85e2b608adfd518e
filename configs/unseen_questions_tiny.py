"""Asks kvjax-tiny for facts of prompts that were compressed to 30 % before the question was known.

Of the 724 tokens of a question, the first 700 are its prompt. The fact stands in it, 100 to 650 tokens before the end,
and the question in the 24 tokens that are fed after it.

Paper: KVzip (arXiv:2505.23416), which keeps what the model needs to repeat the prompt, and loses little at 30 %, where
methods that choose by the prompt's own attention lose the answers.
Expected: docs/evidence.md.
Hardware: any CPU; five minutes on two cores, most of it compilation.
Command: python -m experiments.after_prompt --config=unseen_questions_tiny --measures=facts
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig

PROMPT, QUESTION = 700, 24  # tokens; the replay of `kvzip` has the positions after the prompt, of 1,024


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="unseen_questions_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="kvzip(chunk=256)", budget=0.3),
        baselines=(
            "full", "snapkv(window=16)", "adakv(kvzip(chunk=256), safeguard=0)", "matched", "h2o", "window",
            "expected_attention", "compactor", "keydiff",
        ),
        data=DataConfig(num_sequences=1, prompt_length=PROMPT, new_tokens=QUESTION),
        recall=RecallConfig(
            tasks=("passkey", "associative", "multi_key"), prompts=64, length=PROMPT + QUESTION, nearest=100,
            farthest=650,
        ),
        repeats=0,
    )  # fmt: skip
