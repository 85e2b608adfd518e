"""H2O against a sliding window and the full cache, on kvjax's own small model: on facts and a story.

Paper: H2O (arXiv:2306.14048); no table of it is at this scale. kvjax-tiny (its card: kvjax/pretrained/kvjax-tiny) reads
recall tasks whose fact lies 700 to 900 tokens back, and a generated story: 768 tokens of prompt, 128 scored.
Expected, on a CPU: perplexity 2.87 with the full cache, 4.02 under a window and 3.77 under h2o; passkey 100 %,
multi_key 100 % and associative 88 % of 16 prompts with the full cache, none of them under the others, which let the
fact go before it is asked for; 17.2 % of the full cache's bytes.
float32 throughout, so that every CPU prints the same digits; on other devices matmuls are asked for in full precision.
Hardware: any CPU; about a minute on two cores.
Command: python -m experiments.run --config=h2o_tiny
With a model and a text of your own:
  python -m experiments.run --config=h2o_tiny --config.model.path=FOLDER --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="h2o_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        baselines=("full", "window"),
        data=DataConfig(num_sequences=4, prompt_length=768, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "multi_key", "associative")),
        repeats=1,
    )
