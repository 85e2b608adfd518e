"""A chat question over a long text, answered by SmolLM2-135M-Instruct under six caches. `make real` runs this.

The fact that is asked for is told at the beginning of some 900 tokens. Below the table are the answers.

Paper: those of the caches; none has this model.
Expected, on a CPU: see README.md.
Hardware: any CPU; some five minutes on two cores, two with programs kept.
Command: python -m experiments.run --config=real
"""

import numpy as np

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig
from experiments.tasks.story import story
from experiments.tasks.words import HELD_OUT

FACT = "The code of the safe in the harbour is 7214."
QUESTION = "What is the code of the safe in the harbour? Answer with the number."
CHARACTERS = 3600  # of the story, some 850 tokens


def prompt() -> str:
    """The conversation, in the model's chat format."""
    first, rest = story(np.random.default_rng(0), HELD_OUT, CHARACTERS).split(". ", 1)
    text = f"{first}. {FACT} {rest}"
    return (
        "<|im_start|>system\nYou answer questions about a text.<|im_end|>\n"
        f"<|im_start|>user\n{text}\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="real",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        baselines=(
            "full",
            "window",
            "snapkv(window=16)",
            "full + int8",
            "full + quest(page=16, budget=192)",
        ),
        data=DataConfig(prompt=prompt(), num_sequences=1, new_tokens=24),
        repeats=1,
    )
